"""Streams of events: nothing lost and nothing twice over any reconnect, in the order of the ids, for many readers."""

from __future__ import annotations

import asyncio
import json
import random
import re
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from sqlalchemy import event as of_engine
from sqlalchemy.exc import OperationalError

from tests.service.control_plane_harness import Service, sample
from thinwire.client.streams import Parser
from thinwire.contract.jobs import Logs
from thinwire.contract.streams import END, EVENT, GAP, MODELS, SAMPLE, STATE, Told
from thinwire.service.connections import BoundedConnection
from thinwire.service.errors import TooMuch, Unavailable
from thinwire.service.jobs import log_parts, told
from thinwire.service.jobs.hub import MOST_WAITING_BYTES, Hub
from thinwire.service.jobs.repository import JobRepository
from thinwire.service.jobs.streams import StreamSlots
from thinwire.service.launch.protocol import LaunchState


def parsed(content: bytes) -> list[Told]:
    found = Parser().of(content)
    for one in found:
        MODELS[one.event].model_validate(one.data)
    return found


def read(service: Service, path: str, last_id: str | None = None, **params: Any) -> list[Told]:
    """All that has been told so far."""
    headers = {} if last_id is None else {"Last-Event-ID": last_id}
    answer = service.client.get(path, params={"follow": "false", **params}, headers=headers)
    assert answer.status_code == 200, answer.text
    return parsed(answer.content)


def lived(service: Service, steps: int = 4) -> str:
    """A job that has run to its end, with an event and a sample a step."""
    job_id = service.running()
    for step in range(1, steps + 1):
        happened = {"kind": "checkpoint_saved", "step": step, "time": float(step)}
        assert service.post(job_id, samples=[sample(step)], events=[happened]).status_code == 204
    service.launcher.put(job_id, LaunchState.SUCCEEDED)
    service.turn(2)
    return job_id


