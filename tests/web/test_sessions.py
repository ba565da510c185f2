"""The session of a browser: how it begins and ends, and what a cookie allows that other pages can send along too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from tests.service.control_plane_harness import SERVICE_URL, Service, spec
from thinwire.service.config import Settings
from thinwire.service.launch.fake import FakeLauncher
from thinwire.service.main import create_app
from thinwire.service.web.headers import HEADERS
from thinwire.service.web.sessions import MOST_OF_TOKEN, SessionRow

HOURS = 3600.0
SAME = {"Sec-Fetch-Site": "same-origin"}


class Browser:
    """Keeps the cookie and sends it along, as a browser does, and no token."""

    def __init__(self, service: Service, token: str | None = None) -> None:
        self.service = service
        self.begun = service.client.post("/v1/session", headers=_bearer(token or service.token))
        assert self.begun.status_code == 201, self.begun.text
        self.cookie = self.begun.headers["set-cookie"].partition(";")[0]
        service.client.cookies.clear()

    def send(self, method: str, path: str, headers: dict[str, str] | None = None, **more: Any) -> Any:
        kept = self.service.client.headers.pop("Authorization")
        try:
            headers = {"Cookie": self.cookie, **(SAME if headers is None else headers)}
            return self.service.client.request(method, path, headers=headers, **more)
        finally:
            self.service.client.headers["Authorization"] = kept
            self.service.client.cookies.clear()


def _bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def test_a_session_is_worth_its_token_and_no_more(service: Service) -> None:
    viewer = service.person("anna", "viewer")["Authorization"].partition(" ")[2]
    anna = Browser(service, viewer)
    found = anna.send("GET", "/v1/session").json()
    assert (found["name"], found["role"]) == ("anna", "viewer")
    assert found["expires_at"].startswith("2027-01-15T20:00:00")  # twelve hours after the harness's clock
    assert anna.send("GET", "/v1/jobs").status_code == 200
    assert anna.send("POST", "/v1/jobs", json=spec()).status_code == 403
    assert anna.send("GET", "/v1/tokens").status_code == 403
    service.client.delete("/v1/tokens/anna")
    refused = anna.send("GET", "/v1/jobs")
    assert refused.status_code == 401
    assert "'anna', was revoked" in refused.json()["message"]


def test_sessions_end_with_time_with_their_token_and_by_themselves(service: Service) -> None:
    operator, other = Browser(service), Browser(service)
    assert operator.send("DELETE", "/v1/session").status_code == 204
    assert "Max-Age=0" in operator.send("DELETE", "/v1/session", headers=_bearer(service.token)).headers["set-cookie"]
    assert operator.send("GET", "/v1/jobs").status_code == 401
    assert other.send("GET", "/v1/jobs").status_code == 200
    token = service.client.post("/v1/tokens/operator/rotate").json()["token"]
    service.client.headers.update(_bearer(token))
    assert "no longer taken" in other.send("GET", "/v1/jobs").json()["message"]
    service.token = token
    late = Browser(service)
    service.clock.pass_(12 * HOURS)
    assert "has run out" in late.send("GET", "/v1/jobs").json()["message"]
    service.plane.sessions.prune()
    with service.plane.db.read() as session:
        assert session.scalars(select(SessionRow)).all() == []


def test_the_cookie_is_kept_as_its_hash_and_no_script_can_read_it(service: Service) -> None:
    browser = Browser(service)
    said = browser.begun.headers["set-cookie"]
    name, _, rest = said.partition("=")
    value, *attributes = rest.split("; ")
    assert name == "thinwire_session"
    assert attributes == [f"Max-Age={12 * 3600}", "HttpOnly", "SameSite=Strict"]  # no Path: that of the API
    assert value not in browser.begun.text
    with service.plane.db.read() as session:
        row = session.scalars(select(SessionRow)).one()
        assert value not in str(vars(row))
        assert service.token not in str(vars(row))
    tls = service.client.post("https://testserver/v1/session").headers["set-cookie"]
    proxied = service.client.post("/v1/session", headers={"Origin": "https://thinwire.example"}).headers["set-cookie"]
    assert tls.endswith("; Secure")
    assert proxied.endswith("; Secure")
    port = service.client.post("/v1/session", headers={"Host": "127.0.0.1:8400"}).headers["set-cookie"]
    assert port.startswith("thinwire_session_8400=")


@pytest.mark.parametrize(
    ("headers", "done"),
    [
        (SAME, True),
        ({"Origin": "http://testserver"}, True),
        ({}, False),
        ({"Origin": "http://testserver:8080"}, False),
        ({"Origin": "null"}, False),
        ({"Origin": "http://evil.example"}, False),
        ({"Sec-Fetch-Site": "same-site", "Origin": "http://testserver"}, False),
        ({"Sec-Fetch-Site": "cross-site"}, False),
        ({"Sec-Fetch-Site": "none"}, False),
    ],
)
def test_another_page_changes_nothing_by_the_cookie(
    shared_service: Service, headers: dict[str, str], done: bool
) -> None:
    browser = Browser(shared_service)
    answer = browser.send("POST", "/v1/jobs/none/cancel", headers)
    assert answer.status_code == (404 if done else 403), answer.text
    if not done:
        assert "not from the service's own page" in answer.json()["message"]
    assert browser.send("GET", "/v1/jobs", headers).status_code == 200


def test_a_header_wins_over_the_cookie_and_a_cookie_begins_no_session(shared_service: Service) -> None:
    browser = Browser(shared_service)
    assert browser.send("GET", "/v1/jobs", {"Authorization": "Bearer wrong"}).status_code == 401
    assert browser.send("GET", "/v1/jobs", {"Authorization": ""}).status_code == 401
    longer = browser.send("POST", "/v1/session")
    assert longer.status_code == 403
    assert "begins with a token" in longer.json()["message"]


def test_what_is_no_persons_gets_no_session(far: Service) -> None:
    from tests.service.control_plane_harness import STORE

    job = far.running(**STORE)
    for headers in (far.job_headers(job), far.ticket_headers(job)):
        assert far.client.post("/v1/session", headers=headers).status_code == 403


def test_guessed_cookies_count_as_wrong_tokens(service: Service) -> None:
    del service.client.headers["Authorization"]
    answers = [
        service.client.get("/v1/jobs", headers={"Cookie": f"thinwire_session=guess-{at}"}).status_code
        for at in range(60)
    ]
    assert answers[0] == 401
    assert answers[-1] == 429


def test_one_token_has_so_many_sessions(service: Service) -> None:
    first = Browser(service)
    for _ in range(MOST_OF_TOKEN):
        service.clock.pass_(1.0)
        last = Browser(service)
    assert first.send("GET", "/v1/jobs").status_code == 401
    assert last.send("GET", "/v1/jobs").status_code == 200


def test_each_answer_says_what_browsers_may_do_with_it(service: Service) -> None:
    def broken() -> None:
        raise RuntimeError("broken")

    def answers() -> list[Any]:
        paths = ["/", "/docs", "/web/app.js", "/web/none.js", "/docs/files/swagger-ui.css", "/openapi.json", "/v1/jobs"]
        return [service.client.get(path) for path in [*paths, "/none", "/healthz"]]

    for answer in [*answers(), service.client.get("/v1/jobs", headers={"Authorization": "Bearer wrong"})]:
        assert {name: answer.headers.get(name) for name in HEADERS} == HEADERS, answer.url
    assert service.client.get("/v1/jobs").headers["cache-control"] == "no-store"
    service.plane.jobs.list = broken  # type: ignore[assignment]
    failed = service.client.get("/v1/jobs")
    assert failed.status_code == 500
    assert {name: failed.headers.get(name) for name in HEADERS} == HEADERS


def test_a_session_outlives_the_service_and_names_its_dashboards(tmp_path: Path) -> None:
    service = Service(tmp_path / "home", grafana_url="https://grafana.example/d/1", session_hours=1.0)
    browser = Browser(service)
    service.close()
    service.open()
    try:
        found = browser.send("GET", "/v1/session").json()
        assert found["grafana_url"] == "https://grafana.example/d/1"
        service.clock.pass_(1 * HOURS)
        assert browser.send("GET", "/v1/session").status_code == 401
    finally:
        service.close()


def test_the_document_of_the_api_has_the_session(tmp_path: Path) -> None:
    app = create_app(Settings(home=tmp_path, launcher="fake"), FakeLauncher(), service_url=SERVICE_URL)
    assert set(app.openapi()["paths"]["/v1/session"]) == {"get", "post", "delete"}
    assert "/" not in app.openapi()["paths"]
    assert "thinwire_session" not in json.dumps(app.openapi())
