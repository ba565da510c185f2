"""Rows turned into what the API answers."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from thinwire.contract.jobs import Job, JobState, Wanted
from thinwire.contract.reports import Event, Sample
from thinwire.contract.spec import TrainSpec
from thinwire.service.jobs.models import EventRow, JobRow
from thinwire.service.jobs.worker_numbers import membership_now, takes_effect, wanted_workers


def submission_id(job_id: str, attempt: int) -> str:
    """The launcher's name of one attempt of a job; the first has the job's own id."""
    return job_id if attempt == 1 else f"{job_id}-attempt{attempt}"


def job_json(row: JobRow) -> dict[str, Any]:
    """What job.json in the run folder holds."""
    return {"job_id": row.id, "name": row.name, "created_at": row.created_at, "spec": row.spec}


def job_view(row: JobRow, workers: int, run_dir: Path, dashboard_url: str | None) -> Job:
    """The job as GET /v1/jobs/{id} shows it. dashboard_url: None where there is no page to look at."""
    sample = row.newest_sample["sample"] if row.newest_sample else None
    validation = row.newest_validation["sample"]["validation_loss"] if row.newest_validation else None
    state = JobState(row.state)
    submitted = state is not JobState.SUBMITTING
    world_size, waiting = membership_now(row)
    return Job(
        id=row.id,
        name=row.name,
        state=state,
        reason=row.reason,
        attempt=row.attempt,
        created_at=_datetime(row.created_at),
        started_at=_datetime(row.started_at) if row.started_at is not None else None,
        finished_at=_datetime(row.finished_at) if row.finished_at is not None else None,
        spec=TrainSpec.model_validate(row.spec),
        progress=Sample.model_validate(sample) if sample else None,
        validation_loss=validation,
        workers=workers,
        wanted_workers=Wanted(**wanted_workers(row).model_dump(), takes_effect=takes_effect(row)),
        world_size=world_size,
        waiting_for_workers=waiting,
        summary=row.summary,
        run_dir=str(run_dir),
        dashboard_url=dashboard_url if submitted else None,
    )


def event_view(row: EventRow) -> Event:
    """The event as History shows it."""
    return Event(kind=row.kind, step=row.step, time=row.time, fields=row.fields)


def _datetime(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
