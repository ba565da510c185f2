"""A launcher that is slow, or says nothing at all, and many jobs: nobody waits for another's job."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, insert

from tests.service.control_plane_harness import Service, spec, wait_until
from thinwire.contract.spec import TrainSpec
from thinwire.service.jobs import calls, reconciler
from thinwire.service.jobs.calls import Calls
from thinwire.service.jobs.repository import JobRow
from thinwire.service.launch.fake import FakeLauncher
from thinwire.service.launch.protocol import Code, LaunchState, LaunchStatus

HUNG_S = 20.0
"""A test that fails by waiting is over then."""


class HangingLauncher(FakeLauncher):
    """Calls about the submissions in `hung`, and `ready` where it holds "", answer when `go` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.hung: set[str] = set()
        self.go = threading.Event()
        self.begun: Counter[str] = Counter()
        self.at_once: Counter[str] = Counter()
        self.most_at_once = 0

    def _call(self, submission_id: str) -> None:
        self.begun[submission_id] += 1
        self.at_once[submission_id] += 1
        self.most_at_once = max(self.most_at_once, self.at_once[submission_id])
        if submission_id in self.hung:
            self.go.wait(HUNG_S)
        self.at_once[submission_id] -= 1

    def ready(self) -> str | None:
        self._call("")
        return super().ready()

    def submit(
        self, submission_id: str, run_dir: Path, attempt: int, metadata: Mapping[str, str], code: Code | None = None
    ) -> None:
        self._call(submission_id)
        super().submit(submission_id, run_dir, attempt, metadata, code)

    def status(self, submission_id: str) -> LaunchStatus:
        self._call(submission_id)
        return super().status(submission_id)

    def cancel(self, submission_id: str) -> None:
        self._call(submission_id)
        super().cancel(submission_id)


@pytest.fixture
def hanging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Service, HangingLauncher]]:
    monkeypatch.setattr(calls, "SLOW_S", 0.05)
    launcher = HangingLauncher()
    service = Service(tmp_path / "home", launcher)
    yield service, launcher
    launcher.go.set()
    service.close()


def _turn(service: Service) -> None:
    service.plane.reconciler.patience_s = 0.1
    service.turn()


def _turns_until(service: Service, claim: Callable[[], Any], what: str) -> None:
    def turned() -> Any:
        _turn(service)
        return claim()

    wait_until(turned, what, timeout_s=HUNG_S / 2)


def test_jobs_that_hang_keep_no_other_waiting(hanging: tuple[Service, HangingLauncher]) -> None:
    service, launcher = hanging
    stuck, free = [service.running() for _ in range(2 * reconciler.AT_ONCE)], service.running()
    launcher.hung |= set(stuck)
    launcher.put(free, LaunchState.SUCCEEDED)
    new = service.submit()
    _turns_until(service, lambda: service.state(free) == "SUCCEEDED" and service.state(new) == "PENDING", "the others")
    for job_id in stuck:
        launcher.put(job_id, LaunchState.SUCCEEDED)
    launcher.go.set()
    _turns_until(service, lambda: {service.state(job_id) for job_id in stuck} == {"SUCCEEDED"}, "their late answers")
    assert launcher.most_at_once == 1


@pytest.mark.slow
def test_submits_that_hang_keep_no_other_job_waiting(
    hanging: tuple[Service, HangingLauncher], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconciler, "MOST_SUBMITS", 8)
    monkeypatch.setattr(reconciler, "EXPLAINED_AFTER_S", 0.0)
    service, launcher = hanging
    running = service.running()
    service.plane.reconciler._submits._at_most = 8
    stuck = [service.submit() for _ in range(12)]
    launcher.hung |= set(stuck)
    launcher.put(running, LaunchState.SUCCEEDED)
    _turns_until(service, lambda: service.state(running) == "SUCCEEDED", "the job that runs")
    _turns_until(service, lambda: all(service.job(job_id)["reason"] for job_id in stuck), "reasons")
    assert Counter(service.job(job_id)["reason"] for job_id in stuck) == {
        "waiting for the launcher: it has not answered yet": 8,
        "waiting for the launcher: it has 8 submissions to answer before": 4,
    }
    launcher.go.set()
    _turns_until(service, lambda: {service.state(job_id) for job_id in stuck} == {"PENDING"}, "every submit")
    assert {service.job(job_id)["reason"] for job_id in stuck} == {None}
    assert launcher.most_at_once == 1


