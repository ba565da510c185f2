"""`thinwire resize`: what it asks, what it says, how it waits, what it refuses."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.cli.command_line import Run
from tests.covering import parametrize
from tests.service.control_plane_harness import sample, wait_until
from tests.service.live_service import LiveService
from thinwire.cli import resize, watch
from thinwire.client import Client, Unreachable
from thinwire.contract.jobs import Job
from thinwire.service.launch.protocol import LaunchState

ELASTIC = {"min": 2, "max": 4}


@contextmanager
def meanwhile(action: Callable[[], None]) -> Iterator[None]:
    """Do it in a thread while the block runs; what it raises is raised after the block."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            action()
        except BaseException as error:  # noqa: BLE001 - raised below
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        thread.join(60)
    if raised:
        raise raised[0]


def asked_for(live: LiveService, job_id: str) -> None:
    """Return once the resize has arrived."""
    wait_until(lambda: live.service.job(job_id)["wanted_workers"]["revision"] == 1, "the resize")


def test_resize_asks_and_says_what_is_wanted_now(thinwire: Callable[..., Run], live: LiveService) -> None:
    job_id = live.service.running(workers=ELASTIC)
    run = thinwire("resize", job_id[:-2], "--min", "3", "--max", "8")
    assert (run.code, run.out) == (0, "")
    assert f"{job_id} may have 3..8 workers; the job follows while it runs." in run.err
    assert live.service.job(job_id)["wanted_workers"]["min"] == 3
    run = thinwire("resize", job_id, "--min", "8")
    assert "may have 8 workers" in run.err


@pytest.mark.parametrize(
    ("started", "elastic", "said"),
    [
        (False, "in_place", "the job starts with that."),
        (True, "restart", "the job follows when it restarts next (workers.elastic = restart)."),
    ],
)
def test_resize_says_when_it_takes_effect(
    thinwire: Callable[..., Run], live: LiveService, started: bool, elastic: str, said: str
) -> None:
    workers = {**ELASTIC, "elastic": elastic}
    job_id = live.service.running(workers=workers) if started else live.service.submit(workers=workers)
    assert said in thinwire("resize", job_id, "--max", "8").err


def test_resize_waits_until_so_many_workers_train(thinwire: Callable[..., Run], live: LiveService) -> None:
    job_id = live.service.running(workers=ELASTIC)
    live.service.post(job_id, samples=[sample(1, at=1.0, world_size=2)])

    def follow() -> None:
        asked_for(live, job_id)
        waiting = {"kind": "waiting_for_workers", "step": 1, "time": 2.0, "fields": {"have": 2, "min": 4}}
        live.service.post(job_id, events=[waiting])
        wait_until(lambda: polls.count("waiting") > 0, "a poll that sees the waiting")
        live.service.post(job_id, events=[{"kind": "regrouped", "step": 1, "time": 3.0, "fields": {"world_size": 4}}])

    polls: list[str] = []
    with meanwhile(follow), pytest.MonkeyPatch.context() as patched:
        seen = watch.waiting_text

        def watched(job: Job) -> str | None:
            text = seen(job)
            polls.append("waiting" if text else "")
            return text

        patched.setattr(watch, "waiting_text", watched)
        run = thinwire("resize", job_id, "--min", "4", "--max", "6", "--wait")
    assert (run.code, run.out) == (0, "")
    lines = run.err.splitlines()
    assert "RUNNING: waiting for workers (2 of 4)" in lines
    assert lines[-1] == f"quickstart {job_id} has them: workers 4 (wanted 4..6)."
    assert len(lines) < 10  # a line for each change, not for each poll


def test_resize_that_is_true_already_does_not_wait(thinwire: Callable[..., Run], live: LiveService) -> None:
    job_id = live.service.running(workers=ELASTIC)
    live.service.post(job_id, samples=[sample(1, world_size=2)])
    assert thinwire("resize", job_id, "--max", "8", "--wait").code == 0


def test_a_job_that_ends_while_it_is_waited_for_is_a_failure(thinwire: Callable[..., Run], live: LiveService) -> None:
    job_id = live.service.running(workers=ELASTIC)

    def end() -> None:
        asked_for(live, job_id)
        live.finish(job_id, LaunchState.FAILED, "the card caught fire")

    with meanwhile(end):
        run = thinwire("resize", job_id, "--max", "8", "--wait")
    assert run.code == 1
    assert "FAILED" in run.err
    assert "the card caught fire, before it had so many workers" in run.err


