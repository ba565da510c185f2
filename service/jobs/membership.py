"""How many workers of a job train together now, from what its run has last said: a sample, or an event of membership.

What is needed of the newest event is kept in the job's row, so that a list of jobs need not search all events.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, JsonValue

from thinwire.contract.jobs import WaitingForWorkers
from thinwire.contract.reports import Event, EventKind
from thinwire.contract.states import JobState
from thinwire.service.jobs.models import JobRow

KINDS = frozenset({EventKind.REGROUPED, EventKind.RESUMED, EventKind.WAITING_FOR_WORKERS})
"""Events after which another number of workers trains together, or none."""


class Membership(BaseModel):
    """What is kept of such an event. world_size: None where it named none."""

    attempt: int
    time: float
    world_size: int | None
    waiting: WaitingForWorkers | None


def newest_membership(row: JobRow, attempt: int, events: Sequence[Event]) -> dict[str, Any] | None:
    """What the row is to keep of these events; None where they say nothing newer."""
    said = sorted((event for event in events if event.kind in KINDS), key=lambda event: event.time)
    known = row.newest_membership
    if not said or (known is not None and (attempt, said[-1].time) < (known["attempt"], known["time"])):
        return None
    event = said[-1]
    have, least = _count(event.fields.get("have")), _count(event.fields.get("min"))
    waiting = None
    if event.kind == EventKind.WAITING_FOR_WORKERS and have is not None and least is not None:
        waiting = WaitingForWorkers(have=have, min=least)
    size = _count(event.fields.get("world_size")) if waiting is None else have
    return Membership(attempt=attempt, time=event.time, world_size=size, waiting=waiting).model_dump()


def membership_now(row: JobRow) -> tuple[int | None, WaitingForWorkers | None]:
    """The world size, None where this attempt has not said it; and what the job waits for, where it does."""
    size, since = None, float("-inf")
    if row.newest_sample is not None and row.newest_sample["attempt"] == row.attempt:
        sample = row.newest_sample["sample"]
        size, since = sample["world_size"], sample["time"]
    said = Membership.model_validate(row.newest_membership) if row.newest_membership is not None else None
    if said is None or said.attempt != row.attempt or said.time < since:
        return size, None
    waits = JobState(row.state) in (JobState.PENDING, JobState.RUNNING)
    return said.world_size if said.world_size is not None else size, said.waiting if waits else None


def _count(value: JsonValue) -> int | None:
    """The value where it is a number of workers: events hold any JSON."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 4096 else None
