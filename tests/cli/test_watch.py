"""A watch follows one job to its end, through every restart of the control plane."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import pytest
from rich.console import Console

from thinwire.cli.quantities import ratio_text, time_text
from thinwire.cli.watch import LINE_EVERY_S, NO_WORKERS, View, watch
from thinwire.client import Client, NotFound, Unreachable
from thinwire.contract.jobs import Holder, Job, JobState, Queued, WaitingForWorkers, Wanted
from thinwire.contract.reports import Event, EventKind, Sample
from thinwire.contract.spec import TrainSpec

SPEC = TrainSpec.model_validate({"steps": 100, "global_batch": 8, "optimizer": {"name": "onebit_adam", "warmup": 20}})


def wanted(least: int, most: int, revision: int = 0) -> Wanted:
    return Wanted(min=least, max=most, revision=revision, takes_effect="in_place")


def job(state: JobState = JobState.RUNNING, step: int | None = None, **changes: Any) -> Job:
    sample = None
    if step is not None:
        sample = Sample(
            step=step,
            phase="warmup" if step <= 20 else "compressed",
            loss=4.0,
            samples_per_second=12.5,
            step_seconds=2.0,
            payload_bytes=290_000,
            compression_ratio=31.9,
            world_size=2,
            time=1000.0 + 2.0 * step,
        )
    changes = {"workers": 2 if sample else 0, "wanted_workers": wanted(2, 2), **changes}
    known = {"id": "job-1", "name": "job", "attempt": 1, "created_at": datetime.now(UTC), "run_dir": "/r", **changes}
    known = {"steps": SPEC.steps, **known}
    return Job(state=state, spec=SPEC, progress=sample, validation_loss=3.5 if sample else None, **known)


class ScriptedClient(Client):
    """Answers one item of a script a poll: a job, or an error to raise; and the events up to that poll."""

    def __init__(self, script: Sequence[Job | Exception], events: Mapping[int, Sequence[Event]] | None = None) -> None:
        super().__init__()
        self._script: Iterator[Job | Exception] = iter(script)
        self._events, self._polls = events or {}, 0

    def events(self, job_id: str, kinds: Sequence[str]) -> list[Event]:
        self._polls += kinds != (EventKind.CHECKPOINT_SAVED,)
        found = [event for poll, known in self._events.items() if poll <= self._polls for event in known]
        return [event for event in found if event.kind in kinds]

    def job(self, job_id: str) -> Job:
        answer = next(self._script)
        if isinstance(answer, Exception):
            raise answer
        return answer


class Time:
    """A clock that sleeping moves."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def watched(
    script: Sequence[Job | Exception],
    *,
    terminal: bool = False,
    events: Mapping[int, Sequence[Event]] | None = None,
) -> tuple[Job, str]:
    out, time = io.StringIO(), Time()
    console = Console(file=out, force_terminal=terminal, width=110, color_system=None, emoji=False, markup=False)
    with ScriptedClient(script, events) as client:
        ended = watch(client, "job-1", console, clock=time, sleep=time.sleep)
    return ended, out.getvalue()


END = job(JobState.SUCCEEDED, 100)


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("state", [JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED])
def test_a_watch_ends_with_the_job_and_says_how(state: JobState, terminal: bool) -> None:
    ended, text = watched(
        [job(), job(step=5), job(state, 9, reason="data.path [bold]is[/] :x: gone")], terminal=terminal
    )
    assert ended.state is state
    assert f"{state}" in text
    assert "data.path [bold]is[/] :x: gone" in text


@pytest.mark.parametrize("terminal", [False, True])
def test_every_figure_is_shown(terminal: bool) -> None:
    _, text = watched([job(step=30), END], terminal=terminal)
    for figure in ("compressed", "30/100", "4.0000", "3.5000", "12.5", "290 kB", "31.9x", "2 min 20 s"):
        assert figure in text


@pytest.mark.parametrize("terminal", [False, True])
def test_a_step_that_sent_nothing_is_shown_as_one(terminal: bool) -> None:
    answer = job(step=30)
    assert answer.progress is not None
    silent = answer.progress.model_copy(update={"payload_bytes": 0, "compression_ratio": None})
    _, text = watched([answer.model_copy(update={"progress": silent}), END], terminal=terminal)
    assert "compression nothing sent" in text


