"""How workers have failed, and when that is the job's end: whose is the error that a train function ended with?

An error itself does not say: a full disk, a NaN or a CUDA error may be one machine's, or come to all. But
an error that is the job's comes to every worker that tries the same step. So:

    the worker's    others get past the step at which it failed
    the job's       all ranks had it and know that of each other, as where training has diverged to NaN
                    every worker that is there has failed at a step that nobody has got past: at once, with that error.
                    For one alone, which nobody can be compared with: where nothing has been committed yet; else when
                    it fails there again
                    so many generations have tried one step, and in each a worker failed: it may be the one that has
                    the sample, and where workers.min is missing the others cannot get past without another worker
                    others have come to the end of the training, in the generation in which it failed: there is nothing
                    left to be done by another worker
    too many        a slot, or the slots together, have failed so often that to go on is no use. A worker that was never
                    seated has cost the others nothing: its slot is filled again, ever later, while they can train
    dies early      a slot whose workers die again and again soon after their start, without a word: a bug must not
                    crash and start for ever

Nothing here calls Ray, nor looks at a clock.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from thinwire.workers.elastic.plan import Plan
from thinwire.workers.elastic.worker_side import Failed

LONGEST_MESSAGE = 4000
"""Characters of an error."""
FIRST_PAUSE_S, FIRST_PAUSE_OF_DEAD_S = 2.0, 0.5
LONGEST_PAUSE_S = 300.0
"""Before the slot of a worker that was never seated, or died early, is filled again: its machine may be mended
meanwhile."""


class JobFailed(RuntimeError):
    """The job is at its end. kind, message, step: as a Failure of the contract has them."""

    def __init__(self, kind: str, message: str, step: int) -> None:
        super().__init__(kind, message, step)  # so that it can be pickled
        self.kind, self.message, self.step = kind, message, step

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


class WorkerFailed(RuntimeError):
    """A worker's error as Ray Train hears of it, where nobody is left, and it has to start all again."""


def own_error(status: Any) -> Failed | None:
    """The error that a train function has ended with; None where it runs, or has ended well. status: as it counts."""
    if status.running:
        return None
    if status.error is not None:
        return Failed(type(status.error).__name__, str(status.error).strip()[-LONGEST_MESSAGE:])
    return status.return_value if isinstance(status.return_value, Failed) else None


@dataclass(frozen=True, slots=True)
class Failure:
    """One worker's. at: when, in seconds of a clock that only goes forward."""

    slot: int
    host: str
    error: Failed
    at: float

    def __str__(self) -> str:
        return f"worker {self.slot} on {self.host}: {self.error.kind}: {self.error.message}"


@dataclass(frozen=True, slots=True)
class Others:
    """The rest of the job, at the moment of a failure.

    slots: of workers that run or are being started. step: the last that anybody has committed. enough: there are as
    many as the job needs. finished: one has come to the end of the training. generation: the newest.
    """

    slots: Collection[int]
    step: int
    enough: bool
    finished: bool = False
    generation: int = 0

    def did_without(self, one: Failure) -> bool:
        """Have they come to the end of the training in a generation after that in which this one failed?"""
        return self.finished and 0 < one.error.generation < self.generation


class Failures:
    """Of one run: remembered over full restarts."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._open: list[Failure] = []
        """At a step that nobody is known to have got past."""
        self._recent: list[Failure] = []
        """Within failures_s, as those that were fenced."""
        self._fenced: list[Failure] = []
        self._died_early: dict[int, int] = {}
        """Times in a row, by slot."""

    def judge(self, new: Collection[Failure], others: Others) -> None:
        """Take them in. Returns where they are the workers'. Raises: JobFailed."""
        now = max(one.at for one in new)
        self._recent = self._within(now, (*self._recent, *new))
        self._open = [
            one for one in (*self._open, *new) if one.error.step >= others.step and not others.did_without(one)
        ]
        for one in new:
            if one.error.of_all or (others.finished and not others.did_without(one)):
                raise JobFailed(one.error.kind, one.error.message, one.error.step)
        self._refuse_what_all_have(others)
        for one in new:
            self._refuse_too_many(one, others)

    def fenced(self, one: Failure) -> None:
        """A worker that the others could do without, and whose next one may be no better: each try costs a regroup."""
        self._fenced = self._within(one.at, (*self._fenced, one))

    def died(self, slot: int, lived_s: float, why: str, *, spared: bool = False) -> None:
        """A worker that lived so long is gone, without an error of its own.

        spared: it was never seated, and the job can do without: then its next one only waits longer. Raises: JobFailed.
        """
        if lived_s > self._plan.early_s:
            self._died_early[slot] = 0
            return
        num = self._died_early[slot] = self._died_early.get(slot, 0) + 1
        if num > self._plan.max_early_deaths and not spared:
            raise JobFailed(
                "WorkersKeepDying",
                f"slot {slot} died {num} times in a row within {self._plan.early_s:g} s of its start, more than the "
                f"{self._plan.max_early_deaths} that are borne: mend what kills it (see its log) and submit the job "
                f"again. The last: {why}",
                0,
            )

    def pause_s(self, slot: int) -> float:
        """How long to wait before this slot is filled again: nothing at first, then longer and longer, for what died
        early, was fenced or never seated."""
        never_seated = (one for one in self._recent if not one.error.generation)
        num = sum(one.slot == slot for one in (*never_seated, *self._fenced))
        return max(_pause_s(FIRST_PAUSE_S, num), _pause_s(FIRST_PAUSE_OF_DEAD_S, self._died_early.get(slot, 0)))

    def _within(self, now: float, known: Collection[Failure]) -> list[Failure]:
        return [one for one in known if now - one.at <= self._plan.failures_s]

    def _refuse_what_all_have(self, others: Others) -> None:
        if not self._open:
            return
        first, last = self._open[0].error, self._open[-1]
        failed = {one.slot for one in self._open}
        compared = len(self._open) > 1 or first.step == 0
        if compared and failed.issuperset(others.slots):
            raise JobFailed(first.kind, first.message, first.step)
        tries = {one.error.generation for one in self._open if one.error.generation}
        if len(tries) >= self._plan.tries_of_step:
            raise JobFailed(
                last.error.kind,
                f"{last.error.message} ({len(tries)} generations of workers have tried step {last.error.step + 1}, and "
                f"in each a worker failed; the last was worker {last.slot} on {last.host})",
                last.error.step,
            )

    def _refuse_too_many(self, one: Failure, others: Others) -> None:
        plan, seated = self._plan, one.error.generation > 0
        num = sum(other.slot == one.slot for other in self._recent)
        if num > plan.max_slot_failures and (seated or not others.enough):
            raise JobFailed(
                "WorkerKeepsFailing",
                f"the worker of slot {one.slot} has failed {num} times within {plan.failures_s / 60:g} minutes, more "
                f"than the {plan.max_slot_failures} that are borne: mend its machine, or take it out of the cluster, "
                f"and submit the job again. The last: {one}",
                one.error.step,
            )
        trained = sum(other.error.generation > 0 for other in self._recent)
        if trained > plan.max_job_failures:
            raise JobFailed(
                "WorkersKeepFailing",
                f"{trained} times within {plan.failures_s / 60:g} minutes a worker failed that trained, more than the "
                f"{plan.max_job_failures} that are borne: mend what fails, and submit the job again. The last: {one}",
                one.error.step,
            )


def _pause_s(first_s: float, num: int) -> float:
    """After the second, and twice as long after each further one."""
    return 0.0 if num <= 1 else min(first_s * 2.0 ** (num - 2), LONGEST_PAUSE_S)
