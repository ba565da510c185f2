"""Both clients: all that the service's document has, the same in both, over a real port."""

from __future__ import annotations

import asyncio
import inspect
import io
import itertools
import re
import threading
from collections.abc import Callable, Collection
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.covering import parametrize
from tests.service.control_plane_harness import sample, spec, wait_until
from tests.service.live_service import LiveService
from thinwire.client import ApiError, AsyncClient, Client, ClientError, NotFound, Rejected, Server, Unreachable
from thinwire.client.asking import Call
from thinwire.contract.jobs import JobState
from thinwire.contract.people import NewToken, Role
from thinwire.contract.spec import TrainSpec
from thinwire.service.launch.protocol import LaunchState

OF_RUNS = {"reports", "remote runs"}
"""Tags of what jobs themselves call, with their own tokens: no person does."""
OF_BROWSERS = {"POST /v1/session", "DELETE /v1/session"}
"""They give and take a cookie, in the place of a token."""
EXAMPLES: dict[str, Any] = {
    "job_id": "a-1",
    "job_ids": ["a-1"],
    "prefix": "a",
    "spec": {},
    "kinds": ["resumed"],
    "labels": {"team": None},
    "folder": "step-00000001-000000000000",
    "file": "manifest.json",
    "target": Path("x"),
    "sha256": "0" * 64,
    "size": 1,
    "asked": NewToken(name="anna"),
    "name": "anna",
    "changes": {"weight": 2.0},
    "project": "vision",
}


def calls() -> dict[str, Call[Any, Any]]:
    """Every method of the clients by its name."""
    found = {name: getattr(Client, name) for name in dir(Client) if not name.startswith("_")}
    return {name: call for name, call in found.items() if isinstance(call, Call)}


def server(live: LiveService) -> Server:
    return Server(f"http://127.0.0.1:{live.port}", live.service.token)


def test_every_operation_of_a_person_has_a_method(live: LiveService) -> None:
    asked = []
    for call in calls().values():
        parameters = inspect.signature(call.steps).parameters.values()
        needed = {one.name: EXAMPLES[one.name] for one in parameters if one.default is one.empty}
        ask = next(call.steps(**needed))
        asked.append((ask.method.lower(), ask.path))
    document = live.service.client.get("/openapi.json").json()
    missing = []
    for path, operations in document["paths"].items():
        pattern = re.compile(re.sub(r"\\\{\w+\\\}", "[^/]+", re.escape(path)))
        for method, operation in operations.items():
            is_of_runs = OF_RUNS & set(operation["tags"]) and not {"jobs"} & set(operation["tags"])
            if not is_of_runs and not any(m == method and pattern.fullmatch(p) for m, p in asked):
                missing.append(f"{method.upper()} {path}")
    assert set(missing) == OF_BROWSERS


def test_both_clients_have_the_same_methods_with_their_words() -> None:
    for name, call in calls().items():
        assert isinstance(getattr(AsyncClient, name), Call)
        assert call.__doc__, name
    with Client(Server("http://127.0.0.1:1", "x")) as client:
        assert client.job.__name__ == "job"
        assert "NotFound" in (client.job.__doc__ or "")


