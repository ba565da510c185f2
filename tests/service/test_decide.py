"""The reconciler's decisions, as a table: what is believed x what the launcher says -> what to do."""

from __future__ import annotations

from typing import Any

import pytest

from thinwire.contract.jobs import JobState
from thinwire.contract.reports import Failure
from thinwire.service.jobs.decide import (
    ABSENT_POLLS,
    LONGEST_REASON,
    Action,
    Cancel,
    Fail,
    JobView,
    Retry,
    Run,
    StopRun,
    Submit,
    Succeed,
    Wait,
    decide,
)
from thinwire.service.launch.protocol import LaunchState, LaunchStatus

S, L = JobState, LaunchState
ACTIVE = (S.PENDING, S.RUNNING)
SUMMARY = {"state": "SUCCEEDED"}


def view(state: JobState, **changes: Any) -> JobView:
    return JobView(**{"id": "job-1", "state": state, "attempt": 1, "max_attempts": 4, "max_restarts": 3, **changes})


TABLE: list[tuple[JobState, LaunchState, type[Action]]] = [
    *((S.SUBMITTING, said, Submit) for said in L),
    *((S.QUEUED, said, Submit) for said in L),
    (S.PENDING, L.UNKNOWN, Wait),
    (S.PENDING, L.ABSENT, Wait),
    (S.PENDING, L.PENDING, Wait),
    (S.PENDING, L.RUNNING, Run),
    (S.PENDING, L.SUCCEEDED, Succeed),
    (S.PENDING, L.FAILED, Retry),
    (S.PENDING, L.STOPPED, Fail),
    (S.RUNNING, L.UNKNOWN, Wait),
    (S.RUNNING, L.ABSENT, Wait),
    (S.RUNNING, L.PENDING, Wait),
    (S.RUNNING, L.RUNNING, Wait),
    (S.RUNNING, L.SUCCEEDED, Succeed),
    (S.RUNNING, L.FAILED, Retry),
    (S.RUNNING, L.STOPPED, Fail),
    (S.CANCELLING, L.UNKNOWN, Wait),
    (S.CANCELLING, L.ABSENT, Cancel),
    (S.CANCELLING, L.PENDING, StopRun),
    (S.CANCELLING, L.RUNNING, StopRun),
    (S.CANCELLING, L.SUCCEEDED, Succeed),
    (S.CANCELLING, L.FAILED, Cancel),
    (S.CANCELLING, L.STOPPED, Cancel),
]


@pytest.mark.parametrize(("believed", "said", "action"), TABLE)
def test_table(believed: JobState, said: LaunchState, action: type[Action]) -> None:
    assert type(decide(view(believed), LaunchStatus(said))) is action


def test_the_table_is_complete() -> None:
    open_states = [state for state in S if not state.terminal]
    assert {(believed, said) for believed, said, _ in TABLE} == {(state, said) for state in open_states for said in L}


def test_a_run_whose_machines_a_queue_took_is_begun_anew_and_that_does_not_count() -> None:
    taken = LaunchStatus(L.PENDING, put_back=True, waits_for="no quota")
    action = decide(view(S.RUNNING, attempt=4), taken)
    assert isinstance(action, Retry)
    assert not action.counted
    assert action.reason == (
        "attempt 4 was suspended in its cluster: no quota; attempt 5 resumes from the newest checkpoint"
    )
    assert decide(view(S.PENDING), taken) == Wait()
    assert decide(view(S.CANCELLING), taken) == StopRun()
    assert decide(view(S.RUNNING, summary=SUMMARY), taken) == Succeed(SUMMARY)
    failure = Failure(kind="NonFinite", message="nan", step=3)
    assert decide(view(S.RUNNING, failure=failure), taken) == Fail("NonFinite (step 3): nan")


@pytest.mark.parametrize("state", ACTIVE)
def test_a_run_that_is_to_give_its_places_back_is_ended_and_begun_anew_and_that_does_not_count(state: JobState) -> None:
    job = view(state, attempt=4, recalled="it stands still")
    for said in (L.PENDING, L.RUNNING):
        assert decide(job, LaunchStatus(said)) == StopRun()
    for said in (L.STOPPED, L.FAILED, L.ABSENT):
        again = Retry("it stands still; attempt 5 resumes from the newest checkpoint", counted=False)
        assert decide(job, LaunchStatus(said)) == again
    assert decide(job, LaunchStatus(L.UNKNOWN)) == Wait()
    failure = Failure(kind="NonFinite", message="nan", step=3)
    ended = view(state, recalled="it stands still", failure=failure)
    assert decide(ended, LaunchStatus(L.FAILED)) == Fail("NonFinite (step 3): nan")
    assert decide(view(state, recalled="x", summary=SUMMARY), LaunchStatus(L.STOPPED)) == Succeed(SUMMARY)
    assert decide(view(S.CANCELLING, recalled=None), LaunchStatus(L.STOPPED)) == Cancel()


