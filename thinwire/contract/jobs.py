"""What the jobs API answers and what a change of a job asks, as pydantic models.

A submission is a `thinwire.contract.spec.TrainSpec` or a `ScriptSpec`. A job's states, and the moves between them:

SUBMITTING -> PENDING -> RUNNING -> SUCCEEDED
     |    |   ^  |          |-----> FAILED
     |   QUEUED  |          |-----> SUBMITTING       (a new attempt: its processes were lost with their cluster)
     +-----+-----+----------+-----> CANCELLING -> CANCELLED

QUEUED: not all of workers.min have a place. Where a cluster's machines come with the job no job is ever QUEUED.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator
from pydantic_core import PydanticCustomError

from thinwire.contract.fields import refuse
from thinwire.contract.labels import Labels, LabelsChange, secrets_in
from thinwire.contract.projects import DEFAULT
from thinwire.contract.reports import Event, Sample
from thinwire.contract.spec import AnySpec, WorkerCount

BODY_LIMIT_BYTES = 1 << 20
"""The largest body of a request, telemetry apart; so the largest job file too."""
MOST_VALUES = 5_000
"""In such a body; the largest job has about 100."""

Starts = Literal["now", "queued", "handed_over", "unknown"]
TakesEffect = Literal["at_start", "in_place", "at_restart"]


class JobState(StrEnum):
    """Where a job is. The row is written SUBMITTING before any launcher is called."""

    SUBMITTING = "SUBMITTING"
    QUEUED = "QUEUED"
    PENDING = "PENDING"
    RUNNING = "RUNNING"
    CANCELLING = "CANCELLING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def terminal(self) -> bool:
        """True where nothing more will happen."""
        return self in TERMINAL


TERMINAL = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED})


class WorkersChange(BaseModel):
    """Other limits on the number of workers; what is left out stays as it is."""

    model_config = ConfigDict(extra="forbid")

    min: WorkerCount | None = Field(None, description="with fewer the job waits")
    max: WorkerCount | None = Field(None, description="it takes no more, however many would fit; at most global_batch")


class JobChange(BaseModel):
    """PATCH /v1/jobs/{id}: workers, of a job that is not over; labels, of any. Unknown fields are refused."""

    model_config = ConfigDict(extra="forbid")

    workers: WorkersChange | None = None
    labels: LabelsChange | None = Field(
        None, description="labels to set; null takes one away, and what is not named stays"
    )

    @model_validator(mode="after")
    def _asks_something(self) -> JobChange:
        if self.workers is None and not self.labels:
            empty = {"path": "", "value": None, "allowed": "a mapping with workers, labels or both"}
            raise PydanticCustomError("impossible", "nothing is to be changed", {"problems": [empty]})
        refuse([*secrets_in(self.labels or {})])
        if self.workers is not None and self.workers.min is None and self.workers.max is None:
            given = self.workers.model_dump(exclude_unset=True)
            problem = {"path": "workers", "value": given, "allowed": "a mapping with min, max or both"}
            raise PydanticCustomError("impossible", "workers: neither min nor max is given", {"problems": [problem]})
        return self


class Wanted(BaseModel):
    """The limits on a job's workers that hold now; its spec has those of the submission."""

    min: int
    max: int
    revision: int = Field(description="changes so far; 0: as submitted")
    takes_effect: TakesEffect = Field(
        description="when the job follows a change: at_start, it has not started; in_place, while it runs; at_restart, "
        "when it restarts next (workers.elastic = restart)"
    )


class WaitingForWorkers(BaseModel):
    """A job stands still, for it has fewer workers than its minimum."""

    have: int
    min: int


class Holder(BaseModel):
    """A job that has places for so many workers."""

    job: str
    workers: int
    min: int = Field(description="with so many it would train as well")


class Queued(BaseModel):
    """Where a job stands in the queue, as of the last look. All of the places that it needs are given to it at once."""

    position: int = Field(description="1: the next")
    of: int
    since: datetime
    needs: int = Field(description="places: workers.min")
    free: int = Field(description="places that nobody has, of the kind that it needs")
    total: int = Field(description="places of that kind in the cluster")
    holders: list[Holder] = Field(description="jobs of the same project that have places, the largest first")
    others: int = Field(0, description="places that are held in the cluster by others than this service")
    other_projects: int = Field(0, description="places that jobs of other projects have")
    starts_at: datetime | None = Field(
        None,
        description="when it may start, if those that hold the places go on as fast as they did, and who waits before "
        "it starts first; null: that is not known",
    )
    held: str | None = Field(
        None, description="why it may not start even if all that it needs were free: a limit of its project"
    )


