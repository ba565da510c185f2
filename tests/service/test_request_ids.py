"""Each request has a name, in its answer, in its error and in the log."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from tests.service.control_plane_harness import Service, spec
from thinwire.contract.logs import JsonLines
from thinwire.service.request_ids import RequestIds

PROXY = ("127.0.0.0/8",)


@pytest.fixture(scope="module")
def behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service behind a proxy that it trusts."""
    started = Service(tmp_path_factory.mktemp("behind") / "home", trusted_proxies=PROXY)
    yield started
    started.close()


class Lines(logging.Handler):
    """What is logged, as it would be written."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(JsonLines())
        self.lines: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.startswith("thinwire"):  # the client of a test logs, too
            self.lines.append(json.loads(self.format(record)))


@pytest.fixture
def logged() -> Iterator[list[dict[str, Any]]]:
    handler, root = Lines(), logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    yield handler.lines
    root.setLevel(level)
    root.removeHandler(handler)


def test_names_differ_and_are_in_answers_and_errors(shared_service: Service) -> None:
    client = shared_service.client
    names = [client.get("/healthz").headers["X-Request-ID"] for _ in range(3)]
    assert len(set(names)) == 3
    strangers: dict[str, str] = {"Authorization": "Bearer wrong"}
    for answer in (
        client.get("/v1/jobs/none"),
        client.post("/v1/jobs", json={}),
        client.post("/v1/jobs", content=b"\xff", headers={"Content-Type": "application/json"}),
        client.get("/v1/nothing"),
        client.get("/v1/jobs", headers=strangers),
        client.delete("/v1/jobs"),
    ):
        assert answer.status_code >= 400
        assert answer.json()["request_id"] == answer.headers["X-Request-ID"], answer.text


@pytest.mark.parametrize("given", ["Root=1-67891233-abcdef012345678912345678", "a", "9f0c:7/3@x+y.z_w-"])
def test_a_trusted_proxy_names_requests(behind: Service, given: str) -> None:
    assert behind.client.get("/healthz", headers={"X-Request-ID": given}).headers["X-Request-ID"] == given


@pytest.mark.parametrize(
    "given",
    ["", " ", "a b", "a" * 129, "{}", "-x", "a,b", "a\x1b[31m", "\xe9", "ghp_0123456789abcdefABCDEF0123456789abcd"],
)
def test_what_is_no_plain_word_is_not_taken(behind: Service, given: str) -> None:
    name = behind.client.get("/healthz", headers={b"X-Request-ID": given.encode("latin-1")}).headers["X-Request-ID"]
    assert name != given
    assert len(name) == 16


def test_neither_a_second_name_nor_that_of_a_stranger_is_taken(behind: Service, shared_service: Service) -> None:
    twice = [("X-Request-ID", "one"), ("X-Request-ID", "two")]
    assert len(behind.client.get("/healthz", headers=twice).headers["X-Request-ID"]) == 16
    assert shared_service.client.get("/healthz", headers={"X-Request-ID": "mine"}).headers["X-Request-ID"] != "mine"


@pytest.mark.parametrize(
    ("peer", "taken"),
    [("10.0.0.7", True), ("::ffff:10.0.0.7", True), ("10.0.0.8", False), ("::1", False), ("unix", False), ("", False)],
)
def test_the_peer_is_the_proxy_itself(peer: str, taken: bool) -> None:
    from ipaddress import IPv4Network

    middleware = RequestIds(None, [IPv4Network("10.0.0.7/32")])  # type: ignore[arg-type]
    scope = {"type": "http", "client": (peer, 1), "headers": [(b"x-request-id", b"abc")]}
    assert (middleware._given(scope) == "abc") is taken


def test_the_lines_of_a_request_have_its_name_and_who_asks(service: Service, logged: list[dict[str, Any]]) -> None:
    anna = service.person("anna")
    logged.clear()
    answer = service.client.post("/v1/jobs", json=spec(), headers=anna)
    assert {line["event"] for line in logged} == {"job_accepted", "audit"}
    assert {line["request_id"] for line in logged} == {answer.headers["X-Request-ID"]}
    assert {line["person"] for line in logged} == {"anna"}
    logged.clear()
    refused = service.client.get("/v1/jobs/no%0Ane", headers=anna)
    assert [line["event"] for line in logged] == ["request_refused"]
    assert logged[-1]["path"] == "/v1/jobs/no\nne"
    assert logged[-1]["request_id"] == refused.json()["request_id"]
    logged.clear()
    service.turn()
    assert [line for line in logged if "request_id" in line] == [], "the reconciler is no request"


def test_a_failure_of_the_service_names_its_request_to_the_person(
    service: Service, logged: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("a fault")

    monkeypatch.setattr(service.plane.jobs, "get", fails)
    answer = service.client.get("/v1/jobs/any")
    assert answer.status_code == 500
    assert "a fault" not in answer.text
    assert answer.json()["request_id"] == answer.headers["X-Request-ID"]


def test_strangers_fill_no_log_and_who_is_refused_again_and_again_little(
    service: Service, logged: list[dict[str, Any]]
) -> None:
    for _ in range(20):
        service.client.get("/v1/jobs/none", headers={"Authorization": "Bearer wrong"})
    assert [line for line in logged if line.get("event") == "request_refused"] == []
    for _ in range(150):
        service.client.get("/v1/jobs/none")
    assert 100 <= len([line for line in logged if line.get("event") == "request_refused"]) < 140