def test_ctrl_c_ends_the_waiting_and_what_was_asked_stands(
    thinwire: Callable[..., Run], live: LiveService, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> Job:
        raise KeyboardInterrupt

    job_id = live.service.running(workers=ELASTIC)
    monkeypatch.setattr(resize, "wait_for_workers", interrupt)
    run = thinwire("resize", job_id, "--max", "8", "--wait")
    assert run.code == 130
    assert "what was asked stands" in run.err
    assert live.service.job(job_id)["wanted_workers"]["max"] == 8


def test_waiting_goes_on_while_the_service_is_away_and_says_so_now_and_then(live: LiveService) -> None:
    job_id = live.service.running(workers=ELASTIC)
    live.service.post(job_id, samples=[sample(1, world_size=2)])
    now_s, said = [0.0], list[str]()

    def sleep(seconds: float) -> None:
        now_s[0] += seconds

    class Away(Client):
        left = 25

        def job(self, job_id: str) -> Job:
            self.left -= 1
            if self.left > 0:
                raise Unreachable("nobody answers")
            return super().job(job_id)

    with Away() as client:
        job = watch.wait_for_workers(client, job_id, said.append, clock=lambda: now_s[0], sleep=sleep)
    assert job.world_size == 2
    assert said == ["control plane not reachable, waiting (nobody answers)"] * 3


@parametrize(
    ("arguments", "said"),
    [
        ((), "give --min, --max or both"),
        (("--min", "0"), "workers.min = 0: must be a whole number at least 1 and at most 4096"),
        (("--min", "5"), "workers.min = 5: must be at most workers.max = 4, as it is now"),
        (("--max", "9"), "workers.max = 9: must be at most global_batch = 8"),
        (("--min", "many"), "Invalid value for '--min'"),
    ],
    usual=[0, 2],
)
def test_numbers_that_cannot_be_are_refused_in_words(
    thinwire: Callable[..., Run], live: LiveService, arguments: tuple[str, ...], said: str
) -> None:
    job_id = live.service.running(workers=ELASTIC)
    run = thinwire("resize", job_id, *arguments)
    assert (run.code, run.out) == (2, "")
    assert said in run.err
    assert live.service.job(job_id)["wanted_workers"]["revision"] == 0


def test_a_job_that_is_over_is_refused_with_its_state(thinwire: Callable[..., Run], live: LiveService) -> None:
    job_id = live.service.running()
    live.finish(job_id)
    run = thinwire("resize", job_id, "--max", "2")
    assert run.code == 1
    assert f"job {job_id} is SUCCEEDED: its workers can no longer be changed" in run.err


def test_the_help_teaches(thinwire: Callable[..., Run]) -> None:
    text = thinwire("resize", "--help").out
    for words in ("--min", "--max", "--wait", "Example:", "workers.elastic: restart", "Exit code 2"):
        assert words in text
    assert "resize" in thinwire("--help").out


def test_show_tells_training_and_wanted_workers(thinwire: Callable[..., Run], live: LiveService) -> None:
    def rows(job_id: str) -> dict[str, str]:
        lines = [line.partition(" ") for line in thinwire("show", job_id).out.splitlines()]
        return {name: value.strip() for name, _, value in lines}

    job_id = live.service.running(workers=ELASTIC)
    assert "training" not in rows(job_id)
    assert "wanted" not in rows(job_id)
    waiting: dict[str, Any] = {"kind": "waiting_for_workers", "step": 1, "time": 2.0, "fields": {"have": 1, "min": 2}}
    live.service.post(job_id, events=[waiting])
    assert rows(job_id)["training"] == "1 (wanted 2..4), waiting for workers (1 of 2)"
    thinwire("resize", job_id, "--min", "1", "--max", "1")
    assert rows(job_id)["wanted"] == "1, submitted with 2..4; the job follows while it runs"
    live.finish(job_id)
    assert rows(job_id)["wanted"] == "1, submitted with 2..4"