@pytest.mark.parametrize("terminal", [False, True])
def test_a_control_plane_that_goes_away_is_waited_for(terminal: bool) -> None:
    gone = [Unreachable("nobody answers")] * 50
    ended, text = watched([*gone[:3], job(step=5), *gone, job(step=50), END], terminal=terminal)
    assert ended == END
    assert "control plane not reachable, waiting (nobody answers)" in text


def test_the_end_counts_only_when_the_control_plane_says_it_now() -> None:
    ended, _ = watched([job(step=5), Unreachable("gone"), END])
    assert ended == END


def test_any_other_error_ends_the_watch() -> None:
    with pytest.raises(NotFound):
        watched([job(), NotFound(404, "not_found", "no such job", [])])


def test_what_on_poll_raises_ends_the_watch() -> None:
    def stop() -> None:
        raise KeyError("stop")

    with ScriptedClient([END]) as client, pytest.raises(KeyError):
        watch(client, "job-1", Console(file=io.StringIO()), on_poll=stop)


def test_plain_lines_come_at_each_change_and_now_and_then() -> None:
    script = [job(JobState.PENDING)] * 3 + [job(step=1)] * 4 + [job(step=21)] * 25 + [END]
    _, text = watched(script)
    lines = text.splitlines()
    # One at each of the changes (pending, running, warmup, compressed, end), and two more while nothing changes.
    repeated = 25 // int(LINE_EVERY_S)
    assert len(lines) == 4 + repeated, text
    assert not any("\x1b" in line for line in lines)


def test_a_plain_line_is_never_broken_by_a_narrow_width() -> None:
    out = io.StringIO()
    with ScriptedClient([job(JobState.FAILED, 5, reason="because " * 40)]) as client:
        watch(client, "job-1", Console(file=out, width=40))
    assert len(out.getvalue().splitlines()) == 1


def test_the_eta_follows_the_speed_of_the_last_samples() -> None:
    view = View()
    assert view.eta_s() is None
    view.saw(job())
    assert view.eta_s() is None
    view.saw(job(step=10))
    assert view.eta_s() == pytest.approx(180.0)  # 90 steps at the step time of the one sample
    slower = job(step=20)
    assert slower.progress is not None
    view.saw(slower.model_copy(update={"progress": slower.progress.model_copy(update={"time": 1020.0 + 100.0})}))
    assert view.eta_s() == pytest.approx(800.0)  # 80 steps at 10 s, evaluation and all


def test_a_resumed_attempt_measures_its_speed_anew() -> None:
    view = View()
    for answer in (job(step=10), job(step=60), job(step=50, attempt=2)):
        view.saw(answer)
    assert list(view.samples) == [(50, 1100.0)]


def test_the_clock_of_a_wait_begins_with_the_wait_and_not_with_the_watch() -> None:
    view, created = View(), datetime.fromtimestamp(500.0, UTC)
    submitted = job(JobState.PENDING, created_at=created)
    view.saw(submitted)
    assert view.waits_since(submitted) == 500.0
    started = job(created_at=created, started_at=datetime.fromtimestamp(520.0, UTC))
    assert view.waits_since(started) == 520.0
    waiting = job(step=10, waiting_for_workers=WaitingForWorkers(have=1, min=2))
    view.saw(waiting, [event(EventKind.WAITING_FOR_WORKERS, 4), event(EventKind.WAITING_FOR_WORKERS, 10)])
    assert view.waits_since(waiting) == 1010.0
    alone = job(step=10, workers=0)
    assert view.waits_since(alone) == 1020.0


def test_of_a_run_without_a_known_length_no_bar_is_drawn() -> None:
    """A bar without a total looks like one that is full."""
    known, unknown = ([job(step=5, steps=steps), job(JobState.SUCCEEDED, 100, steps=steps)] for steps in (100, None))
    assert "\u2501" in watched(known, terminal=True)[1]
    assert "\u2501" not in watched(unknown, terminal=True)[1]