@pytest.mark.parametrize("state", ACTIVE)
def test_absent_counts_only_when_it_lasts(state: JobState) -> None:
    absent = LaunchStatus(L.ABSENT)
    for polls in range(ABSENT_POLLS - 1):
        assert decide(view(state, absent_polls=polls), absent) == Wait()
    assert isinstance(decide(view(state, absent_polls=ABSENT_POLLS - 1), absent), Retry)


@pytest.mark.parametrize(("attempt", "retries"), [(1, True), (3, True), (4, False)])
def test_attempts_end_with_max_restarts(attempt: int, retries: bool) -> None:
    job = view(S.RUNNING, attempt=attempt, max_attempts=4, absent_polls=ABSENT_POLLS)
    action = decide(job, LaunchStatus(L.ABSENT))
    if retries:
        assert isinstance(action, Retry)
        assert f"attempt {attempt} was lost" in action.reason
    else:
        assert isinstance(action, Fail)
        assert "max_restarts = 3" in action.reason


@pytest.mark.parametrize("state", [*ACTIVE, S.CANCELLING])
@pytest.mark.parametrize("said", [L.ABSENT, L.STOPPED, L.SUCCEEDED])
def test_a_run_that_left_its_summary_has_succeeded(state: JobState, said: LaunchState) -> None:
    assert decide(view(state, summary=SUMMARY), LaunchStatus(said)) == Succeed(SUMMARY)


@pytest.mark.parametrize("state", ACTIVE)
def test_a_lost_run_that_left_a_failure_is_not_tried_again(state: JobState) -> None:
    job = view(state, absent_polls=ABSENT_POLLS, failure=Failure(kind="NonFiniteInput", message="loss is nan", step=7))
    assert decide(job, LaunchStatus(L.ABSENT)) == Fail("NonFiniteInput (step 7): loss is nan")


def test_a_posted_failure_is_the_reason_whatever_the_cluster_says() -> None:
    job = view(S.RUNNING, failure=Failure(kind="SpecError", message="width is odd"))
    assert decide(job, LaunchStatus(L.FAILED, "Traceback ...")) == Fail("SpecError: width is odd")


def test_what_no_attempt_could_change_fails_at_once() -> None:
    refused = LaunchStatus(L.FAILED, "KubeRay refuses the RayJob: no head", for_good=True)
    assert decide(view(S.PENDING), refused) == Fail("KubeRay refuses the RayJob: no head")


def test_a_run_that_was_killed_is_tried_again_and_says_so() -> None:
    action = decide(view(S.RUNNING), LaunchStatus(L.FAILED, "Killed"))
    assert isinstance(action, Retry)
    assert "attempt 1 was killed" in action.reason


def last(**changes: Any) -> JobView:
    """A job on its last attempt."""
    return view(S.RUNNING, attempt=4, **changes)


def test_without_a_failure_the_reason_is_the_clusters_last_words_and_no_stack() -> None:
    message = (
        "Job entrypoint command failed with exit code 1, last available logs (truncated to 20,000 chars):\n"
        "Traceback (most recent call last):\n"
        '  File "main.py", line 3, in <module>\n'
        "    import torch\n"
        "ModuleNotFoundError: No module named 'torch'\n"
    )
    action = decide(last(), LaunchStatus(L.FAILED, message))
    assert isinstance(action, Fail)
    assert "ModuleNotFoundError: No module named 'torch'" in action.reason
    assert "Traceback" not in action.reason
    assert "File" not in action.reason
    assert "thinwire logs job-1" in action.reason


@pytest.mark.parametrize("message", ["", "\n \n", "Traceback (most recent call last):\n  File x\n"])
def test_a_failure_without_words_points_to_the_log(message: str) -> None:
    action = decide(last(), LaunchStatus(L.FAILED, message))
    assert isinstance(action, Fail)
    assert action.reason.endswith("See its log: thinwire logs job-1")


def test_lines_about_what_went_well_are_left_out_of_a_reason() -> None:
    message = "x INFO checkpoint_saved step=1\nKilled\ny INFO checkpoint_saved step=2\n"
    action = decide(last(), LaunchStatus(L.FAILED, message))
    assert isinstance(action, Fail)
    assert "Killed" in action.reason
    assert "checkpoint_saved" not in action.reason


def test_a_long_message_is_cut() -> None:
    action = decide(last(), LaunchStatus(L.FAILED, "x" * 100_000))
    assert isinstance(action, Fail)
    assert len(action.reason) < LONGEST_REASON + 200