def test_a_client_does_what_a_person_does(live: LiveService, tmp_path: Path) -> None:
    with Client(server(live)) as client:
        job = client.submit(TrainSpec.model_validate(spec(name="sync", labels={"by": "sync"})))
        assert job.labels == {"by": "sync"}
        assert [one.id for one in client.jobs(labels={"by": "sync"}, state="SUBMITTING")] == [job.id]
        assert client.label(job.id, {"by": None, "kept": "yes"}).labels == {"kept": "yes"}
        assert client.resize(job.id, most=2).wanted_workers.max == 2
        assert client.cancel(job.id).state is JobState.CANCELLING
        live.service.turn(2)
        assert client.wait([job.id]) == {job.id: client.job(job.id)}
        assert client.resolve("sync-").id == job.id
        again = client.clone(job.id, {"steps": 60})
        assert again.spec is not None
        assert (again.spec.steps, again.labels) == (60, {"kept": "yes"})
        draft = client.validate(spec())
        assert isinstance(draft.spec, TrainSpec)
        client.delete(job.id)
        with pytest.raises(NotFound):
            client.job(job.id)
        made = client.create_token(NewToken(name="ci", role=Role.VIEWER))
        assert [token.name for token in client.tokens()] == [made.name]
        with Client(Server(server(live).url, made.token)) as viewer:
            with pytest.raises(ApiError) as refused:
                viewer.submit(spec())
            assert refused.value.status == 403
            assert (viewer.me().name, viewer.me().role) == ("ci", Role.VIEWER)
        client.revoke_token("ci")
        assert "create_token" in [line.what for line in client.audit(None)]
        assert client.targets() == []
        assert "thinwire_" in client.metrics()
        assert (client.alive(), client.not_ready() or "") == (True, "")
        assert client.packages() == []
        assert client.has_package("0" * 64) is False


def test_an_async_client_does_the_same_beside_other_things(live: LiveService, tmp_path: Path) -> None:
    async def do() -> None:
        async with AsyncClient(server(live)) as client:
            made = await asyncio.gather(*(client.submit(spec(name=f"async-{number}")) for number in range(3)))
            found = await client.jobs(name="async-*")
            assert {job.id for job in found} == {job.id for job in made}
            histories = await asyncio.gather(*(client.history(job.id) for job in made))
            assert [history.job_id for history in histories] == [job.id for job in made]
            live.service.turn(2)
            live.service.post(made[0].id, samples=[sample(step) for step in range(1, 40)])
            part = await client.history(made[0].id, after_step=9, before_step=31, points=5)
            assert (part.samples[0].step, part.samples[-1].step) == (10, 30)
            assert len(part.samples) <= 5
            assert len((await client.history(made[0].id, before_step=31)).samples) == 30
            with pytest.raises(Rejected) as refused:
                await client.submit({**spec(), "stepz": 1})
            assert [problem.path for problem in refused.value.problems] == ["stepz"]
            for job in made:
                await client.cancel(job.id)
            live.service.turn(2)
            ended = await client.wait([job.id for job in made], 60.0)
            assert {job.state for job in ended.values()} == {JobState.CANCELLED}

    asyncio.run(do())


def test_files_go_up_and_down_by_both(live: LiveService, tmp_path: Path) -> None:
    job_id = live.service.running(name="files")
    folder = live.service.run_dir(job_id) / "checkpoints" / f"step-00000001-{'0' * 12}"
    folder.mkdir(parents=True)
    (folder / "weights.bin").write_bytes(bytes(range(256)) * 4000)
    sent: list[int] = []

    async def do(client: AsyncClient) -> None:
        await client.checkpoint_file(job_id, folder.name, "weights.bin", tmp_path / "async" / "w")
        with pytest.raises(Rejected):
            await client.put_package("1" * 64, io.BytesIO(b"x" * 600_000), 600_000, sent.append)
        await client.close()

    with Client(server(live)) as client:
        client.checkpoint_file(job_id, folder.name, "weights.bin", tmp_path / "sync" / "w")
        with pytest.raises(NotFound):
            client.checkpoint_file(job_id, folder.name, "gone.bin", tmp_path / "gone")
        with pytest.raises(Rejected, match="sha256"):
            client.put_package("1" * 64, io.BytesIO(b"x" * 600_000), 600_000, sent.append)
    asyncio.run(do(AsyncClient(server(live))))
    for name in ("sync", "async"):
        assert (tmp_path / name / "w").read_bytes() == (folder / "weights.bin").read_bytes()
    assert not (tmp_path / "gone").exists()
    assert sum(sent) == 2 * 600_000