def test_a_second_attempt_shows() -> None:
    _, text = watched([job(step=5, attempt=2), END], terminal=True)
    assert "attempt 2" in text


def event(kind: str, step: int, **fields: Any) -> Event:
    return Event(kind=kind, step=step, time=1000.0 + step, fields=fields)


@pytest.mark.parametrize("terminal", [False, True])
def test_a_restart_is_told_once_when_it_comes(terminal: bool) -> None:
    events = {1: [event("job_submitting", 0), event("resumed", 10)], 3: [event("resumed", 44)]}
    _, text = watched([job(step=50), job(step=55), job(step=45), job(step=46), END], events=events, terminal=terminal)
    assert text.count("worker lost: resumed from step 44") == 1
    assert "from step 10" not in text  # it was before the watch


def test_a_restart_of_an_elastic_job_is_not_called_a_loss() -> None:
    for limits in (wanted(1, 2), wanted(2, 2, revision=1)):
        script = [job(step=5, wanted_workers=limits), job(step=6, wanted_workers=limits), END]
        _, text = watched(script, events={2: [event("resumed", 4)]})
        assert "workers restarted: resumed from step 4" in text


@pytest.mark.parametrize("terminal", [False, True])
def test_a_further_attempt_is_told_and_its_own_resume_is_no_loss(terminal: bool) -> None:
    events = {
        1: [event("job_submitting", 0)],
        2: [event("job_submitting", 60)],
        3: [event("resumed", 61)],
        4: [event("resumed", 62)],
    }
    later = [job(JobState.SUBMITTING, 60, attempt=2), *(job(step=step, attempt=2) for step in (62, 63)), END]
    _, text = watched([job(step=60), *later], events=events, terminal=terminal)
    assert text.count("attempt 2: resumes from the newest checkpoint") == 1
    assert text.count("attempt 2: resumed from step 61") == 1
    assert text.count("worker lost: resumed from step 62") == 1


@pytest.mark.parametrize("terminal", [False, True])
def test_without_workers_and_samples_there_is_no_eta_but_what_is_waited_for(terminal: bool) -> None:
    gone = job(step=30, workers=0)
    _, text = watched([job(step=30), gone, gone, END], terminal=terminal)
    assert NO_WORKERS in " ".join(text.split()) if terminal else NO_WORKERS in text


def test_figures_are_old_only_without_a_worker_and_without_a_new_sample() -> None:
    view = View()
    for answer, stalled in (
        (job(), True),
        (job(workers=2), False),
        (job(step=5), False),
        (job(step=5), False),
        (job(step=6, workers=0), False),  # the service was away, and the leases ran out
        (job(step=6, workers=0), True),
        (job(JobState.CANCELLING, 6, workers=0), False),
        (job(step=100, workers=0), False),
        (job(step=100, workers=0), False),  # it only has to end
    ):
        view.saw(answer)
        assert view.stalled == stalled, answer


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize(
    ("size", "limits", "shown"),
    [
        (None, (2, 2), "workers 2"),
        (2, (2, 2), "workers 2"),
        (3, (2, 8), "workers 3 (wanted 2..8)"),
        (3, (4, 4), "workers 3 (wanted 4)"),
    ],
)
def test_the_workers_are_shown_beside_what_is_wanted(
    terminal: bool, size: int | None, limits: tuple[int, int], shown: str
) -> None:
    _, text = watched([job(step=30, world_size=size, wanted_workers=wanted(*limits)), END], terminal=terminal)
    assert shown in " ".join(text.split())
    assert ("wanted" in text) == ("wanted" in shown)


@pytest.mark.parametrize("terminal", [False, True])
def test_a_job_that_waits_for_workers_says_for_how_many_and_no_eta(terminal: bool) -> None:
    limits, waiting = wanted(2, 8), WaitingForWorkers(have=1, min=2)
    waits = job(step=30, workers=1, world_size=1, wanted_workers=limits, waiting_for_workers=waiting)
    _, text = watched([waits, waits, END], terminal=terminal)
    assert "RUNNING: waiting for workers (1 of 2)" in text
    assert "ETA 2 min" not in text


