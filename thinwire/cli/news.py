"""What a watcher reports as it comes: restarts, further attempts, changes of the number of workers, who is waited for.

Of checkpoints: that they fail, since when, and that they are saved again. A job reports each whole checkpoint and each
that failed. The first are many, and of interest only after one of the others: the watcher asks for them only then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import JsonValue

from thinwire.cli.quantities import seconds_text, time_text
from thinwire.contract.jobs import Job, JobItem, Queued
from thinwire.contract.reports import Event, EventKind

RESTART_KINDS = (EventKind.JOB_SUBMITTING, EventKind.RESUMED)
REGROUP_KINDS = (EventKind.REGROUPED, EventKind.RESIZE_REQUESTED)
TROUBLE_KINDS = (EventKind.WORKER_STUCK, EventKind.STALLED, EventKind.SLOW_WORKER)
"""These say for whom the others wait, in words of their own."""
WATCHED_KINDS = (
    *RESTART_KINDS,
    *REGROUP_KINDS,
    *TROUBLE_KINDS,
    EventKind.CHECKPOINT_FAILED,
    EventKind.WAITING_FOR_WORKERS,
)
EFFECTS = {
    "at_start": "the job starts with that",
    "in_place": "the job follows while it runs",
    "at_restart": "the job follows when it restarts next (workers.elastic = restart)",
}
LONGEST_REASON = 500


@dataclass(slots=True)
class News:
    """Each change of a job once, as it comes. What was there at the first answer is news where it still holds."""

    failing_since: int | None = None
    """The step of the first save that failed since the last whole checkpoint; None where none has."""
    _whole: Event | None = None
    """The newest whole checkpoint that is known."""
    _resumes: int = 0
    """`resumed` events that have been reported."""
    _attempt: int = 1
    _seen: set[tuple[str, int, float]] | None = None
    """Changes and troubles that have been reported; None before the first answer. Not a count: what the workers say
    comes later than what the service says of the same moment."""

    def saw(self, job: Job, events: Sequence[Event]) -> list[str]:
        """The news, a line each.

        events: the job's of WATCHED_KINDS, in order of time; those of CHECKPOINT_SAVED too where saves are in doubt.
        """
        resumes = _resumes(job, events)
        kinds = (*REGROUP_KINDS, *TROUBLE_KINDS)
        found = {(event.kind, event.step, event.time): event for event in events if event.kind in kinds}
        if self._seen is None:
            self._resumes, self._attempt = len(resumes), job.attempt
            self._seen = {key for key, event in found.items() if not _holds(event, job, events)}
        new = [found[key] for key in found if key not in self._seen]
        news = [f"attempt {job.attempt}: resumes from the newest checkpoint"] if job.attempt > self._attempt else []
        news += resumes[self._resumes :]
        news += [_line(event) for event in sorted(new, key=lambda event: event.kind in TROUBLE_KINDS)]
        self._resumes, self._attempt = max(self._resumes, len(resumes)), job.attempt
        self._seen |= found.keys()
        return news + self._saves(events)

    def are_saves_in_doubt(self, events: Sequence[Event]) -> bool:
        """Is there a failure that is newer than any whole checkpoint known? events: CHECKPOINT_FAILED among them."""
        return bool(self._failed(events))

    def _saves(self, events: Sequence[Event]) -> list[str]:
        whole = [event for event in events if event.kind == EventKind.CHECKPOINT_SAVED]
        self._whole = max([*whole, *([self._whole] if self._whole else [])], key=_time, default=None)
        failed, before = self._failed(events), self.failing_since
        self.failing_since = failed[0].step if failed else None
        if failed and before is None:
            reason = str(failed[0].fields.get("reason", "no reason was reported"))[:LONGEST_REASON]
            lost = "all of its steps" if self._whole is None else f"the steps after {self._whole.step}"
            return [f"at step {failed[0].step}: no checkpoint: {reason}; the job trains on, and a crash costs {lost}"]
        if not failed and before is not None and self._whole is not None:
            return [f"at step {self._whole.step}: checkpoints are saved again"]
        return []

    def _failed(self, events: Sequence[Event]) -> list[Event]:
        since = _time(self._whole)
        return [event for event in events if event.kind == EventKind.CHECKPOINT_FAILED and event.time > since]


def _time(event: Event | None) -> float:
    return -math.inf if event is None else event.time


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


def _holds(event: Event, job: Job, events: Sequence[Event]) -> bool:
    """Is it so still? A slow worker is reported anew, or taken back; a step or other ranks end a stall."""
    if event.kind in REGROUP_KINDS:
        return False
    later = [other for other in events if other.time > event.time]
    if job.state.terminal or any(other.kind in (EventKind.REGROUPED, EventKind.RESUMED) for other in later):
        return False
    if event.kind == EventKind.SLOW_WORKER:
        return not event.fields.get("over") and not any(other.kind == event.kind for other in later)
    return job.progress is None or job.progress.time < event.time


def limits_text(least: object, most: object) -> str:
    """The numbers of workers that a job may have: 2..8, or 4 where it is one number."""
    return f"{least}" if least == most else f"{least}..{most}"


def workers_text(job: JobItem, count: int) -> str:
    """How many workers train, and how many are wanted where that is another number or several: 3 (wanted 2..8)."""
    wanted = limits_text(job.wanted_workers.min, job.wanted_workers.max)
    return str(count) if wanted == str(count) else f"{count} (wanted {wanted})"


def waiting_text(job: Job) -> str | None:
    """What the job waits for, where it has fewer workers than its minimum."""
    waiting = job.waiting_for_workers
    return None if waiting is None else f"waiting for workers ({waiting.have} of {waiting.min})"


def queue_text(queue: Queued | None) -> str | None:
    """Where a job stands in the queue, and who has the places; None where it does not wait there."""
    if queue is None:
        return None
    held = [
        f"{one.job} {one.workers}" + (f" (it needs {one.min})" if one.min < one.workers else "")
        for one in queue.holders
    ]
    held += [f"other projects {queue.other_projects}"] if queue.other_projects else []
    held += [f"others than the service {queue.others}"] if queue.others else []
    since = f"position {queue.position} of {queue.of}, since {time_text(queue.since)}"
    if queue.held is not None:
        return f"{since}: {queue.held}; it starts when one of them is over"
    needs = f"it needs {queue.needs} places at once, {queue.free} of {queue.total} are free"
    if queue.needs > queue.total:
        needs = f"it needs {queue.needs} places, and the cluster has {queue.total}: add machines, or lower workers.min"
    elif queue.starts_at is None:
        needs += "; when it starts is not known"
    else:
        needs += f"; it may start at {time_text(queue.starts_at)}, as the steps of those before it go"
    return f"{since}: {needs}" + (f"; held by {', '.join(held)}" if held else "")


def workers_rows(job: Job) -> list[tuple[str, str]]:
    """The lines of `thinwire show` about the job's workers."""
    rows = [("workers", str(job.workers))]
    if (queue := queue_text(job.queue)) is not None:
        rows.append(("queue", queue))
    if job.world_size is not None and not job.state.terminal:
        text = workers_text(job, job.world_size)
        rows.append(("training", ", ".join(part for part in (text, waiting_text(job)) if part)))
    wanted = job.wanted_workers
    if wanted.revision:
        words = limits_text(wanted.min, wanted.max)
        if job.spec is not None:
            words += f", submitted with {limits_text(job.spec.workers.min, job.spec.workers.max)}"
        rows.append(("wanted", words if job.state.terminal else f"{words}; {EFFECTS[wanted.takes_effect]}"))
    return rows


def _line(event: Event) -> str:
    fields = event.fields
    if event.kind in TROUBLE_KINDS:
        words = fields.get("told")
        return f"at step {event.step}: {words if isinstance(words, str) else event.kind}"
    if event.kind == EventKind.RESIZE_REQUESTED:
        words = f"resize requested: {_limits(fields.get('new'))} workers, before {_limits(fields.get('old'))}"
        effect = fields.get("takes_effect")
        return f"{words}; {EFFECTS[effect]}" if isinstance(effect, str) and effect in EFFECTS else words
    seconds, reason = fields.get("seconds"), fields.get("reason")
    took = f" in {seconds_text(seconds)}" if isinstance(seconds, int | float) else ""
    why = f" ({reason})" if reason else ""
    return f"regrouped: {fields.get('world_size', 'unknown')} workers from step {event.step}{took}{why}"


def _limits(value: JsonValue) -> str:
    return limits_text(value.get("min"), value.get("max")) if isinstance(value, dict) else "unknown"
