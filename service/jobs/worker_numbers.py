"""How many workers a job is wanted to have, and how many train together now.

Wanted: what a resize may ask, what it leaves in the row, and the run's file of it. The spec stays as it was submitted.
What is wanted instead stands beside it in the row. workers.json in the run folder is written from the row once that is
committed; where a crash came between the two, the reconciler writes it. Where there is a queue the file has the limits
that the job's places allow.

Now: what the run has last said, a sample, or an event. What is needed of the newest event is kept in the job's row, so
that a list of jobs need not search all events.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, JsonValue
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from thinwire.contract.jobs import JobState, Problem, TakesEffect, WaitingForWorkers, WorkersChange
from thinwire.contract.places import Room, never_fits
from thinwire.contract.reports import Event, EventKind, WantedWorkers
from thinwire.contract.spec import MOST_WORKERS, Workers, conflicts_of_workers, uneven_boxes
from thinwire.service.db import Database
from thinwire.service.errors import InvalidRequest, JobOver
from thinwire.service.jobs.job_folder import RunFolders
from thinwire.service.jobs.repository import JobRepository, JobRow, LeaseRow, last_step


def wanted_workers(row: JobRow) -> WantedWorkers:
    """The limits that hold now: the last ones asked for, else the spec's."""
    if row.wanted_workers is not None:
        return WantedWorkers.model_validate(row.wanted_workers)
    submitted = submitted_workers(row)
    return WantedWorkers(min=submitted.min, max=submitted.max, revision=0)


def limits_now(row: JobRow) -> WantedWorkers:
    """What the run is told: no more than the places that the job has been granted, and no minimum above them."""
    wanted = wanted_workers(row)
    if row.granted is None:
        return wanted
    least, most = min(wanted.min, row.granted), min(wanted.max, row.granted)
    return wanted.model_copy(update={"min": least, "max": most})


def refuse_invented(session: Session, job_id: str, rank: int, now: float) -> None:
    """Refuse a worker that the job cannot have: each that registers makes all others of all jobs register less often.

    As many as it may have now are taken twice, for one that leaves has its lease until that runs out. Numbers say
    nothing: after a resize those that are left may have high ones. One with a lease may renew it.

    Raises: JobNotFound, InvalidRequest.
    """
    row = JobRepository(session).found(job_id)
    try:
        most = limits_now(row).max
    except (ValueError, LookupError, TypeError):  # of another version, whose job goes on
        most = MOST_WORKERS
    if session.get(LeaseRow, (job_id, rank)) is not None:
        return
    live = (LeaseRow.job_id == job_id) & (LeaseRow.expires_at > now)
    if session.scalars(select(func.count()).select_from(LeaseRow).where(live)).one() >= 2 * most:
        words = (
            f"{2 * most} workers of job {job_id} are registered, which may have {most} now and as many that leave: "
            "register one when another's lease has run out"
        )
        raise InvalidRequest.at("rank", str(rank), words)


def takes_effect(row: JobRow) -> TakesEffect:
    """When the job follows limits that are asked for now."""
    if row.state in (JobState.SUBMITTING.value, JobState.QUEUED.value):
        return "at_start"
    return "in_place" if submitted_workers(row).elastic == "in_place" else "at_restart"


def refuse_never(workers: Workers, room: Room | None) -> None:
    """Refuse a minimum that the cluster has no places for, as far as is known. Raises InvalidRequest."""
    if room is not None and (wrong := never_fits(workers, room)) is not None:
        path, value, allowed = wrong
        raise InvalidRequest.at(path, value, f"must be {allowed}")


def resize(session: Session, row: JobRow, change: WorkersChange, now: float, room: Room | None = None) -> None:
    """Put other limits into the row, with their event; the same limits again change nothing. row: modified.

    room: what the cluster has, as far as is known.

    Raises: JobOver, InvalidRequest.
    """
    state = JobState(row.state)
    if state.terminal or state is JobState.CANCELLING:
        raise JobOver(row.id, state, "its workers can no longer be changed; submit a new job for other numbers")
    old = wanted_workers(row)
    least = old.min if change.min is None else change.min
    most = old.max if change.max is None else change.max
    problems = _impossible(change, least, most, row.spec["global_batch"], submitted_workers(row).per_box)
    if problems:
        raise InvalidRequest.of(problems)
    if (least, most) == (old.min, old.max):
        return
    if least > old.min:  # a job that runs may go on with a minimum that its cluster has lost
        refuse_never(submitted_workers(row).model_copy(update={"min": least, "max": most}), room)
    new = WantedWorkers(min=least, max=most, revision=old.revision + 1)
    row.wanted_workers = new.model_dump()
    fields = {
        "old": {"min": old.min, "max": old.max},
        "new": {"min": new.min, "max": new.max},
        "revision": new.revision,
        "takes_effect": takes_effect(row),
    }
    event = {"kind": EventKind.RESIZE_REQUESTED.value, "step": last_step(row), "time": now, "fields": fields}
    JobRepository(session).put_events(row.id, row.attempt, [event])


def write_wanted(db: Database, folders: RunFolders, job_id: str) -> None:
    """Bring workers.json of the run folder to what the row says. Raises OSError."""
    folder = folders.of(job_id)
    with folders.lock:
        # The row is read under the lock: of two resizes at once, the one that is last in it is last in the file.
        with db.read() as session:
            row = JobRepository(session).get(job_id)
        if row is not None and folder.read_wanted() != (limits := limits_now(row)):
            folder.write_wanted(limits)


