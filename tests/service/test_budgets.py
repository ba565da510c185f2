"""What one job or one person may have of the service: bytes that are kept, answers that are made, changes.

And what a job may still say when it is over.
"""

from __future__ import annotations

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from tests.service.control_plane_harness import STORE, Service, sample, spec
from tests.service.live_service import live_service
from tests.service.test_packages_api import BYTES, package_of, sha
from tests.service.test_remote_runs_api import PLAIN
from thinwire.client import Client, Server
from thinwire.contract.jobs import JobState
from thinwire.service.errors import TooMuch
from thinwire.service.jobs import service as jobs_service
from thinwire.service.jobs.repository import EventRow, SampleRow
from thinwire.service.large_answers import PART_BYTES, Paced, Slots
from thinwire.service.launch.protocol import LaunchState
from thinwire.service.main import JOBS_SHOWN_AT_ONCE
from thinwire.service.occasions import PAUSE_S

GRACE_S = 300.0
BLOB = "x" * 15_000


def events(first: int, count: int, **fields: Any) -> list[dict[str, Any]]:
    return [{"kind": "told", "step": n, "time": 2e9 + n, "fields": fields} for n in range(first, first + count)]


def told(service: Service, job_id: str, **query: Any) -> dict[str, Any]:
    answer = service.client.get(f"/v1/jobs/{job_id}/metrics", params={"event_kind": "told", **query})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def remade(service: Service, **settings: Any) -> Service:
    """The same home, with other settings."""
    service.close()
    service.settings = service.settings.model_copy(update=settings)
    service.open()
    return service


# answers


def test_an_answer_holds_so_many_bytes_of_events_and_says_where_older_ones_are(service: Service) -> None:
    job_id = service.running()
    for first in range(0, 300, 100):
        assert service.post(job_id, events=events(first, 100, a=BLOB)).status_code == 204
    answer = service.client.get(f"/v1/jobs/{job_id}/metrics")
    assert len(answer.content) < 1.1 * jobs_service.MOST_EVENT_BYTES
    page = told(service, job_id)
    found = page["events"]
    while page["next_before_event"] is not None:
        page = told(service, job_id, before_event=page["next_before_event"])
        found = page["events"] + found
    assert [one["step"] for one in found] == list(range(300))
    other = service.running()
    wrong = service.client.get(f"/v1/jobs/{other}/metrics", params={"before_event": 1_000_000})
    assert (wrong.status_code, wrong.json()["problems"][0]["path"]) == (422, "before_event")


def test_a_history_of_a_version_that_took_what_cannot_be_shown_is_shown(service: Service) -> None:
    job_id = service.running()
    service.post(job_id, events=events(0, 1))
    with service.plane.db.write() as session:
        [row] = session.scalars(select(EventRow).where(EventRow.kind == "told"))
        row.fields = {"text": "half \ud800 pair"}
    assert told(service, job_id)["events"][0]["fields"] == {"text": "half ? pair"}


def test_events_of_one_time_are_in_one_page_each(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs_service, "MOST_EVENTS", 2)
    job_id = service.running()
    service.post(job_id, events=[{"kind": "told", "step": step, "time": 1.0} for step in range(5)])
    page, steps = told(service, job_id), list[int]()
    while True:
        steps = [one["step"] for one in page["events"]] + steps
        if page["next_before_event"] is None:
            break
        page = told(service, job_id, before_event=page["next_before_event"])
    assert steps == [0, 1, 2, 3, 4]


