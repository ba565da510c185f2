"""Who may do what. The table is over the application's own routes: one that is added joins it."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from tests.covering import parametrize
from tests.service.control_plane_harness import STORE, Service
from thinwire.contract.people import Role
from thinwire.service.auth import OPEN_PATHS, token_hash
from thinwire.service.config import Settings
from thinwire.service.launch.fake import FakeLauncher
from thinwire.service.main import create_app
from thinwire.service.people.tokens import OperatorToken, TokenFileError

OF_OPERATORS = {
    ("POST", "/v1/tokens"),
    ("GET", "/v1/tokens"),
    ("DELETE", "/v1/tokens/{name}"),
    ("PATCH", "/v1/tokens/{name}"),
    ("POST", "/v1/projects"),
    ("PATCH", "/v1/projects/{name}"),
    ("DELETE", "/v1/projects/{name}"),
    ("POST", "/v1/tokens/operator/rotate"),
    ("GET", "/v1/audit"),
}
OF_THE_JOB = {
    ("PUT", "/v1/jobs/{job_id}/workers/{rank}"),
    ("DELETE", "/v1/jobs/{job_id}/workers/{rank}"),
    ("POST", "/v1/jobs/{job_id}/telemetry"),
    ("GET", "/v1/jobs/{job_id}/metrics"),
    ("GET", "/v1/jobs/{job_id}/run"),
    ("GET", "/v1/jobs/{job_id}/files/{name}"),
    ("PUT", "/v1/jobs/{job_id}/files/{name}"),
    ("GET", "/v1/jobs/{job_id}/package"),
    ("POST", "/v1/jobs/{job_id}/log"),
}
"""What the token of a job allows, of that job."""
OF_ANYBODY = {("POST", "/v1/session"), ("GET", "/v1/session"), ("DELETE", "/v1/session")}
"""What every person may, for it is their own session."""
OF_THE_TICKET = {("POST", "/v1/jobs/{job_id}/claim")}
"""What the ticket of an attempt allows, of its job, and nobody else may."""


@pytest.fixture(scope="module")
def routes(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str]]:
    app = create_app(Settings(home=tmp_path_factory.mktemp("routes"), launcher="fake"), FakeLauncher())
    documented = [(method.upper(), path) for path, item in app.openapi()["paths"].items() for method in item]
    return sorted({*documented, ("GET", "/openapi.json"), ("GET", "/docs"), ("GET", "/")})


def _at(path: str, job_id: str) -> str:
    """An address of this path. Of a stream what there is now: one that is followed has no end."""
    return (
        path.replace("{job_id}", job_id)
        .replace("{rank}", "0")
        .replace("{name}", "loss.png")
        .replace("{sha256}", "0" * 64)
    ) + ("?follow=false" if path.endswith(("/events", "/logs/stream")) else "")


def _needed(route: tuple[str, str]) -> Role:
    if route in OF_OPERATORS:
        return Role.OPERATOR
    return Role.VIEWER if route[0] == "GET" or route in OF_ANYBODY else Role.USER


def _is_allowed(route: tuple[str, str], caller: Role | str) -> bool:
    if isinstance(caller, Role):
        return caller.allows(_needed(route)) and route not in OF_THE_TICKET
    return (caller == "the job" and route in OF_THE_JOB) or (caller == "its ticket" and route in OF_THE_TICKET)


def test_each_caller_may_do_what_the_table_says_and_no_more(far: Service, routes: list[tuple[str, str]]) -> None:
    """Over every route of the application: one that is added joins, as one of people alone."""
    assert set(routes) >= OF_OPERATORS | OF_THE_JOB | OF_THE_TICKET
    job, other = far.running(**STORE), far.running(**STORE)
    callers: dict[Role | str, dict[str, str]] = {
        **{role: far.person(f"a-{role}", role) for role in Role},
        "the job": far.job_headers(job),
        "another job": far.job_headers(other),
        "its ticket": far.ticket_headers(job),
        "another ticket": far.ticket_headers(other),
    }
    for route in routes:
        if route[1] in OPEN_PATHS:
            continue
        for caller, headers in callers.items():
            if route == ("POST", "/v1/tokens/operator/rotate") and caller is Role.OPERATOR:
                continue
            answer = far.client.request(route[0], _at(route[1], job), headers=headers)
            assert (answer.status_code == 403) is not _is_allowed(route, caller), (route, caller, answer.text)
            assert answer.status_code not in (401, 500), (route, caller)
            if answer.status_code == 403:
                assert answer.json()["code"] == "forbidden"
                if isinstance(caller, Role) and route not in OF_THE_TICKET:
                    said = f"'a-{caller}' has the role {caller}, and this takes the role {_needed(route)}"
                    assert said in answer.json()["message"]


@parametrize("header", [None, "", "Bearer", "Bearer ", "Basic abc", "Bearer wrong", "Bearer na\xefve"], usual=[0, 5])
def test_every_route_but_the_open_ones_needs_a_known_token(
    service: Service, routes: list[tuple[str, str]], header: str | None
) -> None:
    job_id = service.submit()
    del service.client.headers["Authorization"]
    headers = [] if header is None else [(b"Authorization", header.encode("latin-1"))]
    for method, path in routes:
        if path == "/readyz":
            service.turn()  # a launcher that nobody has asked for ten seconds is silent, and this may take longer
        answer = service.client.request(method, _at(path, job_id), headers=headers)
        if path in OPEN_PATHS:
            assert answer.status_code == 200, (method, path)
        else:
            assert answer.status_code == 401, (method, path)
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.json()["code"] == "unauthorized"


def test_a_path_without_a_route_is_closed_too(service: Service) -> None:
    del service.client.headers["Authorization"]
    for path in ("/v1", "/v1/jobs/", "/web", "/webx", "/docs/", "http://testserver//healthz", "/admin", "/redoc"):
        assert service.client.get(path, follow_redirects=False).status_code == 401, path


def test_nothing_is_read_of_a_request_without_a_token(service: Service) -> None:
    del service.client.headers["Authorization"]
    assert service.client.post("/v1/jobs", content=b"{").status_code == 401
    assert service.client.post("/v1/jobs", content=b" " * (2 << 20)).status_code == 401


def test_a_jobs_token_does_not_tell_whether_another_job_exists(service: Service) -> None:
    headers = service.job_headers(service.submit())
    assert service.client.post("/v1/jobs/none/telemetry", json={"attempt": 1}, headers=headers).status_code == 403


def test_the_scheme_is_not_case_sensitive(service: Service) -> None:
    headers = {"Authorization": f"bearer {service.token}"}
    assert service.client.get("/v1/jobs", headers=headers).status_code == 200


def test_every_operation_but_the_open_ones_documents_its_scheme_and_its_errors(service: Service) -> None:
    document = service.client.get("/openapi.json").json()
    for path, item in document["paths"].items():
        for method, operation in item.items():
            if path in OPEN_PATHS:
                assert "security" not in operation, (method, path)
                continue
            assert operation["security"], (method, path)
            for status in ("401", "403"):
                schema = operation["responses"][status]["content"]["application/json"]["schema"]
                assert schema == {"$ref": "#/components/schemas/ErrorBody"}, (method, path)
            if "422" in operation["responses"]:
                schema = operation["responses"]["422"]["content"]["application/json"]["schema"]
                assert schema == {"$ref": "#/components/schemas/ErrorBody"}, (method, path)


def test_the_operators_token_is_made_once_and_private(tmp_path: Path) -> None:
    path = tmp_path / "home" / "token"
    held = OperatorToken(path)
    assert len(path.read_text().strip()) >= 40
    assert OperatorToken(path).hash == held.hash == token_hash(path.read_text().strip())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_an_empty_token_file_opens_nothing(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("\n")
    with pytest.raises(TokenFileError, match="remove the file"):
        OperatorToken(tmp_path / "token")