def test_a_plain_line_comes_when_the_workers_change() -> None:
    limits = wanted(2, 8)
    sizes = [job(step=30, world_size=size, wanted_workers=limits) for size in (2, 2, 3, 3, 3)]
    waits = job(step=30, wanted_workers=limits, waiting_for_workers=WaitingForWorkers(have=1, min=2))
    _, text = watched([*sizes, waits, waits, END])
    lines = text.splitlines()
    assert len(lines) == 4, text
    assert ["wanted 2..8" in line for line in lines] == [True, True, True, False]


@pytest.mark.parametrize("terminal", [False, True])
def test_each_change_of_the_workers_is_told_once_when_it_comes(terminal: bool) -> None:
    old, new = {"min": 2, "max": 2}, {"min": 2, "max": 8}
    events = {
        1: [event("regrouped", 10, world_size=7)],
        2: [event("resize_requested", 20, old=old, new=new, takes_effect="in_place")],
        3: [event("regrouped", 31, world_size=3, reason="worker_joined", seconds=1.5)],
        4: [event("regrouped", 41)],
    }
    _, text = watched([job(step=step) for step in (20, 30, 40, 50)] + [END], events=events, terminal=terminal)
    for line in (
        "resize requested: 2..8 workers, before 2; the job follows while it runs",
        "regrouped: 3 workers from step 31 in 1.5 s (worker_joined)",
        "regrouped: unknown workers from step 41",
    ):
        assert text.count(line) == 1, f"{line} in\n{text}"
    assert "regrouped: 7" not in text  # it was before the watch


def test_a_request_of_a_later_version_is_told_as_far_as_it_is_known() -> None:
    events = {2: [event("resize_requested", 20, new=8, takes_effect="by magic")]}
    _, text = watched([job(step=20), job(step=21), END], events=events)
    assert "resize requested: unknown workers, before unknown\n" in text


def test_a_change_that_is_told_late_is_told_all_the_same() -> None:
    """The workers post once a second: what the service itself has noted since is there before."""
    asked, regrouped = event("resize_requested", 21, new={"min": 1, "max": 3}), event("regrouped", 20, world_size=3)
    view = View()
    told = [view.saw(job(step=20), events) for events in ([], [asked], [regrouped, asked], [regrouped, asked])]
    assert [[line.partition(":")[0] for line in lines] for lines in told] == [
        [],
        ["resize requested"],
        ["regrouped"],
        [],
    ]


@pytest.mark.parametrize("kind", ["worker_stuck", "stalled", "slow_worker"])
def test_for_whom_the_others_wait_is_told_once_when_it_comes(kind: str) -> None:
    events = {2: [event(kind, 20, told="worker 1 (rank 1, box, pid 7) has not come")]}
    _, text = watched([job(step=20), job(step=20), job(step=20), END], events=events)
    assert text.count("at step 20: worker 1 (rank 1, box, pid 7) has not come\n") == 1


def test_what_stands_still_before_the_watch_is_told_and_what_is_over_is_not() -> None:
    def first(*events: Event) -> list[str]:
        return View().saw(job(step=20), events)

    still = event("stalled", 20, told="no step for 60 s").model_copy(update={"time": 1041.0})
    slow = event("slow_worker", 12, told="worker 1 is the last", over=False)
    assert first(still) == ["at step 20: no step for 60 s"]
    assert first(slow) == ["at step 12: worker 1 is the last"]
    assert first(event("stalled", 12, told="no step for 60 s")) == []  # there was a step since
    assert first(still, event("regrouped", 60)) == []
    assert first(slow, event("slow_worker", 18, told="no more", over=True)) == []


@pytest.mark.parametrize("terminal", [False, True])
def test_saves_that_fail_are_told_with_what_that_costs_and_so_is_their_end(terminal: bool) -> None:
    events = {
        1: [event("checkpoint_saved", 10)],
        2: [event("checkpoint_failed", 20, reason="OSError: No space left on device")],
        3: [event("checkpoint_failed", 30, reason="OSError: No space left on device")],
        4: [event("checkpoint_saved", 40)],
    }
    _, text = watched([job(step=step) for step in (10, 20, 30, 40)] + [END], terminal=terminal, events=events)
    told = "at step 20: no checkpoint: OSError: No space left on device; the job trains on, and a crash costs the steps"
    assert text.replace("\n", " ").count(f"{told} after 10") == 1
    assert "checkpoints fail since step 20" in text
    assert text.count("at step 40: checkpoints are saved again") == 1
    assert "fail since" not in text.rpartition("100/100")[2]


