"""What a running job says back to the service: registrations and telemetry, as pydantic models. Torch-free.

Both sides use these models, so that neither can drift. A job authenticates with a token of its own, which allows
the three calls below and nothing else:

    PUT  /v1/jobs/{id}/workers/{rank}   WorkerRegistration   (repeated as a heartbeat; a lease of LEASE_S)
    POST /v1/jobs/{id}/telemetry        Telemetry            (rank 0, in batches; idempotent by attempt and step)
    DELETE /v1/jobs/{id}/workers/{rank}?attempt=N            (at a clean end; an older attempt's changes nothing)

What is called `rank` in the addresses above, in labels of metrics and in their targets is what a worker is called for
people and dashboards. Where workers are replaced one by one (workers.elastic: in_place) it is the worker's slot: its
place in the job, which its replacement takes over, so that its graphs go on. With workers.elastic: restart it is
its rank in the group of the attempt. But "rank 0" is always the worker that is first in its group at the time, in
whatever slot: it alone posts telemetry and writes the files of the run.

The run folder is the other border: contract/run_folder.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, JsonValue, field_validator

from thinwire.contract.spec import WorkerCount

LEASE_S = 30.0
"""A worker that has not renewed its registration for so long is no longer a scrape target."""
HEARTBEAT_S, MOST_HEARTBEAT_S = 10.0, 120.0
REPORT_S, MOST_REPORT_S = 1.0, 20.0
"""Between two registrations of a worker, and between two reports of a job: where nothing else is said, and at most."""
NEXT_HEADER = "Thinwire-Next-Report-Seconds"
"""In the answer to either: how long until the next (service/jobs/pace.py). An older service says nothing, and an older
worker does not read it. The lease of a worker that is to wait for longer than HEARTBEAT_S lasts longer by as much."""

SCRAPE_PORTS = range(32768, 61000)
"""Where workers serve their metrics, and nothing else is taken for one: the ports that Linux gives out by default,
where no service of a machine or a cluster listens by its own choice. Network policies let Prometheus reach these."""

MOST_REPORTED = 32
"""Names beside the loss that a script's reports may have."""
LONGEST_REPORTED_NAME = 64

NotFinite = Literal["nan", "inf", "-inf"]
"""JSON has no such number; float() reads each of these words."""


class _Report(BaseModel):
    # Not finite would become null in JSON, which the other side then refuses to read.
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class WantedWorkers(_Report):
    """How many workers the job is wanted to have now: workers.json in the run folder.

    The service replaces the file in one move, after its database has the new numbers. An attempt begins with what it
    finds here, and follows a file whose revision is another than that of the last one it read.
    """

    min: WorkerCount = Field(description="with fewer the job waits")
    max: WorkerCount = Field(description="it takes no more, however many would fit")
    revision: int = Field(ge=0, description="changes so far; 0: as the spec was submitted")


