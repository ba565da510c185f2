"""The client finds the server by itself and turns every failure into one clear error."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.service.control_plane_harness import spec
from tests.service.live_service import LiveService
from thinwire.cli.job_ids import offered
from thinwire.client import (
    AmbiguousId,
    ApiError,
    BadAnswer,
    Client,
    NoText,
    NotFound,
    Rejected,
    Server,
    Unauthorized,
    Unreachable,
    WrongEnvironment,
    calls,
    find_server,
)
from thinwire.client import home as home_folder
from thinwire.client.streams import follow
from thinwire.contract.jobs import JobState
from thinwire.service.config import Settings


def answering(reply: Callable[[httpx.Request], httpx.Response]) -> Client:
    return Client(lambda: Server("http://127.0.0.1:1", "secret"), transport=httpx.MockTransport(reply))


def error_body(status: int, **changes: Any) -> Callable[[httpx.Request], httpx.Response]:
    body = {"code": "a_code", "message": "what is wrong", "problems": [], **changes}
    return lambda request: httpx.Response(status, json=body)


def test_a_job_goes_from_submission_to_cancellation(live: LiveService) -> None:
    with Client() as client:
        job = client.submit(spec(), "key-1")
        assert client.submit(spec(), "key-1").id == job.id
        assert [found.id for found in client.jobs()] == [job.id]
        assert client.job(job.id).state is JobState.SUBMITTING
        assert client.history(job.id).samples == []
        assert client.logs(job.id).text == ""
        assert client.cancel(job.id).state is JobState.CANCELLING


def test_the_server_is_found_again_on_another_port(live: LiveService) -> None:
    with Client(timeout_s=5.0) as client:
        client.submit(spec(), "key-1")
        port = live.port
        live.vanish()
        with pytest.raises(Unreachable, match=str(port)):
            client.jobs()
        live.listen()
        assert live.port != port
        assert len(client.jobs()) == 1


def test_an_id_may_be_shortened_as_long_as_it_is_unique(live: LiveService) -> None:
    first, second = live.service.submit(name="one"), live.service.submit(name="one-more")
    with Client() as client:
        assert client.resolve(second[:6]).id == second
        assert client.resolve(first).id == first
        with pytest.raises(AmbiguousId, match=first):
            client.resolve("one")
        for unknown in ("two", "", "../healthz", "one/logs"):
            with pytest.raises(NotFound, match="thinwire jobs"):
                client.resolve(unknown)


def test_an_id_is_found_behind_any_number_of_labels_and_people_with_its_beginning(
    live: LiveService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "MOST", 2)
    first = live.service.submit(name="vision-run")
    for _ in range(2):
        live.service.submit(name="other", labels={"team": "vision-run"})
    with Client() as client:
        for beginning in ("v", "vision-run", first[:-1], first):
            assert client.resolve(beginning).id == first, beginning
        second = live.service.submit(name="vision-run")
        with pytest.raises(AmbiguousId, match=first):
            client.resolve("vision-run")
        assert len(client.beginning("vision", 1)) == 1
    assert {job_id for job_id, _ in offered("vision-run-")} == {first, second}


@pytest.mark.parametrize("token", ["secret\nend", "secret ", "secret\u2026", "sec\ret", "sec\0ret"])
def test_a_token_that_no_header_can_hold_is_refused_without_a_part_of_it(token: str) -> None:
    """No part of it stands in the error or its causes, and nobody waits for the service to take it."""
    with Client(Server("http://127.0.0.1:1", token)) as client:
        for ask in (lambda: client.wait(["a-1"]), lambda: next(follow(client, "a-1", "events"))):
            with pytest.raises(NoText) as refused:
                ask()
            assert "sec" not in "".join(traceback.format_exception(refused.value, limit=0))
        with pytest.raises(NoText, match="idempotency key"):
            Client(Server("http://127.0.0.1:1", "right")).submit({}, "a\nb")


@pytest.mark.parametrize("url", ["train.example", "ftp://train.example", ""])
def test_an_address_that_cannot_be_asked_is_not_waited_for(url: str) -> None:
    with Client(Server(url, "secret")) as client, pytest.raises(NoText, match="http://"):
        client.wait(["a-1"])


def test_an_address_may_end_with_a_slash() -> None:
    assert Server("https://train.example/", "secret").url == "https://train.example"


@pytest.mark.parametrize("wrong", ["", ".", ".."])
def test_an_id_that_would_name_another_path_asks_nothing(wrong: str) -> None:
    def never(request: httpx.Request) -> httpx.Response:
        raise AssertionError(request.url)

    with answering(never) as client:
        asks: list[Callable[[], object]] = [
            lambda: client.job(wrong),
            lambda: client.delete(wrong),
            lambda: client.told_of_job(wrong),
            lambda: next(follow(client, wrong, "events")),
            lambda: client.revoke_token(wrong),
            lambda: client.package(wrong),
            lambda: client.checkpoint_file("a-1", wrong, "manifest.json", Path("x")),
        ]
        for ask in asks:
            with pytest.raises(NotFound):
                ask()


def test_every_problem_of_a_refused_spec_is_kept(live: LiveService) -> None:
    with Client() as client, pytest.raises(Rejected) as refused:
        client.submit({**spec(steps=0), "stepz": 3}, "key-1")
    assert {problem.path for problem in refused.value.problems} == {"steps", "stepz"}
    assert live.service.client.get("/v1/jobs").json()["jobs"] == []


def test_without_a_server_the_message_says_how_to_start_one(home: Path) -> None:
    with Client() as client, pytest.raises(Unreachable, match=r"(?s)server\.json.*thinwire serve"):
        client.jobs()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"url": "http://x"}', '{"url": "http://x", "pid": "y"}'])
def test_a_broken_server_file_is_unreachable_not_a_crash(home: Path, content: str) -> None:
    home.mkdir()
    (home / "server.json").write_text(content)
    with pytest.raises(Unreachable, match="server"):
        find_server()


def test_a_server_without_a_token_file_is_unreachable(home: Path) -> None:
    home.mkdir()
    (home / "server.json").write_text(json.dumps({"url": "http://127.0.0.1:1", "pid": 1}))
    with pytest.raises(Unreachable, match="token"):
        find_server()


def test_the_environment_wins_over_the_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THINWIRE_URL", "https://train.example/")
    monkeypatch.setenv("THINWIRE_TOKEN", "abc")
    assert find_server() == Server("https://train.example", "abc")


def test_the_token_of_the_home_is_not_sent_to_another_machine(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home.mkdir()
    (home / "token").write_text("secret\n")
    monkeypatch.setenv("THINWIRE_URL", "http://127.0.0.1:8400")
    assert find_server().token == "secret"
    monkeypatch.setenv("THINWIRE_URL", "http://train.example")
    with pytest.raises(WrongEnvironment, match="THINWIRE_TOKEN"):
        find_server()


@pytest.mark.parametrize(("name", "value"), [("THINWIRE_URL", "train.example"), ("THINWIRE_HOME", "~nobody-here/x")])
def test_a_wrong_variable_is_named_with_its_value(
    home: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(WrongEnvironment, match=f"(?s){name}.*{value}"):
        find_server()


@pytest.mark.parametrize("named", [None, "", "~/here", "there", "/elsewhere"])
def test_a_client_looks_where_the_service_keeps_its_home(monkeypatch: pytest.MonkeyPatch, named: str | None) -> None:
    monkeypatch.delenv("THINWIRE_HOME", raising=False)
    if named is not None:
        monkeypatch.setenv("THINWIRE_HOME", named)
    assert home_folder() == Settings().home


@pytest.mark.parametrize(
    ("status", "kind"),
    [(401, Unauthorized), (403, Unauthorized), (404, NotFound), (409, ApiError), (422, Rejected), (500, ApiError)],
)
def test_each_refusal_has_its_error_with_the_services_words(status: int, kind: type[ApiError]) -> None:
    with answering(error_body(status)) as client, pytest.raises(kind, match="what is wrong") as refused:
        client.jobs()
    assert (refused.value.status, refused.value.code) == (status, "a_code")


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_not_now_is_unreachable_since_trying_again_may_help(status: int) -> None:
    with answering(error_body(status)) as client, pytest.raises(Unreachable, match="what is wrong"):
        client.jobs()


def test_a_proxys_page_is_cut_to_its_first_line() -> None:
    page = "Bad Gateway of a proxy\n" + "<html>" * 1000
    with answering(lambda request: httpx.Response(400, text=page)) as client, pytest.raises(ApiError) as refused:
        client.jobs()
    assert str(refused.value) == "Bad Gateway of a proxy"


@pytest.mark.parametrize("content", [b"", b"hello", b'{"jobs": [{"id": 1}]}'])
def test_an_answer_of_something_else_is_not_taken_for_ours(content: bytes) -> None:
    with answering(lambda request: httpx.Response(200, content=content)) as client, pytest.raises(BadAnswer):
        client.jobs()


def test_a_server_that_does_not_answer_in_time_is_unreachable() -> None:
    def slow(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadTimeout("late", request=request)

    with answering(slow) as client, pytest.raises(Unreachable, match="in time"):
        client.jobs()


def test_the_token_is_in_no_error_message() -> None:
    for status in (401, 404, 409, 422, 500, 503):
        with answering(error_body(status)) as client, pytest.raises(Exception) as refused:  # noqa: PT011
            client.jobs()
        assert "secret" not in str(refused.value)


def test_readiness_gives_the_services_reason() -> None:
    with answering(error_body(503, message="launcher: it is starting")) as client:
        assert client.not_ready() == "launcher: it is starting"
    with answering(lambda request: httpx.Response(200, json={})) as client:
        assert client.not_ready() is None


def test_a_proxy_of_the_machine_does_not_stand_before_loopback(
    live: LiveService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    with Client() as client:
        assert client.jobs() == []
