"""What the reconciler has asked of the launcher, what it was told, and what it has written of that."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.service.jobs.decide import Action
from thinwire.service.jobs.repository import JobRow
from thinwire.service.launch.protocol import LaunchStatus


@dataclass(frozen=True, slots=True)
class Written:
    """What was written of a job's pods, and when."""

    words: str
    at: float


NOTHING_WRITTEN = Written("", 0.0)


@dataclass(frozen=True, slots=True)
class Asked:
    """A job as it was read, what the launcher said of it, and what follows."""

    row: JobRow
    action: Action
    status: LaunchStatus
    refusal: str | None = None
    """Why the launcher did not take a submit."""