def submitted_workers(row: JobRow) -> Workers:
    """What the spec says of workers, without what a later version may have written beside it."""
    written = row.spec["workers"]
    return Workers.model_validate({name: written[name] for name in Workers.model_fields if name in written})


def _impossible(change: WorkersChange, least: int, most: int, global_batch: int | None, per_box: int) -> list[Problem]:
    """What of the change cannot stand together, or beside what stays."""
    found, conflicts = [], conflicts_of_workers(least, most, global_batch)
    if "min_above_max" in conflicts and change.min is None:
        found.append(
            Problem(path="workers.max", value=most, message=f"must be at least workers.min = {least}, as it is now")
        )
    elif "min_above_max" in conflicts:
        kept = ", as it is now" if change.max is None else ""
        found.append(Problem(path="workers.min", value=least, message=f"must be at most workers.max = {most}{kept}"))
    if "more_workers_than_samples" in conflicts:
        words = f"must be at most global_batch = {global_batch}: at least one sample a worker"
        found.append(Problem(path="workers.max", value=most, message=words))
    uneven = None if found or global_batch is None else uneven_boxes(global_batch, per_box, range(least, most + 1))
    if uneven is not None:
        path, value = ("workers.min", least) if change.max is None else ("workers.max", most)
        words = (
            f"must leave global_batch = {global_batch} a multiple of {per_box} processes times each number of boxes "
            f"from workers.min = {least} to workers.max = {most}, which it is not with {uneven}"
        )
        found.append(Problem(path=path, value=value, message=words))
    return found


KINDS = frozenset({EventKind.REGROUPED, EventKind.RESUMED, EventKind.WAITING_FOR_WORKERS})
"""Events after which another number of workers trains together, or none."""


AHEAD_S = 10.0
"""How far a worker's clock may be ahead of the service's."""


def is_newer(known: tuple[int, int | None, float], said: tuple[int, int, float], now: float) -> bool:
    """Is what was said newer than what is known, each by attempt, step and the clock of the worker that said it?
    now: by the service's.

    Of one attempt a later step is, whatever the clocks: one may be wrong, set back, or another worker's. So is a later
    time, as in a run that has lost its newest steps, and the same step where the known is yet to come. What comes late
    from a clock that is ahead has neither.
    """
    attempt, step, time = known
    if said[0] != attempt:
        return said[0] > attempt
    return said[2] >= time or step is None or said[1] > step or (said[1] == step and time > now + AHEAD_S)


class Membership(BaseModel):
    """What is kept of such an event. world_size: None where it named none.

    at: when it came, by the service's clock, with which no worker's is to be compared. number: the order in which the
    database took it and the newest sample. step, at: None of an earlier version; number: 0.
    """

    attempt: int
    step: int | None = None
    time: float
    at: float | None = None
    number: int = 0
    world_size: int | None
    waiting: WaitingForWorkers | None


def newest_membership(row: JobRow, attempt: int, events: Sequence[Event], now: float) -> dict[str, Any] | None:
    """What the row is to keep of these events; None where they say nothing newer."""
    said = sorted((event for event in events if event.kind in KINDS), key=lambda event: event.time)
    known = row.newest_membership
    if not said:
        return None
    event = said[-1]
    # Who goes on from a checkpoint is at an earlier step than the driver that waited, maybe by a clock behind.
    goes_on = known is not None and (event.kind, attempt) == (EventKind.RESUMED, known["attempt"]) and known["waiting"]
    if known is not None and not goes_on:
        of_known = known["attempt"], known.get("step"), known["time"]
        if not is_newer(of_known, (attempt, event.step, event.time), now):
            return None
    have, least = _count(event.fields.get("have")), _count(event.fields.get("min"))
    waiting = None
    if event.kind == EventKind.WAITING_FOR_WORKERS and have is not None and least is not None:
        waiting = WaitingForWorkers(have=have, min=least)
    size = _count(event.fields.get("world_size")) if waiting is None else have
    made = Membership(attempt=attempt, step=event.step, time=event.time, at=now, world_size=size, waiting=waiting)
    return made.model_dump()


def membership_now(row: JobRow) -> tuple[int | None, WaitingForWorkers | None]:
    """The world size, None where this attempt has not said it; and what the job waits for, where it does.

    Samples come from a worker, and that the job waits from its driver: their clocks are two. So a sample is the newer
    one if it came no earlier, and is of a later step than the event. One that was held up is of none, unless its step
    is one that the driver had not heard of: then the job does not seem to wait until the driver says so again.
    """
    size, newer = None, False
    said = Membership.model_validate(row.newest_membership) if row.newest_membership is not None else None
    if row.newest_sample is not None and row.newest_sample["attempt"] == row.attempt:
        sample, number = row.newest_sample["sample"], row.newest_sample.get("number", 0)
        size = sample["world_size"]
        newer = said is not None and number >= said.number and sample["step"] > (-1 if said.step is None else said.step)
    if said is None or said.attempt != row.attempt or newer:
        return size, None
    waits = JobState(row.state) in (JobState.PENDING, JobState.RUNNING)
    return said.world_size if said.world_size is not None else size, said.waiting if waits else None


def _count(value: JsonValue) -> int | None:
    """The value where it is a number of workers: events hold any JSON."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_WORKERS else None
