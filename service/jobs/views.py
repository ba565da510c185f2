"""Rows turned into what the API answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from pydantic import ValidationError

from thinwire.contract.jobs import Job, JobItem, JobState, Queued, Wanted
from thinwire.contract.redaction import redacted, redacted_json
from thinwire.contract.reports import Event, Sample
from thinwire.contract.spec import ScriptSpec, TrainSpec, read_accepted
from thinwire.service.jobs.repository import EventRow, JobRow, SampleRow
from thinwire.service.jobs.worker_numbers import membership_now, takes_effect, wanted_workers

T = TypeVar("T")


def submission_id(job_id: str, attempt: int) -> str:
    """The launcher's name of one attempt of a job; the first has the job's own id."""
    return job_id if attempt == 1 else f"{job_id}-attempt{attempt}"


def job_json(row: JobRow, told: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """What job.json in the run folder holds. told: what the processes of a job are told beside it."""
    return {"job_id": row.id, "name": row.name, "created_at": row.created_at, "spec": row.spec, **told}


def job_view(row: JobRow, workers: int, run_dir: Path, dashboard_url: str | None) -> Job:
    """The job as GET /v1/jobs/{id} shows it. dashboard_url: None where there is no page to look at."""
    item = job_item(row, workers, run_dir, dashboard_url)
    shown = item.model_dump(exclude={"unreadable"})
    reading = Reading()
    spec = reading.of("spec", lambda: shown_spec(row))
    return Job(**shown, unreadable=item.unreadable or reading.wrong, spec=spec, summary=redacted_json(row.summary))


def shown_spec(row: JobRow) -> TrainSpec | ScriptSpec:
    """What was asked for, without secrets, and the labels as they are now. Raises ValidationError."""
    return read_accepted({**redacted_json(row.spec), "labels": row.labels})


def job_item(row: JobRow, workers: int, run_dir: Path, dashboard_url: str | None) -> JobItem:
    """The job as a list shows it. Of a row that another version has written, what can be read."""
    reading = Reading()
    newest, validation = row.newest_sample, row.newest_validation
    state = JobState(row.state)
    submitted = state not in (JobState.SUBMITTING, JobState.QUEUED)
    progress = reading.of("newest sample", lambda: Sample.model_validate(newest["sample"]) if newest else None)
    world_size, waiting = reading.of("newest membership", lambda: membership_now(row)) or (None, None)
    return JobItem(
        id=row.id,
        name=row.name,
        project=row.project,
        labels=row.labels,
        state=state,
        reason=row.reason and redacted(row.reason),  # of an earlier version too
        attempt=row.attempt,
        created_at=_datetime(row.created_at),
        submitted_by=row.submitted_by,
        started_at=_datetime(row.started_at) if row.started_at is not None else None,
        finished_at=_datetime(row.finished_at) if row.finished_at is not None else None,
        steps=reading.of("spec.steps", lambda: planned_steps(row)) or (progress.last_step if progress else None),
        progress=progress,
        validation_loss=reading.of(
            "newest validation", lambda: float(validation["sample"]["validation_loss"]) if validation else None
        ),
        workers=workers,
        wanted_workers=reading.of(
            "wanted workers", lambda: Wanted(**wanted_workers(row).model_dump(), takes_effect=takes_effect(row))
        )
        or Wanted(min=0, max=0, revision=0, takes_effect="at_restart"),
        world_size=world_size,
        waiting_for_workers=waiting,
        queue=reading.of("queue", lambda: queued(row.queue)) if state is JobState.QUEUED else None,
        run_dir=str(run_dir),
        kept_bytes=row.kept_bytes,
        dashboard_url=dashboard_url if submitted else None,
        unreadable=reading.wrong,
    )


def queued(queue: dict[str, Any] | None) -> Queued | None:
    """Where a job stands in the queue, as its row says it."""
    if queue is None:
        return None
    starts_at = queue.get("starts_at")
    times = {"since": _datetime(queue["since"]), "starts_at": None if starts_at is None else _datetime(starts_at)}
    return Queued(**{**queue, **times})


def planned_steps(row: JobRow) -> int | None:
    """As the job file says it; None where the script alone knows."""
    steps = row.spec["steps"]
    return None if steps is None else int(steps)


class Reading:
    """Reads the parts of a row, and keeps what was wrong with the first that cannot be read."""

    def __init__(self) -> None:
        self.wrong: str | None = None

    def of(self, part: str, read: Callable[[], T]) -> T | None:
        """What read() returns; None where the part is not as this version writes it."""
        try:
            return read()
        except (ValueError, LookupError, TypeError) as error:
            known = (
                "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:3])
                if isinstance(error, ValidationError)
                else f"{type(error).__name__}: {error}"
            )
            words = f"{part}: {known}; it was written by another version of thinwire"
            self.wrong = self.wrong or redacted(words)[:1000]
            return None


def sample_view(row: SampleRow) -> Sample | None:
    """The sample as History shows it; None where another version wrote it otherwise."""
    try:
        return Sample.model_validate(row.sample)
    except ValidationError:
        return None


def event_view(row: EventRow) -> Event:
    """The event as History shows it."""
    return Event(kind=row.kind, step=row.step, time=row.time, fields=row.fields)


def _datetime(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
