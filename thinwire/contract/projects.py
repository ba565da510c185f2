"""Projects: what belongs to one, what it may use, and how it shares a cluster with the others."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field

from thinwire.contract.job_names import LABEL

DEFAULT: Final = "default"
"""The project of all that names none; it is always there."""
EVERY: Final = "*"
"""In the place of a project, of a token that is for all of them."""
PROJECT_HEADER: Final = "Thinwire-Project"
"""Of a request: what its query may say as `project`, for whoever says it with each, such as the page."""
LARGEST: Final = 2**53 - 1
"""Of a limit: what every reader of JSON takes for a whole number."""

PROJECT_NAME: Final = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"
ProjectName = Annotated[str, Field(pattern=PROJECT_NAME, description="in lower case")]
Limit = Annotated[int | None, Field(ge=0, le=LARGEST)]
_ObjectName = Annotated[str, Field(min_length=1, max_length=63, pattern=LABEL)]


class Level(StrEnum):
    """Priorities of jobs in words: below 0, 0, above 0."""

    LOW = "low"
    NORMAL = "normal"
    HIGH = "high"

    @staticmethod
    def of(priority: int) -> Level:
        """Of a job's number."""
        return Level.LOW if priority < 0 else Level.HIGH if priority > 0 else Level.NORMAL


class Limits(BaseModel):
    """The most of each; null: no limit. Jobs count until they are over, with the most workers that they may have."""

    model_config = ConfigDict(extra="forbid", strict=True)

    running_jobs: Limit = Field(None, description="jobs that have been started; the next waits in the queue")
    queued_jobs: Limit = Field(None, description="jobs that wait to be started; one more is refused")
    workers: Limit = Field(None, description="workers.max of all jobs that are not over; beyond, jobs are refused")
    gpus: Limit = Field(None, description="GPUs of these workers; beyond, jobs are refused")
    package_bytes: Limit = Field(None, description="of packages; beyond, they are refused")
    kept_bytes: Limit = Field(None, description="of samples, events and logs; beyond, no more are kept")


class Used(BaseModel):
    """How much of each is used now."""

    running_jobs: int = 0
    queued_jobs: int = 0
    workers: int = 0
    gpus: int = 0
    package_bytes: int = 0
    kept_bytes: int = 0


class ProjectSettings(BaseModel):
    """What an operator says of a project."""

    model_config = ConfigDict(extra="forbid", strict=True)

    weight: float = Field(
        1.0, ge=1e-3, le=1e6, allow_inf_nan=False, description="its share of the cluster, beside those of the others"
    )
    priorities: list[Annotated[Level, Field(strict=False)]] = Field(
        default_factory=lambda: list(Level), min_length=1, max_length=3, description="that its jobs may have"
    )
    kueue_queues: list[_ObjectName] | None = Field(
        None, max_length=100, description="LocalQueues that its jobs may name, and must name one of; null: any or none"
    )
    kueue_priorities: list[_ObjectName] | None = Field(
        None, max_length=100, description="WorkloadPriorityClasses that its jobs may name; null: any"
    )
    limits: Limits = Field(default_factory=Limits, description="of the project")
    person_limits: Limits = Field(default_factory=Limits, description="of each person in it")


class NewProject(ProjectSettings):
    """POST /v1/projects. What is left out may be set later: PATCH /v1/projects/{name}, a JSON merge patch of this."""

    name: ProjectName


class Project(ProjectSettings):
    """A project as a list shows it."""

    model_config = ConfigDict(extra="ignore", strict=False)

    name: str
    created_at: datetime
    created_by: str


class ProjectList(BaseModel):
    """GET /v1/projects, by name."""

    projects: list[Project]
    next: str | None = Field(
        None, description="ask again with after=<this> for those that follow; null: there are none"
    )


class Quota(BaseModel):
    """What a project uses and may use, or one person in it."""

    project: str
    person: str | None = Field(None, description="null: the project as a whole")
    used: Used
    limits: Limits


class QuotaList(BaseModel):
    """GET /v1/quotas: of each project that the caller is of, by name, and of one person in it."""

    quotas: list[Quota]


def whose_limits(project: str, person: str | None) -> str:
    """Whose limits these are, in words."""
    return f"project {project}" if person is None else f"{person} in project {project}"
