"""Streams at the command line: read in parts that end anywhere, made again where they break, and done without."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.cli.command_line import Run
from tests.service.control_plane_harness import sample, wait_until
from tests.service.live_service import LiveService
from thinwire.cli import watch as watching
from thinwire.cli.events import line
from thinwire.client import AsyncClient, BadAnswer, Client, Server, server_of
from thinwire.client.bell import Bell, Rings
from thinwire.client.streams import MOST_BYTES, Parser, follow, followed
from thinwire.contract.streams import Told

STREAM = (
    b"\xef\xbb\xbf: a comment\r\nretry: 10\nid: 1\n\n"
    b'event: state\rdata: {"a":1}\rid: 2\r\r'
    b'event: event\r\ndata: {"b":\r\ndata: 2}\r\nid: 3\r\n\r\n'
    b'data: {"c":3}\nid: 4\nunknown: x\n\n'
    b'event: lost\ndata: {"d":4}\nid: 5\n'
)


def test_a_stream_is_read_as_the_standard_says_wherever_its_parts_end() -> None:
    expected = [("2", "state", {"a": 1}), ("3", "event", {"b": 2}), ("4", "message", {"c": 3})]
    stream = STREAM.removeprefix(b"\xef\xbb\xbf")
    for size in (1, 2, 3, 7, len(stream)):
        parser, found = Parser(), list[Told]()
        for start in range(0, len(stream), size):
            found += parser.of(stream[start : start + size])
        assert [(one.id, one.event, one.data) for one in found] == expected
        assert (parser.last_id, parser.retry_s) == ("4", 0.01), "what is not whole has not been read"


@pytest.mark.parametrize("wrong", [b"data: [1]\n\n", b"data: {\n\n", b"<html>" * MOST_BYTES])
def test_what_is_no_stream_of_ours_is_said(wrong: bytes) -> None:
    with pytest.raises(BadAnswer):
        Parser().of(wrong)


def test_a_stream_that_breaks_is_asked_for_from_its_last_id() -> None:
    """The connection ends at random bytes, and sometimes none is made."""
    whole = [b'event: event\ndata: {"n":%d}\nid: %d\n\n' % (n, n) for n in range(1, 30)]
    chance, asked = random.Random(3), list[str | None]()

    def answer(request: httpx.Request) -> httpx.Response:
        last = request.headers.get("last-event-id")
        asked.append(last)
        if chance.random() < 0.2:
            raise httpx.ConnectError("nobody listens")
        rest = b"".join(whole[int(last or 0) :])
        if not rest:
            return httpx.Response(204)
        return httpx.Response(200, content=rest[: chance.randrange(len(rest)) if len(asked) < 20 else None])

    with Client(Server("http://here", "t"), httpx.MockTransport(answer)) as client:
        found = [told.data["n"] for told in follow(client, None, "events", sleep=lambda seconds: None)]
    assert found == list(range(1, 30))
    assert len(asked) > 5

    async def awaited() -> list[object]:
        async with AsyncClient(Server("http://here", "t"), httpx.MockTransport(answer)) as client:
            return [told.data["n"] async for told in followed(client, None, "events")]

    asked.clear()
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(asyncio, "sleep", _at_once)
        assert asyncio.run(awaited()) == found


async def _at_once(seconds: float) -> None:
    """Nobody waits."""


def test_an_older_service_has_no_streams_and_is_polled(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        body = {"code": "not_found", "message": "Not Found"}
        if request.url.path.endswith("/logs"):
            return httpx.Response(
                200, json={"text": "one\n", "next_offset": 4, "complete": "offset=4" in str(request.url)}
            )
        return httpx.Response(404, json=body)

    monkeypatch.setattr(watching, "POLL_S", 0.0)
    with Client(lambda: Server("http://here", "t"), httpx.MockTransport(answer)) as client:
        with Bell(client, ["job-1"]) as bell:
            assert bell.wait(60)
            wait_until(lambda: not bell._thread.is_alive(), "the bell has given up")
            assert not bell.follows
        assert next(iter(watching._parts(client, "job-1", follow=True))) == "one\n"


def test_a_bell_rings_for_what_happens_and_falls_silent_at_the_end(live: LiveService) -> None:
    job_id = live.service.running()
    with Client(lambda: server_of(live.home)) as client, Bell(client, [job_id]) as bell:
        wait_until(lambda: bell.follows and bell.wait(0.0), "it has heard of the beginning", timeout_s=60)
        live.service.post(job_id, events=[{"kind": "told", "step": 1, "time": 1.0}])
        assert bell.wait(60)
        other = live.service.running()
        with Bell(client, [job_id, other], Rings.CHANGES) as of_two:
            wait_until(lambda: of_two.follows and of_two.wait(0.0), "it follows all jobs", timeout_s=60)
            live.finish(other)
            assert of_two.wait(60)
        live.finish(job_id)
        wait_until(lambda: not bell.follows, "the job is over", timeout_s=60)


def test_events_prints_what_has_happened_and_follows_it(thinwire: Callable[..., Run], live: LiveService) -> None:
    job_id = live.service.running()
    happened = [{"kind": "checkpoint_saved", "step": 1, "time": 1e300, "fields": {"path": "a\x1b[31m"}}]
    live.service.post(job_id, samples=[sample(1)], events=happened)
    run = thinwire("events", job_id)
    assert run.code == 0
    assert [word in run.out for word in ("SUBMITTING", "RUNNING", "checkpoint_saved at step 1", "loss 5.0000")] == [
        True
    ] * 4
    assert "\x1b" not in run.out
    of_all = [json.loads(one) for one in thinwire("events", "--json").out.splitlines()]
    assert [one["event"] for one in of_all] == ["state"] * 3 + ["event"]
    last = of_all[-1]["id"]
    assert thinwire("events", "--after", last).out == ""
    live.finish(job_id)
    assert thinwire("events", job_id, "-f", "--after", last).out.splitlines()[-1].endswith("over: SUCCEEDED")
    assert thinwire("events", "no-such").code == 2


def test_watch_follows_a_stream_and_asks_seldom(live: LiveService, thinwire: Callable[..., Run]) -> None:
    job_id = live.service.running()
    live.service.post(job_id, samples=[sample(1)])
    ending = threading.Timer(0.5, live.finish, [job_id])
    ending.start()
    run = thinwire("watch", job_id)
    ending.join()
    assert run.code == 0
    assert "SUCCEEDED" in run.err


@pytest.mark.parametrize(
    ("event", "data", "words"),
    [
        ("end", {"job_id": "a", "state": None}, "a  over: deleted"),
        ("gap", {"after": 1, "reason": "list them"}, "gap: list them"),
        ("of a later version", {"job_id": "a", "step": 1}, "a  of a later version at step 1"),
        ("state", {"job_id": "a", "state": "FAILED", "reason": "why", "time": None}, "a  FAILED: why"),
    ],
)
def test_each_message_is_a_line(event: str, data: dict[str, Any], words: str) -> None:
    assert line(Told(id="1", event=event, data=data)) == words
