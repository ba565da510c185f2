"""How many workers a job is wanted to have: what a resize may ask, what it leaves in the row, and the run's file of it.

The spec stays as it was submitted. What is wanted instead stands beside it in the row. workers.json in the run folder
is written from the row once that is committed; where a crash came between the two, the reconciler writes it.
"""

from __future__ import annotations

from sqlalchemy.orm import Session

from thinwire.contract.jobs import Problem, TakesEffect, WorkersChange
from thinwire.contract.reports import EventKind, WantedWorkers
from thinwire.contract.spec import Workers
from thinwire.contract.states import JobState
from thinwire.service.db import Database
from thinwire.service.errors import InvalidRequest
from thinwire.service.jobs.errors import JobOver
from thinwire.service.jobs.models import JobRow
from thinwire.service.jobs.repository import JobRepository
from thinwire.service.jobs.run_folder import RunFolders
from thinwire.service.jobs.transitions import last_step


def wanted_workers(row: JobRow) -> WantedWorkers:
    """The limits that hold now: the last ones asked for, else the spec's."""
    if row.wanted_workers is not None:
        return WantedWorkers.model_validate(row.wanted_workers)
    submitted = Workers.model_validate(row.spec["workers"])
    return WantedWorkers(min=submitted.min, max=submitted.max, revision=0)


def takes_effect(row: JobRow) -> TakesEffect:
    """When the job follows limits that are asked for now."""
    if row.state == JobState.SUBMITTING.value:
        return "at_start"
    return "in_place" if Workers.model_validate(row.spec["workers"]).elastic == "in_place" else "at_restart"


def resize(session: Session, row: JobRow, change: WorkersChange, now: float) -> None:
    """Put other limits into the row, with their event; the same limits again change nothing. row: modified.

    Raises: JobOver, InvalidRequest.
    """
    state = JobState(row.state)
    if state.terminal or state is JobState.CANCELLING:
        raise JobOver(row.id, state, "its workers can no longer be changed; submit a new job for other numbers")
    old = wanted_workers(row)
    least = old.min if change.min is None else change.min
    most = old.max if change.max is None else change.max
    problems = _impossible(change, least, most, global_batch=int(row.spec["global_batch"]))
    if problems:
        raise InvalidRequest.of(problems)
    if (least, most) == (old.min, old.max):
        return
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
        if row is not None and folder.read_wanted() != (wanted := wanted_workers(row)):
            folder.write_wanted(wanted)


def _impossible(change: WorkersChange, least: int, most: int, global_batch: int) -> list[Problem]:
    """What of the change cannot stand together, or beside what stays. The spec has the same rules."""
    found = []
    if least > most and change.min is None:
        found.append(
            Problem(path="workers.max", value=most, message=f"must be at least workers.min = {least}, as it is now")
        )
    elif least > most:
        kept = ", as it is now" if change.max is None else ""
        found.append(Problem(path="workers.min", value=least, message=f"must be at most workers.max = {most}{kept}"))
    if most > global_batch:
        words = f"must be at most global_batch = {global_batch}: at least one sample a worker"
        found.append(Problem(path="workers.max", value=most, message=words))
    return found