def test_saves_that_failed_before_the_watch_are_told_where_none_was_saved_since() -> None:
    failed, saved = event("checkpoint_failed", 20, reason="away"), event("checkpoint_saved", 30)
    (told,) = View().saw(job(step=21), [failed])
    assert told == "at step 20: no checkpoint: away; the job trains on, and a crash costs all of its steps"
    assert View().saw(job(step=31), [failed, saved]) == []


@pytest.mark.parametrize("terminal", [False, True])
def test_a_script_that_says_itself_how_long_it_trains_has_no_end_to_show(terminal: bool) -> None:
    _, said = watched([job(step=21, steps=None), job(JobState.SUCCEEDED, step=40, steps=None)], terminal=terminal)
    assert "step 21" in said
    assert "None" not in said
    assert "/100" not in said


def test_a_script_without_workers_is_stalled_even_where_no_end_is_known() -> None:
    view = View()
    view.saw(job(step=21, steps=None))
    view.saw(job(step=21, steps=None, workers=0))
    assert view.stalled
    assert view.eta_s() is None


@pytest.mark.parametrize("terminal", [True, False])
def test_a_scripts_own_numbers_are_shown(terminal: bool) -> None:
    running = job(step=30)
    assert running.progress is not None
    told = {"accuracy": 0.87654321, "phase": float("nan"), "a\x1b[2J": 1.0} | {f"n{number}": 1e9 for number in range(8)}
    told_of = running.progress.model_validate(running.progress.model_dump() | {"reported": told})
    _, out = watched(
        [running.model_copy(update={"progress": told_of}), job(JobState.SUCCEEDED, 100)], terminal=terminal
    )
    assert "accuracy 0.8765" in out
    assert "phase nan" in out
    assert "n5 1e+09" in out
    assert "n6" not in out
    assert "and 2 more in the history" in out
    assert "\x1b[2J" not in out


@pytest.mark.parametrize("terminal", [False, True])
def test_a_queued_job_says_where_it_stands_who_has_the_places_and_since_when(terminal: bool) -> None:
    since = datetime(2026, 11, 26, 11, 8, 24, tzinfo=UTC)
    holders = [Holder(job="e3-7fff5b", workers=5, min=2), Holder(job="b", workers=1, min=1)]
    queue = Queued(position=2, of=3, since=since, needs=5, free=1, total=8, holders=holders, others=1, starts_at=since)
    waits = job(JobState.QUEUED, queue=queue, reason="the same")
    next_one = waits.model_copy(update={"queue": queue.model_copy(update={"position": 1})})
    _, text = watched([waits, next_one, END], terminal=terminal)
    text = " ".join(text.split())
    words = (
        f"of 3, since {time_text(since)}: it needs 5 places at once, 1 of 8 are free; "
        f"it may start at {time_text(since)}, as the steps of those before it go; "
        "held by e3-7fff5b 5 (it needs 2), b 1, others than the service 1"
    )
    assert "QUEUED" in text
    if not terminal:
        assert f"QUEUED: position 2 {words}" in text
    assert f"position 1 {words}" in text or terminal


def test_a_job_that_the_cluster_has_become_too_small_for_says_so() -> None:
    queue = Queued(position=1, of=1, since=datetime.now(UTC), needs=9, free=8, total=8, holders=[])
    _, text = watched([job(JobState.QUEUED, queue=queue), END])
    assert "it needs 9 places, and the cluster has 8: add machines, or lower workers.min" in text


def test_a_ratio_is_read_without_an_exponent():
    assert [ratio_text(x) for x in (None, 1.0, 31.84, 999.4, 999.9, 1012.3)] == [
        "-",
        "1x",
        "31.8x",
        "999x",
        "1,000x",
        "1,012x",
    ]
