"""What the streams of the jobs API say, as pydantic models: the `data` of each server-sent event, by its `event`.

    state    StateChange   a job has come to a state
    event    JobEvent      something that happened to it: a death, a freeze, a checkpoint, a wish for other workers
    sample   JobSample     its newest step, where the stream is of one job
    gap      Gap           between the last id and here something is missing
    end      End           nothing more comes of the job; the stream is over
    log      LogPart       a part of its log, in a stream of a log

The ids of the first two streams are numbers that only grow: of two messages the later has the larger. What has been
read is what comes up to an id. The id of a log's part is the offset of the next one.
"""

from __future__ import annotations

from typing import Final

from pydantic import BaseModel, Field, JsonValue

from thinwire.contract.jobs import JobState
from thinwire.contract.reports import Event, Sample

HEARTBEAT_S: Final = 15.0
"""A stream that has nothing to say says a comment so often: who hears nothing for longer has lost it."""
RETRY_MS: Final = 2000
"""A client waits for so long before it comes again."""
STATE, EVENT, SAMPLE, GAP, END, LOG = "state", "event", "sample", "gap", "end", "log"


class StateChange(BaseModel):
    """`state`: a job has come to a state."""

    job_id: str
    attempt: int
    state: JobState
    step: int = Field(description="the newest that was known of the job then")
    time: float = Field(description="unix seconds")
    reason: str | None = None


class JobEvent(Event):
    """`event`: something that happened once, as GET /v1/jobs/{id}/metrics has it; and to which job."""

    job_id: str
    attempt: int


class JobSample(BaseModel):
    """`sample`: the newest step of a job. Where steps are quick some are left out, and none comes twice."""

    job_id: str
    attempt: int
    sample: Sample


class Gap(BaseModel):
    """`gap`: of what was told after the last id that was read, something is kept no more."""

    after: int = Field(description="the last id that was read")
    reason: str = Field(description="what is missing, and what to do, for a person")


class End(BaseModel):
    """`end`: the job is over, or has been deleted, and the stream ends."""

    job_id: str
    state: JobState | None = Field(description="null: the job was deleted")
    reason: str | None = None


class LogPart(BaseModel):
    """`log`: text of the job's log."""

    text: str
    next_offset: int = Field(description="in bytes, where the next part begins; the id of this one")


MODELS: Final[dict[str, type[BaseModel]]] = {
    STATE: StateChange,
    EVENT: JobEvent,
    SAMPLE: JobSample,
    GAP: Gap,
    END: End,
    LOG: LogPart,
}


class Told(BaseModel):
    """One message of a stream, as a client has read it: its id, what it is, what it says."""

    id: str
    event: str
    data: dict[str, JsonValue]