@pytest.fixture(scope="module")
def told_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One service for what only reads, or adds jobs of its own."""
    started = Service(tmp_path_factory.mktemp("told") / "home")
    yield started
    started.close()


def test_a_job_is_told_from_its_beginning_to_its_end_in_the_order_of_the_ids(told_service: Service) -> None:
    job_id = lived(told_service)
    answer = told_service.client.get(f"/v1/jobs/{job_id}/events")  # which ends by itself
    assert answer.headers["content-type"].startswith("text/event-stream")
    found = parsed(answer.content)
    states = [one.data["state"] for one in found if one.event == STATE]
    assert states == ["SUBMITTING", "PENDING", "RUNNING", "SUCCEEDED"]
    assert [one.data["step"] for one in found if one.event == EVENT] == [1, 2, 3, 4]
    assert [one.data["sample"]["step"] for one in found if one.event == SAMPLE] == [4]  # type: ignore[index, call-overload]
    assert found[-1].event == END
    assert found[-1].data == {"job_id": job_id, "state": "SUCCEEDED", "reason": None}
    ids = [int(one.id) for one in found]
    assert ids == sorted(set(ids))


def test_cut_off_at_any_byte_a_reader_misses_nothing_and_meets_nothing_twice(told_service: Service) -> None:
    job_id = lived(told_service, steps=3)
    whole = told_service.client.get(f"/v1/jobs/{job_id}/events").content
    expected = [one.id for one in parsed(whole)]
    chance = random.Random(5)
    for _ in range(10):
        parser, met, answers = Parser(), list[str](), 0
        while True:
            headers = {} if parser.last_id is None else {"Last-Event-ID": parser.last_id}
            answer = told_service.client.get(f"/v1/jobs/{job_id}/events", headers=headers)
            if answer.status_code == 204:
                break
            assert answer.status_code == 200, answer.text
            answers += 1
            parser.begin()
            cut = len(answer.content) if answers > 5 else chance.randrange(len(answer.content) + 1)
            met += [one.id for one in parser.of(answer.content[:cut])]
        assert met == expected


def test_all_jobs_are_told_from_an_id_on_and_from_now_without_one(told_service: Service) -> None:
    before = read(told_service, "/v1/events", after=0)
    assert read(told_service, "/v1/events") == []
    one, other = lived(told_service, steps=2), lived(told_service, steps=1)
    after = before[-1].id if before else "0"
    found = read(told_service, "/v1/events", last_id=after)
    assert {one_of.event for one_of in found} == {STATE, EVENT}
    for job_id in (one, other):
        mine = [(m.id, m.event) for m in read(told_service, f"/v1/jobs/{job_id}/events") if m.event in (STATE, EVENT)]
        assert mine == [(m.id, m.event) for m in found if m.data["job_id"] == job_id]


@pytest.mark.parametrize("wrong", ["-1", "x", "1.0", "9" * 19, "1e3", "0x1", "\u0661".encode().decode("latin-1")])
@pytest.mark.parametrize("path", ["/v1/events", "/v1/jobs/JOB/events"])
def test_an_id_that_is_none_is_refused_in_words(told_service: Service, path: str, wrong: str) -> None:
    path = path.replace("JOB", "none" if "JOB" not in path else _any_job(told_service))
    for asked in ({"headers": {"Last-Event-ID": wrong.encode("latin-1")}}, {"params": {"after": wrong}}):
        answer = told_service.client.get(path, **asked)
        assert answer.status_code == 422, (asked, answer.text)
        assert "must be the id of a message" in answer.json()["message"]


def _any_job(service: Service) -> str:
    found = service.client.get("/v1/jobs").json()["jobs"]
    return str(found[0]["id"]) if found else service.submit()


def test_an_id_that_nobody_has_told_is_refused_and_so_are_two(told_service: Service) -> None:
    job_id = _any_job(told_service)
    for path in ("/v1/events", f"/v1/jobs/{job_id}/events"):
        answer = told_service.client.get(path, headers={"Last-Event-ID": "9" * 18})
        assert answer.status_code == 422
        assert "put back" in answer.json()["message"]
        assert answer.json()["problems"][0]["path"] == "last-event-id"
        assert told_service.client.get(path, params={"after": "9" * 18}).json()["problems"][0]["path"] == "after"
        twice = [("Last-Event-ID", "1"), ("Last-Event-ID", "2")]
        assert told_service.client.get(path, headers=twice).status_code == 422


def test_who_may_not_read_and_what_is_not_there(told_service: Service) -> None:
    job_id = _any_job(told_service)
    assert told_service.client.get("/v1/jobs/none/events").json()["code"] == "job_not_found"
    for path in ("/v1/events", f"/v1/jobs/{job_id}/events"):
        assert told_service.client.get(path, headers=told_service.job_headers(job_id)).status_code == 403
        assert told_service.client.get(path, headers={"Authorization": ""}).status_code == 401
    viewer = told_service.person("watcher", "viewer")
    assert told_service.client.get("/v1/events?follow=false", headers=viewer).status_code == 200


def test_a_reader_from_before_a_deletion_is_told_of_the_gap(service: Service) -> None:
    first, second = lived(service, steps=1), lived(service, steps=1)
    last = read(service, "/v1/events", after=0)[-1].id
    assert service.client.delete(f"/v1/jobs/{first}").status_code == 204
    found = read(service, "/v1/events", after=0)
    assert found[0].event == GAP
    assert "list the jobs" in str(found[0].data["reason"])
    assert {one.data["job_id"] for one in found[1:]} == {second}
    assert read(service, "/v1/events", last_id=last) == [], "it had read all that is gone"
    assert service.client.get(f"/v1/jobs/{first}/events").status_code == 404
    # No number is given twice, not even that of the newest event when its job is gone.
    newest = max(int(one.id) for one in found)
    assert service.client.delete(f"/v1/jobs/{second}").status_code == 204
    third = service.submit()
    assert int(read(service, f"/v1/jobs/{third}/events")[0].id) > newest


def test_many_events_come_in_pages_and_each_once(service: Service) -> None:
    job_id = service.running()
    events = [{"kind": "told", "step": n, "time": float(n)} for n in range(2 * told.MOST_ROWS + 3)]
    assert service.post(job_id, events=events).status_code == 204
    found = read(service, f"/v1/jobs/{job_id}/events")
    assert [one.data["step"] for one in found if one.event == EVENT] == list(range(len(events)))
    assert [one.id for one in read(service, "/v1/events", after=0)] == [one.id for one in found]


def test_a_sample_that_comes_in_the_middle_of_the_pages_is_told_where_it_belongs(service: Service) -> None:
    job_id = service.running()
    assert service.post(job_id, samples=[sample(1)]).status_code == 204
    events = [{"kind": "told", "step": n, "time": float(n)} for n in range(told.MOST_ROWS)]
    assert service.post(job_id, events=events).status_code == 204
    found = read(service, f"/v1/jobs/{job_id}/events")
    assert [one.event for one in found][2:5] == [STATE, SAMPLE, EVENT]
    assert [int(one.id) for one in found] == sorted(int(one.id) for one in found)


def test_a_database_of_an_earlier_version_goes_on_counting(service: Service) -> None:
    """Its newest samples have no number, and its numbers begin where its events end."""
    job_id = lived(service, steps=1)
    with service.plane.db.write() as session:
        row = JobRepository(session).found(job_id)
        row.newest_sample = {name: x for name, x in (row.newest_sample or {}).items() if name != "number"}
    assert SAMPLE not in [one.event for one in read(service, f"/v1/jobs/{job_id}/events")]


class Live:
    """A hub and its readers in a loop of its own, and what they were given."""

    def __init__(self, service: Service) -> None:
        self.service, self.hub = service, Hub(service.plane.db)

    async def listen(
        self, job_id: str | None, count: int, found: list[Any], begun: asyncio.Event | None = None
    ) -> None:
        """Until so many messages have come, or the end."""
        async with self.hub.joined(job_id) as reader:
            if begun is not None:
                begun.set()
            while len(found) < count and not reader.over:
                found += await reader.take(30.0)


def test_readers_are_given_what_is_committed_and_the_end(service: Service) -> None:
    job_id, other = service.running(), service.running()
    live = Live(service)

    async def run() -> tuple[list[Any], list[Any]]:
        mine, everything = list[Any](), list[Any]()
        begun = [asyncio.Event(), asyncio.Event()]
        tasks = [
            asyncio.create_task(live.listen(job_id, 5, mine, begun[0])),
            asyncio.create_task(live.listen(None, 4, everything, begun[1])),
        ]
        for one in begun:
            await one.wait()
        for posted in (job_id, other):
            event = {"kind": "told", "step": 1, "time": 1.0}
            await asyncio.to_thread(service.post, posted, samples=[sample(1)], events=[event])
        service.launcher.put(job_id, LaunchState.FAILED, "it broke")
        await asyncio.to_thread(service.client.post, f"/v1/jobs/{job_id}/cancel")
        await asyncio.to_thread(service.turn, 2)
        async with asyncio.timeout(60):
            await asyncio.gather(*tasks)
        return mine, everything

    mine, everything = asyncio.run(run())
    assert [one.event for one in mine] == [EVENT, SAMPLE, STATE, STATE, END]
    assert [one.job_id for one in everything] == [job_id, other, job_id, job_id]
    assert [one.number for one in mine] == sorted(one.number for one in mine)


def test_a_deleted_job_ends_its_stream(service: Service) -> None:
    """The stream is at a job that is over in the hub alone where its end was committed just now."""
    job_id = service.submit()
    live = Live(service)

    async def run() -> list[Any]:
        found, begun = list[Any](), asyncio.Event()
        task = asyncio.create_task(live.listen(job_id, 1, found, begun))
        await begun.wait()

        def remove() -> None:
            with service.plane.db.write() as session:
                jobs = JobRepository(session)
                jobs.remove(jobs.lock(job_id))

        await asyncio.to_thread(remove)
        async with asyncio.timeout(60):
            await task
        return found

    [last] = asyncio.run(run())
    assert last.event == END
    assert json.loads(re.search(rb"data: (.*)", last.wire)[1])["state"] is None


def test_what_waits_for_one_reader_is_bounded_and_read_again(service: Service) -> None:
    job_id = service.running()
    live = Live(service)
    events = [{"kind": "told", "step": n, "time": 1.0, "fields": {"x": "y" * 10_000}} for n in range(40)]
    assert len(json.dumps(events)) > MOST_WAITING_BYTES

    async def run() -> None:
        async with live.hub.joined(job_id) as slow, asyncio.timeout(60):
            assert (await asyncio.to_thread(service.post, job_id, events=events)).status_code == 204
            while not slow.lost:
                assert await slow.take(30.0) == []

    asyncio.run(run())
    found = read(service, f"/v1/jobs/{job_id}/events")
    assert [one.data["step"] for one in found if one.event == EVENT] == list(range(40))


def test_the_hub_looks_once_for_all_and_not_at_all_for_nobody(service: Service) -> None:
    job_id = service.running()
    live = Live(service)

    async def run() -> tuple[int, int]:
        found: list[list[Any]] = [[] for _ in range(50)]
        begun = [asyncio.Event() for _ in found]
        tasks = [
            asyncio.create_task(live.listen(job_id, 1, one, event)) for one, event in zip(found, begun, strict=True)
        ]
        for event in begun:
            await event.wait()
        before = live.hub.looks
        await asyncio.to_thread(service.post, job_id, events=[{"kind": "told", "step": 1, "time": 1.0}])
        async with asyncio.timeout(60):
            await asyncio.gather(*tasks)
        return before, live.hub.looks

    before, after = asyncio.run(run())
    assert after - before < 10, "one look a turn, not one a reader"
    service.post(job_id, events=[{"kind": "told", "step": 2, "time": 1.0}])
    assert live.hub.looks == after


def test_a_service_that_ends_ends_its_streams_and_takes_no_more(service: Service) -> None:
    live = Live(service)

    async def run() -> None:
        async with live.hub.joined(None) as reader, asyncio.timeout(60):
            live.hub.end("this service ends")
            assert await reader.take(30.0) == []
            assert reader.over
        with pytest.raises(Unavailable, match="ends"):
            async with live.hub.joined(None):
                pass

    asyncio.run(run())


def test_a_database_that_does_not_answer_costs_no_event(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id = service.running()
    live, looks = Live(service), told.look
    failed = threading.Event()

    def look(*given: Any, **more: Any) -> Any:
        if not failed.is_set():
            failed.set()
            raise OperationalError("SELECT 1", {}, Exception("gone"))
        return looks(*given, **more)

    async def run() -> list[Any]:
        found, begun = list[Any](), asyncio.Event()
        task = asyncio.create_task(live.listen(job_id, 1, found, begun))
        await begun.wait()
        await asyncio.to_thread(service.post, job_id, events=[{"kind": "told", "step": 1, "time": 1.0}])
        async with asyncio.timeout(60):
            await task
        return found

    monkeypatch.setattr(told, "look", look)
    assert [one.event for one in asyncio.run(run())] == [EVENT]
    assert failed.is_set()


def test_numbers_are_committed_in_their_order(service: Service) -> None:
    """Of two transactions at once the one that has the smaller numbers is there first."""
    job_id, other = service.running(), service.running()
    have_numbers, let_go, met = threading.Event(), threading.Event(), list[int]()

    def slow() -> None:
        with service.plane.db.write() as session:
            JobRepository(session).put_events(job_id, 1, [{"kind": "a", "step": 1, "time": 1.0, "fields": {}}])
            have_numbers.set()
            assert let_go.wait(60)

    thread = threading.Thread(target=slow)
    thread.start()
    assert have_numbers.wait(60)
    quick = threading.Thread(
        target=service.post, args=(other,), kwargs={"events": [{"kind": "b", "step": 1, "time": 1.0}]}
    )
    quick.start()
    with service.plane.db.read() as session:
        met.append(told.numbers(session)[0])
    let_go.set()
    thread.join(60)
    quick.join(60)
    kinds = [one.data["kind"] for one in read(service, "/v1/events", after=met[0])]
    assert kinds == ["a", "b"]


def test_a_submission_does_nothing_that_can_wait_while_it_holds_the_counter(service: Service) -> None:
    said: list[str] = []
    engine = service.plane.db.engine

    def saw(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        said.append(" ".join(statement.split()[:3]))

    of_engine.listen(engine, "before_cursor_execute", saw)
    try:
        service.submit()
    finally:
        of_engine.remove(engine, "before_cursor_execute", saw)
    first = said.index("UPDATE service SET")
    end = next((at for at in range(first, len(said)) if said[at].startswith("BEGIN")), len(said))
    assert said[first:end] == ["UPDATE service SET", "INSERT INTO jobs", "UPDATE service SET", "INSERT INTO events"]


def test_a_person_has_so_many_streams_and_all_so_many() -> None:
    slots = StreamSlots(in_all=3, of_one=2)
    slots.take("a")
    slots.take("a")
    with pytest.raises(TooMuch, match="a reads 2 streams"):
        slots.take("a")
    slots.take("b")
    with pytest.raises(TooMuch, match="the service has 3 streams"):
        slots.take("c")
    slots.give_back("a")
    slots.take("c")
    for who in ("a", "b", "c"):
        slots.give_back(who)
    assert not slots._of, "who reads nothing is remembered no more"


def test_a_number_that_json_has_not_is_null_and_half_a_character_is_sent() -> None:
    [one] = Parser().of(told.wire(EVENT, "7", {"a": [float("nan"), 1.5], "b": "\ud800", "c": "x\r\ny\u2028"}))
    assert one.data == {"a": [None, 1.5], "b": "\ud800", "c": "x\r\ny\u2028"}
    assert one.id == "7"


def test_a_part_of_a_stream_that_has_been_taken_is_progress() -> None:
    """Else a stream that goes on for longer than a request may be without an answer would be ended."""
    moved: list[object] = []

    class Others:
        def moved(self, one: object) -> None:
            moved.append(one)

    connection = object.__new__(BoundedConnection)
    connection.others = Others()  # type: ignore[misc, assignment]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start"})
        await send({"type": "http.response.body", "more_body": True})
        connection.unread_bytes = 1
        await send({"type": "http.response.body", "more_body": True})

    async def send(message: Any) -> None:
        pass

    asyncio.run(connection._told_of_parts(app)({}, None, send))  # type: ignore[arg-type]
    assert moved == [connection], "what nobody has read is none"


def test_the_document_of_the_api_has_the_models_of_all_messages(told_service: Service) -> None:
    document = told_service.client.get("/openapi.json").json()
    for path in ("/v1/events", "/v1/jobs/{job_id}/events"):
        content = document["paths"][path]["get"]["responses"]["200"]["content"]["text/event-stream"]
        for one in content["itemSchema"]["oneOf"]:
            model = MODELS[one["properties"]["event"]["const"]].__name__
            assert one["properties"]["data"]["contentSchema"]["$ref"] == f"#/components/schemas/{model}"
            assert model in document["components"]["schemas"]


def test_a_log_is_looked_at_once_for_all_who_follow_it(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id = service.running()
    service.launcher.write_log(job_id, "one\n")
    parts, read = service.plane.log_parts, list[int]()
    logs = service.plane.jobs.logs

    def counted(job_id: str, offset: int, limit: int) -> Logs:
        read.append(offset)
        return logs(job_id, offset, limit)

    monkeypatch.setattr(service.plane.jobs, "logs", counted)
    monkeypatch.setattr(log_parts, "LOOK_S", 0.0)

    async def follow(offset: int) -> str:
        text = ""
        while True:
            part = await parts.part(job_id, offset)
            text += "".join(str(one.data["text"]) for one in parsed(part.wire))
            offset = part.next_offset
            if part.end is not None:
                return text
            if not part.wire:
                await parts.look(job_id)

    async def run() -> None:
        followers = [asyncio.create_task(follow(0)) for _ in range(50)]
        slow = asyncio.create_task(follow(2))
        while len(read) < 5:
            await asyncio.sleep(0)
        service.launcher.write_log(job_id, "two\n")
        while 8 not in read:
            await asyncio.sleep(0)
        await asyncio.to_thread(service.launcher.put, job_id, LaunchState.SUCCEEDED)
        await asyncio.to_thread(service.turn, 2)
        assert {await one for one in followers} == {"one\ntwo\n"}
        assert await slow == "e\ntwo\n"
        assert not parts._looks

    asyncio.run(run())
    at_the_end = read.index(8)
    assert at_the_end < 50, f"51 followers took {at_the_end} looks to read two lines"


def test_all_jobs_with_the_steps_of_some_and_from_now_on(service: Service) -> None:
    first, other = service.running(), service.running()
    last = read(service, "/v1/events", after=0)[-1].id
    hub = service.plane.hub

    async def told_of(*jobs: str) -> list[Told]:
        async with hub.joined(None, None, frozenset(jobs)) as reader:
            for job_id in (first, other):
                await asyncio.to_thread(service.post, job_id, samples=[sample(1)])
            await asyncio.to_thread(service.post, other, events=[{"kind": "checkpoint_saved", "step": 1, "time": 1.0}])
            found: list[Told] = []
            while not any(one.event == EVENT for one in found):
                found += [one for message in await reader.take(60) for one in parsed(message.wire)]
            return found

    found = asyncio.run(told_of(first))
    assert [(one.event, one.data["job_id"]) for one in found] == [(SAMPLE, first), (EVENT, other)]
    assert [one.event for one in read(service, "/v1/events", after=last)] == [EVENT]
    assert read(service, "/v1/events", after="now") == []
    assert read(service, f"/v1/jobs/{first}/events", after="now") == []
    refused = service.client.get(f"/v1/jobs/{first}/events", headers={"Last-Event-ID": "now"})
    assert refused.status_code == 422


def test_the_steps_of_another_projects_jobs_are_not_told(service: Service) -> None:
    job_id = service.running()
    service.client.post("/v1/projects", json={"name": "apart"})
    with service.plane.db.read() as session:
        assert told.of_project(session, {job_id, "no-such"}, None) == {job_id}
        assert told.of_project(session, {job_id}, "apart") == frozenset()


def test_what_many_readers_ask_at_once_is_read_once(service: Service) -> None:
    job_id = lived(service)
    begun: list[object] = []
    engine = service.plane.db.engine

    def saw(connection: object) -> None:
        begun.append(connection)

    of_engine.listen(engine, "begin", saw)

    async def ask() -> set[bytes]:
        transport = httpx.ASGITransport(service.app)
        headers = {"Authorization": f"Bearer {service.token}"}
        async with httpx.AsyncClient(transport=transport, base_url="http://a", headers=headers) as client:
            path = f"/v1/jobs/{job_id}/events?follow=false"
            answers = await asyncio.gather(*(client.get(path) for _ in range(40)))
        assert {one.status_code for one in answers} == {200}
        return {one.content for one in answers}

    try:
        [content] = asyncio.run(ask())
    finally:
        of_engine.remove(engine, "begin", saw)
    assert parsed(content)[-1].event == END
    assert len(begun) <= 20, f"40 readers took {len(begun)} transactions; each by itself would have taken 80"