def test_an_answer_holds_so_many_bytes_of_samples_and_one_at_least(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = service.running()
    service.post(job_id, samples=[sample(step) for step in range(10)])
    monkeypatch.setattr(jobs_service, "MOST_SAMPLE_BYTES", 2000)
    first = told(service, job_id)
    assert 1 < len(first["samples"]) < 10
    assert first["next_after_step"] == first["samples"][-1]["step"]
    monkeypatch.setattr(jobs_service, "MOST_SAMPLE_BYTES", 1)
    assert [one["step"] for one in told(service, job_id, after_step=3)["samples"]] == [4]


def test_a_list_of_jobs_with_long_files_is_read_in_parts(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = {service.submit() for _ in range(5)}
    monkeypatch.setattr(jobs_service, "MOST_JOB_BYTES", 3000)
    page = service.client.get("/v1/jobs").json()
    assert 0 < len(page["jobs"]) < 5
    seen = {job["id"] for job in page["jobs"]}
    while page["next"] is not None:
        page = service.client.get("/v1/jobs", params={"before": page["next"]}).json()
        seen |= {job["id"] for job in page["jobs"]}
    assert seen == ids


def test_the_client_reads_all_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs_service, "MOST_EVENTS", 3)
    monkeypatch.setattr(jobs_service, "MOST_SAMPLE_BYTES", 1000)
    monkeypatch.setattr(jobs_service, "MOST_JOB_BYTES", 1)
    with live_service(tmp_path / "home") as live:
        service = live.service
        job_id, other = service.running(), service.submit()
        service.post(job_id, samples=[sample(step) for step in range(9)], events=events(0, 8))
        with Client(lambda: Server(f"http://127.0.0.1:{live.port}", service.token)) as client:
            history = client.history(job_id)
            assert [one.step for one in history.samples] == list(range(9))
            assert [one.step for one in history.events if one.kind == "told"] == list(range(8))
            assert {one.id for one in client.jobs(limit=1000)} == {job_id, other}
            assert len(client.jobs(limit=1)) == 1


def test_one_person_holds_few_of_the_large_answers_and_others_get_theirs() -> None:
    async def tried() -> None:
        slots = Slots(at_once=3, of_one=2, wait_s=0.05)

        def one(who: str) -> AbstractAsyncContextManager[None]:
            return slots.one(who, asyncio.timeout(None))

        async with one("anna"), one("anna"):
            with pytest.raises(TooMuch, match="anna asks for more large answers at once"):
                async with one("anna"):
                    pass
            async with one("carl"):
                pass
        for _ in range(3):  # nobody who waited in vain holds one
            async with one("anna"), one("anna"), one("bert"):
                pass

    asyncio.run(tried())


def test_who_reads_slowly_keeps_no_others_out() -> None:
    """Where all are held, the answer that has been under way for longest ends; one that has just begun does not."""
    slots, held = Slots(at_once=2, of_one=1, wait_s=0.1), list[str]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        async with slots.one(scope["who"], scope["state"]["sending"]):
            held.append(scope["who"])
            await asyncio.sleep(scope["for_s"])

    async def ask(who: str, for_s: float) -> None:
        await Paced(app)({"type": "http", "path": "/", "who": who, "for_s": for_s}, None, None)  # type: ignore[arg-type]

    async def tried() -> None:
        slow = [asyncio.create_task(ask(who, 60.0)) for who in ("anna", "bert")]
        await asyncio.sleep(0.15)
        await ask("carl", 0.0)
        await asyncio.wait_for(slow[0], 1.0)
        assert not slow[1].done()
        quick = asyncio.create_task(ask("dora", 60.0))
        await asyncio.sleep(0)
        await ask("emil", 0.0)
        assert slow[1].done()
        assert not quick.done()
        quick.cancel()

    asyncio.run(tried())
    assert held == ["anna", "bert", "carl", "dora", "emil"]


def test_a_slot_is_held_until_the_answer_has_gone(service: Service) -> None:
    """Who does not read holds it; the answers of others, and all that is small, go on."""
    job_id = service.running()
    service.post(job_id, events=events(0, 100, a=BLOB))
    anna, bert = service.person("anna", "viewer"), service.person("bert", "viewer")

    async def ask(who: dict[str, str], path: str, send: Any) -> None:
        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b""}

        scope = {
            **{"type": "http", "method": "GET", "path": path, "raw_path": path.encode(), "query_string": b""},
            **{"headers": [(b"authorization", who["Authorization"].encode())], "client": ("127.0.0.1", 1)},
            **{"http_version": "1.1", "scheme": "http", "server": ("a", 1), "root_path": ""},
        }
        await service.app(scope, receive, send)

    async def status(who: dict[str, str], path: str) -> int:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        await ask(who, path, send)
        return int(sent[0]["status"])

    async def tried() -> None:
        service.plane.large_answers = Slots(at_once=4, of_one=1, wait_s=0.2)
        begun, read = asyncio.Event(), asyncio.Event()

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                begun.set()
                await read.wait()

        path = f"/v1/jobs/{job_id}/metrics"
        unread = asyncio.create_task(ask(anna, path, send))
        await begun.wait()
        assert await status(anna, path) == 429
        assert await status(anna, f"/v1/jobs/{job_id}") == 200
        assert await status(bert, path) == 200
        read.set()
        await unread
        assert await status(anna, path) == 200

    asyncio.run(tried())


