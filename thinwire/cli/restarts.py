"""Which restarts a watcher has to be told of: workers started again from a checkpoint, and further attempts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.contract.jobs import Job
from thinwire.contract.reports import Event, EventKind

KINDS = (EventKind.JOB_SUBMITTING, EventKind.RESUMED)
"""The events that tell of restarts."""


@dataclass(slots=True)
class Restarts:
    """Tells each restart once, as it comes. What was there at the first answer is not news: `thinwire show` has it."""

    _known: int | None = None
    """`resumed` events that have been told; None before the first answer."""
    _attempt: int = 1

    def saw(self, job: Job, events: Sequence[Event]) -> list[str]:
        """The news, a line each. events: the job's of KINDS, in order of time."""
        resumes = _resumes(job, events)
        if self._known is None:
            self._known, self._attempt = len(resumes), job.attempt
            return []
        news = []
        if job.attempt > self._attempt:
            news.append(f"attempt {job.attempt}: resumes from the newest checkpoint")
        news += resumes[self._known :]
        self._known, self._attempt = max(self._known, len(resumes)), job.attempt
        return news


def _resumes(job: Job, events: Sequence[Event]) -> list[str]:
    """Every `resumed` event as a line. The first one of a further attempt is that attempt's beginning."""
    lines: list[str] = []
    attempt, begun = 0, True
    # Ray Train also starts the workers anew to change their number.
    wanted = job.wanted_workers
    cause = "worker lost" if wanted.min == wanted.max and not wanted.revision else "workers restarted"
    for event in events:
        if event.kind == EventKind.JOB_SUBMITTING:
            attempt += 1
            begun = attempt == 1
        elif event.kind == EventKind.RESUMED:
            lines.append(f"{cause if begun else f'attempt {attempt}'}: resumed from step {event.step}")
            begun = True
    return lines