def test_a_job_that_is_cancelled_while_its_submit_hangs_is_stopped_after_it(
    hanging: tuple[Service, HangingLauncher],
) -> None:
    service, launcher = hanging
    job_id = service.submit()
    launcher.hung.add(job_id)
    _turn(service)
    assert service.client.post(f"/v1/jobs/{job_id}/cancel").status_code == 202
    _turn(service)
    assert launcher.begun[job_id] == 1  # nothing else is asked of it meanwhile
    launcher.go.set()
    _turns_until(service, lambda: service.state(job_id) == "CANCELLED", "the cancel")
    assert launcher.submissions[job_id].status.state is LaunchState.STOPPED
    events = service.client.get(f"/v1/jobs/{job_id}/metrics").json()["events"]
    assert [one["kind"] for one in events] == ["job_submitting", "job_cancelling", "job_cancelled"]


def test_a_late_answer_is_applied_without_another_turn(hanging: tuple[Service, HangingLauncher]) -> None:
    service, launcher = hanging
    job_id = service.submit()
    launcher.hung.add(job_id)
    _turn(service)
    launcher.go.set()

    def applied() -> bool:
        service.plane.reconciler.apply_answers()
        return service.state(job_id) == "PENDING"

    wait_until(applied, "PENDING")
    assert launcher.begun[job_id] == 1


def test_a_launcher_that_does_not_say_whether_it_is_ready_is_told(hanging: tuple[Service, HangingLauncher]) -> None:
    service, launcher = hanging
    job_id = service.submit()
    launcher.hung.add("")
    _turn(service)
    with service.plane.db.read() as session:
        assert session.get_one(JobRow, job_id).reason == "waiting for the launcher: it does not answer"
    launcher.go.set()
    _turns_until(service, lambda: service.state(job_id) == "PENDING", "PENDING")


def test_no_request_asks_the_launcher(hanging: tuple[Service, HangingLauncher]) -> None:
    service, launcher = hanging
    over = service.running()
    launcher.put(over, LaunchState.SUCCEEDED)
    service.turn()
    launcher.hung |= {"", over}
    _turn(service)
    asked = launcher.begun.copy()

    def answers() -> list[Any]:
        return [service.client.get(path) for path in ("/readyz", "/metrics", f"/v1/jobs/{over}", "/v1/jobs")]

    ready, metrics, job, jobs = answers()
    assert [one.status_code for one in (ready, metrics, job, jobs)] == [200] * 4
    assert 'launcher_ready{launcher="fake"} 1.0' in metrics.text
    assert job.json()["state"] == "SUCCEEDED"
    service.plane.starter._silent_s = 0.0  # as if all this had taken long
    ready, metrics, *_ = answers()
    assert ready.status_code == 503
    assert "launcher: it has not answered for" in ready.json()["message"]
    assert 'launcher_ready{launcher="fake"} 0.0' in metrics.text
    assert launcher.begun == asked


def _fill(service: Service, count: int, state: str, first: int = 0) -> list[str]:
    """Put so many jobs into the database; those that run are known to the launcher too."""
    written = TrainSpec.model_validate(spec()).model_dump(mode="json")
    ids = [f"{state.lower()}-{number}" for number in range(first, first + count)]
    known = {"name": "n", "spec": written, "spec_digest": "d", "attempt": 1, "max_attempts": 4, "version": 1}
    rows = [
        {**known, "id": one, "token_hash": one, "state": state, "created_at": float(number)}
        for number, one in enumerate(ids)
    ]
    with service.plane.db.write() as session:
        session.execute(insert(JobRow), rows)
    if state == "RUNNING":
        for one in ids:
            service.launcher.submit(one, service.run_dir(one), 1, {})
            service.launcher.put(one, LaunchState.RUNNING)
    return ids


