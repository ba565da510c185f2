"""Who may do what. The matrix is over the application's own routes: one that is added joins it."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from tests.covering import parametrize
from tests.service.control_plane_harness import Service, spec
from thinwire.service.auth import OPEN_PATHS, token_hash
from thinwire.service.config import Settings
from thinwire.service.launch.fake import FakeLauncher
from thinwire.service.main import create_app
from thinwire.service.people.operator_file import OperatorToken, TokenFileError

REPORTS = {
    ("PUT", "/v1/jobs/{job_id}/workers/{rank}"),
    ("DELETE", "/v1/jobs/{job_id}/workers/{rank}"),
    ("POST", "/v1/jobs/{job_id}/telemetry"),
}
OF_ITS_JOB = {
    ("GET", "/v1/jobs/{job_id}/metrics"): 200,
    ("GET", "/v1/jobs/{job_id}/run"): 200,
    ("GET", "/v1/jobs/{job_id}/files/{name}"): 404,  # none is kept so far
    ("GET", "/v1/jobs/{job_id}/package"): 404,  # it runs no script
    ("PUT", "/v1/jobs/{job_id}/files/{name}"): 415,  # plain bytes, and this is JSON
    ("POST", "/v1/jobs/{job_id}/log"): 415,
}
"""What a run that shares no folder with the service may do beside, and what the request below is answered."""


def _routes(tmp: Path) -> list[tuple[str, str]]:
    app = create_app(Settings(home=tmp, launcher="fake"), FakeLauncher())
    documented = [(method.upper(), path) for path, item in app.openapi()["paths"].items() for method in item]
    documents = [("GET", path) for path in ("/openapi.json", "/docs")]
    return sorted({*documented, *documents})


@pytest.fixture(scope="module")
def routes(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str]]:
    return _routes(tmp_path_factory.mktemp("routes"))


def _at(path: str, job_id: str) -> str:
    return (
        path.replace("{job_id}", job_id)
        .replace("{rank}", "0")
        .replace("{name}", "loss.png")
        .replace("{sha256}", "0" * 64)
    )


def test_every_route_of_the_issue_is_there(routes: list[tuple[str, str]]) -> None:
    assert set(routes) >= REPORTS | {
        ("POST", "/v1/jobs"),
        ("GET", "/v1/jobs"),
        ("GET", "/v1/jobs/{job_id}"),
        ("PATCH", "/v1/jobs/{job_id}"),
        ("POST", "/v1/jobs/{job_id}/cancel"),
        ("GET", "/v1/jobs/{job_id}/logs"),
        ("GET", "/v1/jobs/{job_id}/metrics"),
        ("GET", "/v1/metrics/targets"),
        ("GET", "/metrics"),
        ("GET", "/healthz"),
        ("GET", "/readyz"),
    }


@parametrize("header", [None, "", "Bearer", "Bearer ", "Basic abc", "Bearer wrong", "Bearer na\xefve"], usual=[0, 5])
def test_every_route_but_the_open_ones_needs_a_known_token(
    service: Service, routes: list[tuple[str, str]], header: str | None
) -> None:
    job_id = service.submit()
    del service.client.headers["Authorization"]
    headers = [] if header is None else [(b"Authorization", header.encode("latin-1"))]
    for method, path in routes:
        answer = service.client.request(method, _at(path, job_id), headers=headers)
        if path in OPEN_PATHS:
            assert answer.status_code == 200, (method, path)
        else:
            assert answer.status_code == 401, (method, path)
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.json()["code"] == "unauthorized"


def test_a_path_without_a_route_is_closed_too(service: Service) -> None:
    del service.client.headers["Authorization"]
    for path in ("/", "/v1", "/v1/jobs/", "/docs/", "//healthz", "/admin", "/redoc"):
        assert service.client.get(path, follow_redirects=False).status_code == 401, path


def test_nothing_is_read_of_a_request_without_a_token(service: Service) -> None:
    del service.client.headers["Authorization"]
    assert service.client.post("/v1/jobs", content=b"{").status_code == 401
    assert service.client.post("/v1/jobs", content=b" " * (2 << 20)).status_code == 401


def test_a_jobs_token_allows_its_own_reports_and_nothing_else(service: Service, routes: list[tuple[str, str]]) -> None:
    job_id, other = service.running(), service.running()
    headers = service.job_headers(job_id)
    body = {"PUT": {"address": "127.0.0.1:1", "attempt": 1, "pid": 1, "node": "n"}, "POST": {"attempt": 1}}
    for method, path in routes:
        if path in OPEN_PATHS:
            continue
        own = service.client.request(method, _at(path, job_id), json=body.get(method), headers=headers)
        foreign = service.client.request(method, _at(path, other), json=body.get(method), headers=headers)
        expected = 204 if (method, path) in REPORTS else OF_ITS_JOB.get((method, path), 403)
        assert own.status_code == expected, (method, path)
        assert foreign.status_code == 403, (method, path)
        assert foreign.json()["code"] == "forbidden"


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


def test_submitting_needs_no_more_than_the_operators_token(service: Service) -> None:
    assert service.client.post("/v1/jobs", json=spec()).status_code == 202