def _finite_or_none(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def wrong_with_reported_name(name: str) -> str | None:
    """Why a script's number cannot go by this name, in words; None where it can.

    What is not printable breaks lines, displays or encodings: control characters, lone surrogates, marks of direction.
    """
    if not 0 < len(name) <= LONGEST_REPORTED_NAME:
        return f"its name has {len(name)} characters; from 1 to {LONGEST_REPORTED_NAME}"
    return None if name.isprintable() else "its name has characters that cannot be printed"


def wrong_with_reported(names: Iterable[str]) -> str | None:
    """Why a sample cannot have these; None where it can."""
    names = list(names)
    if len(names) > MOST_REPORTED:
        return f"{len(names)} names; at most {MOST_REPORTED}"
    return next((f"{name[:100]!r}: {why}" for name in names if (why := wrong_with_reported_name(name))), None)


class WorkerRegistration(_Report):
    """Where one worker's metrics can be scraped."""

    address: str = Field(max_length=255, description="IP:port of the worker's /metrics")
    attempt: int = Field(ge=1, description="which submission of the job this worker belongs to")
    pid: int = Field(ge=1)
    node: str = Field(max_length=255)
    leads: bool = Field(False, description="it exports what is of the job, beside what is its own")


class Health(_Report):
    """How the optimizer is doing, as optim.engine.health finds it at an evaluation; None where it has nothing to say.

    docs/operations.md says what is normal. A number that is not finite is kept as None: JSON has no such number.
    """

    error_to_momentum: float | None = Field(None, description="||R|| / ||what an exchange gives||; watch its trend")
    sign_density_worker: float | None = Field(None, description="||a||_1 / (sqrt(count) ||a||_2) of what was sent")
    sign_density_server: float | None = Field(None, description="the same of what was sent back")
    max_step: float | None = Field(None, description="max |m / (sqrt(v) + eps)|: the largest step, in units of lr")
    variance_ratio: float | None = Field(None, description="of the automatic end of warm-up, which asks for 0.96")
    floored_elements: int | None = Field(None, description="elements whose variance the floor raised")
    rounds_skipped: int | None = Field(None, description="steps so far that exchanged nothing")
    num_uploads: int | None = Field(None, description="gradients that all workers have sent so far, of CADA")
    possible_uploads: int | None = Field(None, description="those of which they are: steps times workers")
    lamb_coeff_min: float | None = Field(None, description="trust coefficients of LAMB, over tensors")
    lamb_coeff_median: float | None = None
    lamb_coeff_max: float | None = None

    @field_validator("*", mode="before")
    @classmethod
    def _finite_or_none(cls, value: object) -> object:
        return _finite_or_none(value)


_NotNegative = Annotated[float, Field(ge=0.0)]
StepPart = Literal["forward_backward", "encode", "wire", "slowest", "decode_update"]
"""Of the wall time of a step, as metric_names.STEP_PARTS says."""


class Sample(_Report):
    """One step of the history. Losses in nats per byte; bytes are payload sent by rank 0, counted by the transport.

    A loss that is not finite is kept as None: JSON has no such number, and the run's Failure reports it.
    """

    step: int = Field(ge=0, description="steps committed; 0 is the state before training")
    last_step: int | None = Field(None, ge=0, description="with which the run ends; None: it is not known yet")
    phase: Literal["warmup", "compressed", "dense"]
    loss: float | None = Field(None, description="training loss; None at step 0")
    validation_loss: float | None = None
    lr: float = 0.0
    step_seconds: _NotNegative = 0.0
    seconds_by_part: dict[StepPart, _NotNegative] | None = Field(
        None,
        description="of step_seconds on rank 0, which they add up to: forward_backward, encode, wire, slowest (longer "
        "than who came last it has waited), decode_update; None: not known, as on a GPU",
    )
    predicted_step_seconds: _NotNegative | None = Field(
        None, description="by the network as it was measured when the run began; None: not predicted"
    )
    samples_per_second: _NotNegative = 0.0
    payload_bytes: int = Field(0, ge=0, description="sent in this step")
    payload_bytes_total: int = Field(0, ge=0, description="sent in all training steps so far")
    compression_ratio: _NotNegative | None = Field(
        None, description="fp32 ring all-reduce bytes over payload_bytes, this step; None: nothing was sent"
    )
    world_size: int = Field(1, ge=1)
    time: float = Field(description="unix seconds")
    last_worker: int | None = Field(
        None, ge=0, description="who came last to the exchange; None: nobody did clearly, or it is not known"
    )
    waited_seconds: _NotNegative | None = Field(None, description="how much longer the others waited, their median")
    computed_seconds: float | None = Field(
        None, description="how much longer than they, their median, who came last computed; None: not known"
    )
    health: Health | None = Field(None, description="taken with the validation loss; None at other steps")
    reported: dict[str, float | NotFinite] | None = Field(
        None,
        description="means of what a script has reported beside its loss, and as validation_NAME of what an evaluation "
        "has found; nan, inf and -inf as words",
    )

    @property
    def skipped_round(self) -> bool:
        """Had this worker peers, and sent them nothing in this step?"""
        return self.step > 0 and self.world_size > 1 and self.payload_bytes == 0

    @field_validator("loss", "validation_loss", mode="before")
    @classmethod
    def _finite_or_none(cls, loss: object) -> object:
        return _finite_or_none(loss)

    @field_validator("reported", mode="before")
    @classmethod
    def _words_where_not_finite(cls, reported: object) -> object:
        if not isinstance(reported, dict):
            return reported
        return {name: str(x) if isinstance(x, float) and not math.isfinite(x) else x for name, x in reported.items()}


class EventKind(StrEnum):
    """Every kind of event that is reported. docs/operations.md lists them with their fields.

    The job's workers and driver report the first ones; the service the rest: a job_ for each of a job's states.
    """

    RESUMED = "resumed"
    STARTED_FROM = "started_from"
    REGROUPED = "regrouped"
    WAITING_FOR_WORKERS = "waiting_for_workers"
    WAITING_FOR_MEMBERSHIP = "waiting_for_membership"
    MEMBERSHIP_MINORITY = "membership_minority"
    MEMBERSHIP_GAVE_UP = "membership_gave_up"
    WORKER_STUCK = "worker_stuck"
    STALLED = "stalled"
    SLOW_WORKER = "slow_worker"
    PHASE_CHANGE = "phase_change"
    WARMUP_REARMED = "warmup_rearmed"
    CHECKPOINT_SAVED = "checkpoint_saved"
    CHECKPOINT_FAILED = "checkpoint_failed"
    RESIZE_REQUESTED = "resize_requested"
    CLUSTER_WAITS = "cluster_waits"
    TRACKER_FAILED = "tracker_failed"
    TRACKER_BACK = "tracker_back"
    HISTORY_FULL = "history_full"
    JOB_SUBMITTING = "job_submitting"
    JOB_QUEUED = "job_queued"
    JOB_PENDING = "job_pending"
    JOB_RUNNING = "job_running"
    JOB_CANCELLING = "job_cancelling"
    JOB_SUCCEEDED = "job_succeeded"
    JOB_FAILED = "job_failed"
    JOB_CANCELLED = "job_cancelled"


class Event(_Report):
    """Something that happened once. kind: an EventKind, or one of workers of a later version."""

    kind: str = Field(max_length=64)
    step: int = Field(ge=0)
    time: float
    fields: dict[str, JsonValue] = Field(default_factory=dict)


class Failure(_Report):
    """Why a job cannot go on, for a person: what, the value received, what to do."""

    kind: str = Field(max_length=64, description="the error's class name")
    message: str = Field(max_length=4000)
    step: int | None = None


class Telemetry(_Report):
    """A batch from rank 0. Samples of a step already known are replaced: a resumed run repeats steps."""

    attempt: int = Field(ge=1)
    # Only the first wrong one is told: thousands of errors cost seconds.
    samples: Annotated[list[Sample], FailFast()] = Field(default_factory=list, max_length=2000)
    events: Annotated[list[Event], FailFast()] = Field(default_factory=list, max_length=2000)
    summary: dict[str, JsonValue] | None = Field(None, description="summary.json, with the last batch of a success")
    failure: Failure | None = None
