"""The states of a job and the moves between them.

SUBMITTING -> PENDING -> RUNNING -> SUCCEEDED
     |           |          |-----> FAILED
     |           |          |-----> SUBMITTING       (a new attempt: its processes were lost with their cluster)
     +-----------+----------+-----> CANCELLING -> CANCELLED
"""

from __future__ import annotations

from enum import StrEnum


class JobState(StrEnum):
    """Where a job is. The row is written SUBMITTING before any launcher is called."""

    SUBMITTING = "SUBMITTING"
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