def test_a_turn_asks_the_database_as_often_for_many_quiet_jobs_as_for_few(service: Service) -> None:
    said: list[str] = []
    event.listen(service.plane.db.engine, "before_cursor_execute", lambda *args: said.append(args[2]))

    def statements() -> int:
        said.clear()
        service.turn()
        return len(said)

    jobs = _fill(service, 1, "RUNNING")
    service.turn()  # the first one also looks for what is too old, which is done once a minute
    few = statements()
    _fill(service, 300, "SUCCEEDED")
    jobs += _fill(service, 300, "RUNNING", first=1)
    assert statements() == few
    for job_id in jobs:
        service.launcher.put(job_id, LaunchState.SUCCEEDED)
    commits: list[int] = []
    here = threading.get_ident()  # in a thread of its own the owner's lease is renewed meanwhile
    event.listen(service.plane.db.engine, "commit", lambda _: commits.append(threading.get_ident()))
    service.turn()
    commits = [thread for thread in commits if thread == here]
    assert commits, "a turn writes where it is called"
    assert {service.state(job_id) for job_id in jobs[::50]} == {"SUCCEEDED"}
    assert len(commits) <= 1 + len(jobs) // reconciler.A_TRANSACTION


def test_one_job_that_cannot_be_moved_keeps_no_other_of_its_transaction(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [service.running() for _ in range(3)]
    for job_id in jobs:
        service.launcher.put(job_id, LaunchState.SUCCEEDED)
    target = reconciler._target

    def broken(row: JobRow, action: reconciler.Action) -> Any:
        if row.id == jobs[1]:
            raise RuntimeError("a bug")
        return target(row, action)

    monkeypatch.setattr(reconciler, "_target", broken)
    service.turn()
    assert [service.state(job_id) for job_id in jobs] == ["SUCCEEDED", "RUNNING", "SUCCEEDED"]


def test_a_call_that_is_slow_gives_its_place_to_another_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "SLOW_S", 3600.0)
    go, asked = threading.Event(), Calls[str](at_once=2, at_most=3)

    def hang() -> str:
        go.wait(HUNG_S)
        return "late"

    assert [asked.start(key, hang) for key in ("a", "a", "b", "c")] == [True, False, True, False]
    monkeypatch.setattr(calls, "SLOW_S", 0.0)
    assert [asked.start(key, hang) for key in ("c", "d")] == [True, False]
    assert not asked.wait(["a"], time.monotonic())
    go.set()
    assert asked.wait(["a", "b", "c"], time.monotonic() + HUNG_S)
    assert sorted((answer.key, answer.result) for answer in asked.answers()) == [
        ("a", "late"),
        ("b", "late"),
        ("c", "late"),
    ]
    assert asked.answers() == []
    asked.close()


def test_a_call_that_ends_with_what_is_no_exception_is_answered() -> None:
    """A cancellation, for one: else its job would never be asked about again."""

    def panics() -> str:
        raise asyncio.CancelledError("panic")

    several: Calls[str] = Calls(1, 1)
    for _ in range(2):
        assert several.start("one", panics)
        assert several.wait(["one"], time.monotonic() + HUNG_S)
        (answer,) = several.answers()
        assert "CancelledError: panic" in str(answer.error)
    several.close()


def test_a_call_for_which_there_is_no_thread_can_be_made_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    several: Calls[str] = Calls(1, 1)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert not several.start("one", lambda: "said")
    assert several.start("one", lambda: "said")
    assert several.wait(["one"], time.monotonic() + HUNG_S)
    assert [answer.result for answer in several.answers()] == ["said"]
    several.close()
