"""What the jobs API answers, as pydantic models. The request is `thinwire.workers.spec.TrainSpec`."""

from __future__ import annotations

from datetime import datetime

from pydantic import BaseModel, Field, JsonValue

from thinwire.service.jobs.states import JobState
from thinwire.workers.reports import Event, Sample
from thinwire.workers.spec import TrainSpec


class Job(BaseModel):
    """One job, as GET /v1/jobs/{id} shows it."""

    id: str
    name: str
    state: JobState
    reason: str | None = Field(None, description="why the job is where it is, for a person; set when FAILED")
    attempt: int = Field(description="submissions so far; above 1 after its cluster was lost")
    created_at: datetime
    started_at: datetime | None = None
    finished_at: datetime | None = None
    spec: TrainSpec
    progress: Sample | None = Field(None, description="the newest sample that rank 0 has posted")
    validation_loss: float | None = Field(None, description="the newest validation loss")
    workers: int = Field(0, description="workers whose registration has not run out")
    summary: dict[str, JsonValue] | None = Field(None, description="summary.json of a run that succeeded")
    run_dir: str = Field(description="the job's folder: checkpoints, history, summary, picture")
    dashboard_url: str | None = Field(None, description="the job's page in the Ray dashboard, while there is one")


class JobList(BaseModel):
    """GET /v1/jobs, newest first."""

    jobs: list[Job]


class History(BaseModel):
    """GET /v1/jobs/{id}/metrics: every sample of the job in order of step, and its events in order of time."""

    job_id: str
    samples: list[Sample]
    events: list[Event]


class Logs(BaseModel):
    """GET /v1/jobs/{id}/logs?offset=N: text from character N on. Ask again from next_offset; `complete` ends it."""

    text: str
    next_offset: int
    complete: bool


class TargetGroup(BaseModel):
    """One entry of GET /v1/metrics/targets, in the form of Prometheus HTTP service discovery."""

    targets: list[str]
    labels: dict[str, str]


class Problem(BaseModel):
    """One thing wrong with a request: where, what came, what is allowed."""

    path: str
    value: JsonValue = None
    message: str


class ErrorBody(BaseModel):
    """Every error of the API. `code` is stable and for programs, `message` is for people."""

    code: str
    message: str
    problems: list[Problem] = Field(default_factory=list)
