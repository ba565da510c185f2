"""A run that shares no folder with the service: what its driver is given once, and what its processes ask and leave.

    POST /v1/jobs/{id}/claim            Claim -> Claimed     with the attempt's ticket; once
    GET  /v1/jobs/{id}/run              RunNow               all else with the job's own token
    PUT  /v1/jobs/{id}/files/{name}     one of KEPT_FILES, whole
    GET  /v1/jobs/{id}/files/{name}
    GET  /v1/jobs/{id}/package          the zip of its script
    POST /v1/jobs/{id}/log              a part of the driver's log -> LogKept
    GET  /v1/jobs/{id}/metrics          the history so far

A ticket stands in the command line that the cluster shows to all its users. It is of one attempt, and worth nothing
once it was used: the process that uses it names a secret of its own, and is answered again if an answer was lost.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from thinwire.contract.reports import Failure, WantedWorkers

KeptFile = Literal["buckets.json", "loss.png", "summary.json"]
KEPT_FILES: tuple[KeptFile, ...] = ("buckets.json", "loss.png", "summary.json")
"""Files of a run folder that one process of a run leaves for the next, or for people."""
LARGEST_FILE_BYTES = 1 << 20
LOG_PART_BYTES = 256 << 10
"""The most that is sent of a log at a time."""
LONGEST_LOG_BYTES = 256 << 20
"""What is kept of the log of one attempt; the rest is on the machine of the driver."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Claim(_Model):
    """Who uses the ticket."""

    claimant: str = Field(
        min_length=32, max_length=128, pattern=r"^[A-Za-z0-9_-]+$", description="random, of this process alone"
    )


class Claimed(_Model):
    """What a driver needs to begin. Holds the job's token."""

    job: dict[str, JsonValue] = Field(description="job.json of the run folder")
    token: str = Field(repr=False)
    attempt: int
    unique_name: str = Field(description="the job's name in a cluster that serves several services")

    @property
    def job_id(self) -> str:
        """The job's id."""
        return str(self.job["job_id"])


class RunNow(_Model):
    """What the service knows of the run at this moment."""

    attempt: int
    wanted: WantedWorkers
    failure: Failure | None = Field(None, description="why it cannot go on, where a process has said so")
    succeeded: bool = Field(description="its summary has arrived")


class LogKept(_Model):
    """How much of the log of this attempt is kept: the sender goes on from there."""

    next_offset: int
    full: bool = Field(False, description="no more of it is taken")
