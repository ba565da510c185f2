"""What to do about a job, from what the database believes and what the launcher says. Pure: no clock, no effects.

believed    launcher says   action
SUBMITTING  (not asked)     Submit: a second submit of one id finds the first
QUEUED      (not asked)     the same, once it has its places (queue.py)
CANCELLING  PENDING RUNNING StopRun, again at each poll until it is gone
CANCELLING  SUCCEEDED       Succeed: it was over before the cancel arrived
CANCELLING  gone otherwise  Cancel, or Succeed where the run left its summary
PENDING     RUNNING         Run
RUNNING     PENDING         Wait; where a queue has put it back: Succeed, Fail, or Retry, uncounted, by what it left
recalled    PENDING RUNNING StopRun: it gives its places back (admission.py)
recalled    gone otherwise  Retry, uncounted; Succeed or Fail where the run has left a summary or a failure
either      SUCCEEDED       Succeed
either      FAILED          Fail with the reason that the run left, or the cluster where a further attempt would fail
                            alike; Retry where neither has said one: it was killed
either      STOPPED         Fail: nobody asked us; or Succeed where the run left its summary
either      ABSENT          Wait for ABSENT_POLLS of them; then by what the run left: Succeed, Fail, or Retry
any         UNKNOWN         Wait
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from thinwire.contract.jobs import JobState
from thinwire.contract.reports import Failure
from thinwire.service.launch.protocol import LaunchState, LaunchStatus

ABSENT_POLLS = 3
"""Consecutive polls that must say ABSENT before a run is given up for lost."""
LAST_LINES = 5
LONGEST_REASON = 2000


@dataclass(frozen=True, slots=True)
class JobView:
    """What a decision depends on."""

    id: str
    state: JobState
    attempt: int
    max_attempts: int
    """1 + workers.max_restarts, and one more for each attempt that an orderly end of the service, or a queue, took."""
    max_restarts: int = 0
    absent_polls: int = 0
    """Consecutive polls before this one that said ABSENT."""
    summary: dict[str, Any] | None = None
    """What a run that succeeded has left, posted or in its folder."""
    failure: Failure | None = None
    """What a run that cannot go on has left, posted or in its folder."""
    recalled: str | None = None
    """Why it is to give its places back; None where it keeps them."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Change nothing."""


@dataclass(frozen=True, slots=True)
class Submit:
    """Hand the current attempt to the launcher; then PENDING."""


@dataclass(frozen=True, slots=True)
class Run:
    """PENDING -> RUNNING."""


@dataclass(frozen=True, slots=True)
class Retry:
    """Back to SUBMITTING with the next attempt. counted: is it one of those that workers.max_restarts allows?"""

    reason: str
    counted: bool = True


@dataclass(frozen=True, slots=True)
class Succeed:
    """-> SUCCEEDED."""

    summary: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class Fail:
    """-> FAILED."""

    reason: str


@dataclass(frozen=True, slots=True)
class StopRun:
    """Ask the launcher to end the run."""


@dataclass(frozen=True, slots=True)
class Cancel:
    """CANCELLING -> CANCELLED."""


Action = Wait | Submit | Run | Retry | Succeed | Fail | StopRun | Cancel


def decide(job: JobView, status: LaunchStatus) -> Action:
    """The one action for a job that is not over. See the table above."""
    said = status.state
    if job.state in (JobState.SUBMITTING, JobState.QUEUED):
        return Submit()
    if said is LaunchState.UNKNOWN:
        return Wait()
    if said is LaunchState.SUCCEEDED:
        return Succeed(job.summary)
    if said in (LaunchState.ABSENT, LaunchState.STOPPED) and job.summary is not None:
        return Succeed(job.summary)
    if job.state is JobState.CANCELLING:
        return StopRun() if said in (LaunchState.PENDING, LaunchState.RUNNING) else Cancel()
    if job.recalled is not None and said in (LaunchState.PENDING, LaunchState.RUNNING):
        return StopRun()
    if job.recalled is not None and job.failure is None:
        return Retry(f"{job.recalled}; attempt {job.attempt + 1} resumes from the newest checkpoint", counted=False)
    if said is LaunchState.FAILED:
        return _failed(job, status)
    if said is LaunchState.STOPPED:
        return Fail("the run was stopped in its cluster, not by a cancel of this service; a new job begins anew")
    if said is LaunchState.ABSENT:
        return _absent(job)
    if said is LaunchState.RUNNING and job.state is JobState.PENDING:
        return Run()
    if said is LaunchState.PENDING and status.put_back and job.state is JobState.RUNNING:
        return _taken(job, status)
    return Wait()


def _taken(job: JobView, status: LaunchStatus) -> Action:
    """It has not failed: others were to have its machines. Started anew its ticket would be used up."""
    if job.summary is not None:
        return Succeed(job.summary)
    if job.failure is not None:
        return Fail(failure_text(job.failure))
    why = f": {status.waits_for}" if status.waits_for else ""
    back = f"attempt {job.attempt} was suspended in its cluster{why}"
    return Retry(f"{back}; attempt {job.attempt + 1} resumes from the newest checkpoint", counted=False)


def _absent(job: JobView) -> Action:
    if job.absent_polls + 1 < ABSENT_POLLS:
        return Wait()
    if job.failure is not None:
        return Fail(failure_text(job.failure))
    return _lost(job, f"attempt {job.attempt} was lost with its cluster")


def _failed(job: JobView, status: LaunchStatus) -> Action:
    if job.failure is not None:
        return Fail(failure_text(job.failure))
    if status.for_good:
        return Fail(status.message)
    if not status.began:
        # A later one had begun before: what keeps it from it now may pass.
        never = f"attempt {job.attempt} could not begin"
        words = f"{status.message}\nFull log: thinwire logs {job.id}"
        return Fail(f"the job could not begin: {words}") if job.attempt == 1 else _lost(job, never, words)
    # A driver says why it fails, so one that ended without a word was killed: by hand, or for want of memory.
    return _lost(job, f"attempt {job.attempt} was killed before it could say why", last_words(job, status))


def _lost(job: JobView, how: str, words: str = "") -> Action:
    if job.attempt < job.max_attempts:
        return Retry(f"{how}; attempt {job.attempt + 1} resumes from the newest checkpoint")
    end = f"{how}, and workers.max_restarts = {job.max_restarts} allows no further attempt"
    return Fail(f"{end}. {words}" if words else end)


def last_words(job: JobView, status: LaunchStatus) -> str:
    """The end of the launcher's message, for a person."""
    lines = [line for line in status.message.splitlines() if line.strip() and not _of_a_stack(line)]
    if not lines:
        return f"See its log: thinwire logs {job.id}"
    # What went well up to the end explains nothing, unless there is nothing else.
    telling = [line for line in lines if " INFO " not in line] or lines
    words = "\n".join(telling[-LAST_LINES:])[-LONGEST_REASON:]
    return f"The cluster's last words:\n{words}\nFull log: thinwire logs {job.id}"


def failure_text(failure: Failure) -> str:
    """A Failure as one text."""
    at = f" (step {failure.step})" if failure.step is not None else ""
    return f"{failure.kind}{at}: {failure.message}"


def _of_a_stack(line: str) -> bool:
    """True for the lines of a stack trace that tell a person nothing: its head, its frames and their source."""
    return line.startswith((" ", "\t")) or line.lstrip().startswith(("Traceback (most recent call last)", 'File "'))
