"""A job's move to another state: the row, its times and its event, in the caller's transaction."""

from __future__ import annotations

from typing import Any

from sqlalchemy.orm import Session

from thinwire.contract.reports import EventKind
from thinwire.contract.states import JobState
from thinwire.service.jobs.models import JobRow
from thinwire.service.jobs.repository import JobRepository


def transition(session: Session, row: JobRow, to: JobState, now: float, reason: str | None = None) -> None:
    """Move `row` to a state and record it. row: modified; its leases end with it where the state is terminal."""
    row.state = to.value
    row.reason = reason
    if to is JobState.RUNNING and row.started_at is None:
        row.started_at = now
    if to.terminal:
        row.finished_at = now
        JobRepository(session).drop_leases(row.id)
    record(session, row, now)


def record(session: Session, row: JobRow, now: float) -> None:
    """Write the event that the job has come to its state: kind job_submitting, job_running and so on."""
    fields = {"reason": row.reason} if row.reason else {}
    event = {"kind": EventKind(f"job_{row.state.lower()}").value, "step": last_step(row), "time": now, "fields": fields}
    JobRepository(session).put_events(row.id, row.attempt, [event])


def last_step(row: JobRow) -> int:
    """The newest step that is known of the job, for an event of the service; 0 before the first."""
    return int(row.newest_sample["sample"]["step"]) if row.newest_sample else 0


def job_json(row: JobRow) -> dict[str, Any]:
    """What job.json in the run folder holds."""
    return {"job_id": row.id, "name": row.name, "created_at": row.created_at, "spec": row.spec}