def error(status: int) -> Callable[[httpx.Request], httpx.Response]:
    body = {"code": "a_code", "message": "what is wrong", "problems": []}
    return lambda request: httpx.Response(status, json=body)


@parametrize("status", [404, 409, 422, 503], usual=[0, -1])
def test_both_raise_the_same_errors(status: int) -> None:
    to = Server("http://127.0.0.1:1", "secret")

    async def asked() -> BaseException:
        async with AsyncClient(to, transport=httpx.MockTransport(error(status))) as client:
            with pytest.raises(ClientError) as found:
                await client.job("a-1")
        return found.value

    with Client(to, transport=httpx.MockTransport(error(status))) as client, pytest.raises(ClientError) as found:
        client.job("a-1")
    other = asyncio.run(asked())
    assert (type(other), str(other)) == (found.type, str(found.value))
    assert "secret" not in repr(found.value) + repr(to)


def test_a_wait_outlasts_a_service_that_goes_away_and_ends_with_its_time() -> None:
    answers = iter([503, 503])

    def reply(request: httpx.Request) -> httpx.Response:
        return error(next(answers, 404))(request)

    to = Server("http://127.0.0.1:1", "x")
    with Client(to, transport=httpx.MockTransport(reply)) as client, pytest.raises(NotFound):
        client.wait(["a-1"], poll_s=0.01)
    with Client(to, transport=httpx.MockTransport(error(503))) as client, pytest.raises(Unreachable):
        client.wait(["a-1"], 0.02, poll_s=0.01)


def test_a_wait_looks_when_it_is_told_and_hangs_up_then(live: LiveService, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody polls: each look but the first two comes of what a stream has told."""
    monkeypatch.setattr("thinwire.client.calls.LOOK_S", 3600.0)

    async def awaited(job_ids: list[str]) -> Collection[str]:
        async with AsyncClient(server(live)) as client:
            return await client.wait(job_ids, poll_s=3600.0)

    with Client(server(live)) as client:
        waits = (lambda job_ids: client.wait(job_ids, poll_s=3600.0), lambda job_ids: asyncio.run(awaited(job_ids)))
        for wait, jobs in itertools.product(waits, (1, 2)):
            job_ids = [live.service.running() for _ in range(jobs)]
            ending = threading.Timer(0.2, lambda ids=job_ids: [live.finish(job_id) for job_id in ids])
            ending.start()
            assert set(wait(job_ids)) == set(job_ids)
            ending.join()
        wait_until(lambda: "thinwire-bell" not in {one.name for one in threading.enumerate()}, "the threads have ended")


def test_a_wait_that_is_over_in_time_has_what_has_ended_by_then(live: LiveService) -> None:
    ended, goes_on = live.service.running(name="ended"), live.service.running(name="on")
    live.service.launcher.put(ended, LaunchState.SUCCEEDED)
    live.service.turn(2)
    told: list[str] = []
    with Client(server(live)) as client:
        found = client.wait([ended, goes_on], 0.05, poll_s=0.01, on_ended=lambda job: told.append(job.id))
    assert (list(found), told) == ([ended], [ended])


def test_all_pages_of_a_list_come_and_no_more_than_are_asked_for(
    live: LiveService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("thinwire.client.calls.MOST", 2)
    made = [live.service.submit(name="paged") for _ in range(5)]
    begin = datetime.fromtimestamp(live.service.clock.now, UTC)
    with Client(server(live)) as client:
        assert len(client.jobs(3, name="paged")) == 3
        assert sorted(job.id for job in client.jobs(None, name="paged")) == sorted(made)
        assert sorted(job.id for job in client.jobs(None, name="paged", created_after=begin)) == sorted(made)
        assert client.jobs(None, name="paged", created_before=begin) == []
        lines = client.audit(None)
    assert [line.number for line in lines] == sorted((line.number for line in lines), reverse=True)
    assert len(lines) > 5