class JobItem(BaseModel):
    """One job, as a list shows it: all but what was asked for and how it went in full."""

    id: str
    name: str
    project: str = Field(DEFAULT, description="whose it is")
    labels: Labels = Field(default_factory=dict, description="as they are now")
    state: JobState
    reason: str | None = Field(None, description="why the job is where it is, for a person; set when FAILED")
    unreadable: str | None = Field(
        None, description="what this version of the service cannot read of the job, for a person; the rest is shown"
    )
    attempt: int = Field(description="submissions so far; above 1 after its cluster was lost")
    created_at: datetime
    submitted_by: str | None = Field(
        None, description="the name of the token; null: an earlier version did not note it"
    )
    started_at: datetime | None = None
    finished_at: datetime | None = None
    steps: int | None = Field(None, description="optimizer steps of the run; null until a script has said")
    progress: Sample | None = Field(None, description="the newest sample that rank 0 has posted")
    validation_loss: float | None = Field(None, description="the newest validation loss")
    workers: int = Field(0, description="workers whose registration has not run out")
    wanted_workers: Wanted
    world_size: int | None = Field(None, description="workers that train together, as this attempt has last said")
    waiting_for_workers: WaitingForWorkers | None = None
    queue: Queued | None = Field(None, description="set while it is QUEUED")
    run_dir: str = Field(description="the job's folder: checkpoints, history, summary, picture")
    kept_bytes: int = Field(0, description="of its samples, events and logs that the service keeps, about")
    dashboard_url: str | None = Field(None, description="the job's page in the Ray dashboard, while there is one")


class Job(JobItem):
    """One job, as GET /v1/jobs/{id} shows it."""

    spec: AnySpec | None = Field(None, description="what was asked for; null only where unreadable")
    summary: dict[str, JsonValue] | None = Field(None, description="summary.json of a run that succeeded")


class Draft(BaseModel):
    """POST /v1/jobs:validate: the job that would be made."""

    spec: AnySpec = Field(description="with all defaults, and where its start lies")
    starts: Starts = Field(
        description="now: its workers have places; queued: it would wait for them; handed_over: at once, to a cluster "
        "that brings machines or has a queue of its own; unknown: the launcher cannot be asked now"
    )
    reason: str | None = Field(None, description="why it would not start now, for a person")
    queue: Queued | None = Field(None, description="where it would stand, where it would wait")


class JobList(BaseModel):
    """GET /v1/jobs, newest first."""

    jobs: list[JobItem]
    next: str | None = Field(
        None,
        description="ask again with before=<this> for older ones; null: there are none. It stays good whatever is "
        "added or deleted meanwhile",
    )


class History(BaseModel):
    """GET /v1/jobs/{id}/metrics: samples of the job in order of step, and its newest events in order of time.

    As many of each as one answer holds.
    """

    job_id: str
    samples: list[Sample]
    events: list[Event]
    next_after_step: int | None = Field(
        None, description="there are later samples: ask again with after_step=<this>; null: these were all"
    )
    next_before_event: int | None = Field(
        None, description="there are older events: ask again with before_event=<this>; null: these were all"
    )
    unreadable: int = Field(0, description="samples among these steps that another version wrote and this cannot read")


class Logs(BaseModel):
    """GET /v1/jobs/{id}/logs?offset=N: text from byte N on. Ask again from next_offset; `complete` ends it."""

    text: str
    next_offset: int
    complete: bool


class CheckpointFile(BaseModel):
    """One file of a checkpoint."""

    name: str
    bytes: int


class CheckpointFiles(BaseModel):
    """One checkpoint in the folder of a run. It is whole where manifest.json is among its files."""

    folder: str = Field(description="step-<step>-<generation>; a later generation is newer, whatever its step")
    files: list[CheckpointFile]


class CheckpointList(BaseModel):
    """GET /v1/jobs/{id}/checkpoints."""

    store: str | None = Field(None, description="where they are instead; then none is listed here")
    checkpoints: list[CheckpointFiles]
    next: str | None = Field(
        None, description="there are older ones: ask again with before=<this>; null: these were all"
    )


class TargetGroup(BaseModel):
    """One entry of GET /v1/metrics/targets, in the form of Prometheus HTTP service discovery.

    The label `__meta_thinwire_rank` is the number a worker has registered with: its slot in an elastic job.
    """

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
    request_id: str | None = Field(
        None, description="of this request, as in the header X-Request-ID: the service's log has it in its lines"
    )