def test_few_jobs_are_made_answers_at_the_same_time(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job file of 1 MiB takes ten: forty threads would hold hundreds. What else is asked goes on meanwhile."""
    job_id, go_on, under_way = service.submit(), threading.Event(), threading.Semaphore(0)
    get = service.plane.jobs.get

    def slow(job_id: str) -> Any:
        under_way.release()
        assert go_on.wait(30.0)
        return get(job_id)

    monkeypatch.setattr(service.plane.jobs, "get", slow)
    with ThreadPoolExecutor(20) as pool:
        answers = [pool.submit(service.client.get, f"/v1/jobs/{job_id}") for _ in range(20)]
        assert all(under_way.acquire(timeout=30.0) for _ in range(JOBS_SHOWN_AT_ONCE))
        assert service.client.get("/v1/jobs").status_code == 200
        assert not under_way.acquire(timeout=0.3)
        go_on.set()
        assert {answer.result().status_code for answer in answers} == {200}


def test_answers_go_out_in_parts_and_whole() -> None:
    body, sent = bytes(range(256)) * 1000, list[Any]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"end"})

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(Paced(app)({"type": "http", "state": {"large": True}}, None, send))  # type: ignore[arg-type]
    assert b"".join(one["body"] for one in sent[1:]) == body + b"end"
    assert max(len(one["body"]) for one in sent[1:]) <= PART_BYTES
    assert [one.get("more_body", False) for one in sent[1:]] == [True] * (len(sent) - 2) + [False]
    sent.clear()
    asyncio.run(Paced(app)({"type": "http"}, None, send))  # type: ignore[arg-type]
    assert sent[1]["body"] is body, "what holds no slot counts among what is not read, all of it"


# what is kept


def stored(service: Service, job_id: str) -> int:
    """What the database has of samples and events of the job, as JSON."""
    with service.plane.db.read() as session:
        rows = [row.sample for row in session.scalars(select(SampleRow).where(SampleRow.job_id == job_id))]
        rows += [row.fields for row in session.scalars(select(EventRow).where(EventRow.job_id == job_id))]
    return sum(len(json.dumps(row)) for row in rows)


def test_what_is_kept_of_a_job_is_counted_once(service: Service) -> None:
    job_id = service.running()
    batch: dict[str, Any] = {"samples": [sample(step) for step in range(20)], "events": events(0, 20, a="y" * 100)}
    for _ in range(3):
        assert service.post(job_id, **batch).status_code == 204
    counted = service.job(job_id)["kept_bytes"]
    assert stored(service, job_id) < counted < stored(service, job_id) + 20 * 64 + 24 * 256
    service.post(job_id, samples=[sample(5, reported={"a": 1.0})])
    assert counted < service.job(job_id)["kept_bytes"] < counted + 100


def test_of_a_job_that_fills_the_disk_the_history_ends_and_the_job_goes_on(service: Service) -> None:
    service = remade(service, job_max_bytes=100_000)
    job_id = service.running()
    statuses = [service.post(job_id, samples=[sample(n)], events=events(n, 1, a=BLOB)).status_code for n in range(12)]
    assert statuses == [204] * 7 + [413] * 5
    refused = service.post(job_id, samples=[sample(50, loss=1.5)], failure={"kind": "Told", "message": "why"})
    assert (refused.status_code, refused.json()["code"]) == (413, "job_full")
    assert "THINWIRE_JOB_MAX_BYTES" in refused.json()["message"]
    assert stored(service, job_id) < 120_000
    job = service.job(job_id)
    assert (job["progress"]["step"], job["progress"]["loss"]) == (50, 1.5)
    full = service.client.get(f"/v1/jobs/{job_id}/metrics", params={"event_kind": "history_full"}).json()["events"]
    assert [one["fields"]["kept_bytes"] > 100_000 for one in full] == [True]
    assert service.post(job_id, summary={"state": "SUCCEEDED"}).status_code == 204
    service.launcher.put(job_id, LaunchState.SUCCEEDED)
    service.turn(2)
    assert service.state(job_id) == "SUCCEEDED"
    assert service.post(service.running(), events=events(0, 1)).status_code == 204


def test_of_all_jobs_of_a_person_so_much_is_kept(service: Service) -> None:
    service = remade(service, person_max_bytes=60_000)
    anna, bert = service.person("anna"), service.person("bert")

    def submit(who: dict[str, str]) -> Any:
        return service.client.post("/v1/jobs", json=spec(), headers=who)

    one, two = (submit(anna).json()["id"] for _ in range(2))
    for n in range(3):
        assert service.post(one, events=events(n, 1, a=BLOB)).status_code == 204
    assert service.post(two, events=events(0, 1, a=BLOB)).status_code == 204
    assert service.post(two, events=events(1, 1, a=BLOB)).json()["code"] == "job_full"
    refused = submit(anna)
    assert (refused.status_code, refused.json()["code"]) == (409, "quota_reached")
    assert "THINWIRE_PERSON_MAX_BYTES" in refused.json()["message"]
    assert submit(bert).status_code == 202
    service.client.post(f"/v1/jobs/{one}/cancel")
    service.turn(3)
    assert service.client.delete(f"/v1/jobs/{one}", headers=anna).status_code == 204
    assert service.post(two, events=events(1, 1, a=BLOB)).status_code == 204
    assert submit(anna).status_code == 202


def test_a_person_has_so_many_jobs_that_are_not_over(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    service = remade(service, person_max_jobs=2)
    anna = service.person("anna")
    key = {**anna, "Idempotency-Key": "k"}
    first = service.client.post("/v1/jobs", json=spec(), headers=key).json()["id"]
    assert service.client.post("/v1/jobs", json=spec(), headers=anna).status_code == 202
    refused = service.client.post("/v1/jobs", json=spec(), headers=anna)
    assert (refused.status_code, refused.json()["code"]) == (409, "quota_reached")
    assert "anna has 2 jobs that are not over; at most 2 (THINWIRE_PERSON_MAX_JOBS)" in refused.json()["message"]
    assert service.client.post("/v1/jobs", json=spec(), headers=key).json()["id"] == first
    assert service.client.post("/v1/jobs", json=spec()).status_code == 202
    service.client.post(f"/v1/jobs/{first}/cancel")
    service.turn(3)
    assert service.client.post("/v1/jobs", json=spec(), headers=anna).status_code == 202
    monkeypatch.setattr(jobs_service, "MOST_SPEC_BYTES", 10)
    assert "bytes of job files" in service.client.post("/v1/jobs", json=spec()).json()["message"]


def test_a_log_grows_as_far_as_the_job_has_room(far: Service) -> None:
    far = remade(far, job_max_bytes=3000)
    job_id = far.running(**STORE)
    headers = far.job_headers(job_id) | PLAIN

    def add(offset: int, content: bytes) -> dict[str, Any]:
        query = {"attempt": 1, "offset": offset}
        found: dict[str, Any] = far.client.post(
            f"/v1/jobs/{job_id}/log", params=query, content=content, headers=headers
        ).json()
        return found

    assert add(0, b"x" * 1000) == {"next_offset": 1000, "full": False}
    assert add(500, b"x" * 1000) == {"next_offset": 1500, "full": False}
    assert far.job(job_id)["kept_bytes"] == 1500
    assert add(1500, b"x" * 5000) == {"next_offset": 3000, "full": True}
    assert add(3000, b"x") == {"next_offset": 3000, "full": True}
    far.launcher.write_log(job_id, "x" * 5000)  # what its cluster has is no more welcome than what its driver sends
    far.launcher.put(job_id, LaunchState.SUCCEEDED)
    far.turn(2)
    assert (far.state(job_id), far.job(job_id)["kept_bytes"]) == ("SUCCEEDED", 3000)


def test_one_person_does_not_fill_the_store_of_packages(tmp_path: Path) -> None:
    service = Service(
        tmp_path / "home", package_max_bytes=2000, packages_max_bytes=50_000, packages_person_max_bytes=5000
    )
    try:
        anna, bert = service.person("anna"), service.person("bert")

        def put(who: dict[str, str], data: bytes) -> Any:
            return service.client.put(f"/v1/packages/{sha(data)}", content=data, headers=who | BYTES)

        mine = [package_of(number) for number in range(3)]
        assert [put(anna, data).status_code for data in mine] == [201] * 3
        refused = put(anna, package_of(9))
        assert (refused.status_code, refused.json()["code"]) == (507, "insufficient_storage")
        assert "that anna has sent" in refused.json()["message"]
        assert "THINWIRE_PACKAGES_PERSON_MAX_BYTES" in refused.json()["message"]
        assert put(anna, mine[0]).status_code == 200  # it is there
        assert put(bert, package_of(10)).status_code == 201
        service.clock.pass_(2 * 3600.0)  # nobody names them: they make room
        assert put(anna, package_of(9)).status_code == 201
        marks = (service.home / "packages" / "of" / "anna").iterdir()
        assert [path.name for path in marks] == [path.stem for path in (service.home / "packages").glob("*.zip")]
    finally:
        service.close()


# changes


def test_a_person_who_asks_for_changes_without_end_waits_and_leaves_no_line(service: Service) -> None:
    service = remade(service, changes_burst=5, changes_per_s=0.01)
    carl, anna = service.person("carl", "viewer"), service.person("anna")
    statuses = [service.client.post("/v1/jobs/x/cancel", headers=carl).status_code for _ in range(20)]
    assert statuses == [403] * 5 + [429] * 15
    assert len(service.client.get("/v1/audit", params={"who": "carl"}).json()["lines"]) == 5
    assert service.client.get("/v1/jobs", headers=carl).status_code == 200
    assert service.client.post("/v1/jobs", json=spec(), headers=anna).status_code == 202


# after the end


def ended(service: Service, state: LaunchState = LaunchState.SUCCEEDED, **batch: Any) -> str:
    job_id = service.running(workers={"max_restarts": 0})
    if batch:
        assert service.post(job_id, **batch).status_code == 204
    if state is LaunchState.STOPPED:
        service.client.post(f"/v1/jobs/{job_id}/cancel")
    service.launcher.put(job_id, state)
    service.turn(3)
    assert JobState(service.state(job_id)).terminal
    return job_id


@pytest.mark.parametrize("state", [LaunchState.SUCCEEDED, LaunchState.FAILED, LaunchState.STOPPED])
def test_what_is_there_when_a_job_ends_is_not_replaced(service: Service, state: LaunchState) -> None:
    job_id = ended(service, state, summary={"a": 1}, samples=[sample(6)])
    assert service.post(job_id, samples=[sample(6, loss=0.1), sample(7)], summary={"a": 2}).status_code == 204
    assert service.job(job_id)["summary"] == {"a": 1}
    assert service.job(job_id)["progress"]["step"] == 7
    assert service.post(job_id, samples=[sample(7, loss=0.1)]).status_code == 204
    assert service.job(job_id)["progress"]["loss"] == 5.0
    assert [one["loss"] for one in told(service, job_id)["samples"]] == [5.0, 5.0]
    (service.run_dir(job_id) / "loss.png").write_bytes(b"picture")
    path, headers = f"/v1/jobs/{job_id}/files/", service.job_headers(job_id) | PLAIN
    replaced = service.client.put(f"{path}loss.png", params={"attempt": 1}, content=b"x", headers=headers)
    assert (replaced.status_code, replaced.json()["code"]) == (409, "job_over")
    assert service.client.put(f"{path}buckets.json", params={"attempt": 1}, content=b"x", headers=headers).is_success
    assert (service.run_dir(job_id) / "loss.png").read_bytes() == b"picture"


def test_the_token_of_a_job_that_has_long_been_over_is_refused(service: Service) -> None:
    job_id = ended(service, LaunchState.STOPPED)
    headers = service.job_headers(job_id)
    service.clock.pass_(GRACE_S + 10)
    for answer in (
        service.post(job_id, samples=[sample(1)], summary={"forged": 1}),
        service.register(job_id, 0),
        service.client.get(f"/v1/jobs/{job_id}/run", headers=headers),
        service.client.get(f"/v1/jobs/{job_id}/metrics", headers=headers),
        service.client.get(f"/v1/jobs/{job_id}/files/loss.png", headers=headers),
        service.client.post(
            f"/v1/jobs/{job_id}/log", params={"attempt": 1, "offset": 0}, content=b"x", headers=headers | PLAIN
        ),
    ):
        assert (answer.status_code, answer.json()["code"]) == (409, "job_over"), answer.text
    assert service.job(job_id)["summary"] is None
    # Who is not the job may still not write for it.
    body = {"attempt": 1, "summary": {"forged": 1}}
    assert service.client.post(f"/v1/jobs/{job_id}/telemetry", json=body).json()["code"] == "job_over"


def test_a_log_that_comes_while_its_job_is_deleted_does_not_bring_the_folder_back(far: Service) -> None:
    for _ in range(5):
        job_id = far.running(**STORE)
        far.client.post(f"/v1/jobs/{job_id}/cancel")
        far.turn(4)
        headers, stop = far.job_headers(job_id) | PLAIN, threading.Event()

        def post(job_id: str = job_id, headers: dict[str, str] = headers, stop: threading.Event = stop) -> list[int]:
            statuses, offset = [], 0
            while not stop.is_set():
                query = {"attempt": 1, "offset": offset}
                path = f"/v1/jobs/{job_id}/log"
                answer = far.client.post(path, params=query, content=b"x" * 1000, headers=headers)
                statuses.append(answer.status_code)
                offset += 1000
            return statuses

        with ThreadPoolExecutor(1) as pool:
            posted = pool.submit(post)
            assert far.client.delete(f"/v1/jobs/{job_id}").status_code == 204
            stop.set()
            assert set(posted.result()) <= {200, 401, 404, 503}
        assert not far.run_dir(job_id).exists()
    with pytest.raises(FileNotFoundError):
        far.plane.reports._folders.of(job_id).append_log(1, 0, b"x", 100)


def test_what_a_deleted_job_writes_later_is_swept_and_what_nobody_deleted_is_not(service: Service) -> None:
    gone, kept = ended(service), ended(service)
    assert service.client.delete(f"/v1/jobs/{gone}").status_code == 204
    (service.run_dir(gone) / "checkpoints").mkdir(parents=True)
    unknown = service.run_dir("restored-from-a-backup")
    unknown.mkdir()
    service.clock.pass_(PAUSE_S)
    service.turn()
    assert not service.run_dir(gone).exists()
    assert unknown.exists()
    assert service.run_dir(kept).exists()


def test_a_folder_that_could_not_be_removed_at_once_goes_with_the_next_try(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = ended(service)

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patched:
        patched.setattr("thinwire.service.jobs.job_folder.shutil.rmtree", refuse)
        assert service.client.delete(f"/v1/jobs/{job_id}").status_code == 503
    assert service.client.delete(f"/v1/jobs/{job_id}").status_code == 204
    assert list((service.home / "runs").iterdir()) == []
