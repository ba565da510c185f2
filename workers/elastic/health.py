"""Which of Ray Train's answers to a poll mean that a worker is gone.

A worker that Ray cannot reach may be alive: that is death after UNAVAILABLE_S, or as soon as the membership server has
lost its connection too. A worker whose process lives but that the server has counted out long ago hangs: it must make
room. An exception of a train function is none of these: Ray Train decides.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from ray.exceptions import ActorUnavailableError, RayActorError
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError, WorkerHealthCheckTimeoutError
from ray.train.v2._internal.execution.worker_group.poll import WorkerStatus

from thinwire.workers.elastic.bring_up import Unit
from thinwire.workers.elastic.membership_actor import Beat

UNAVAILABLE_S = 20.0


@dataclass(frozen=True, slots=True)
class Loss:
    """Why a worker is gone. node_lives: its place can be filled again; else the node may be gone with it."""

    why: str
    node_lives: bool = True


class Health:
    """Remembers since when a worker cannot be reached."""

    def __init__(self, leave_s: float) -> None:
        self._leave_s = leave_s
        self._unavailable_since: dict[str, float] = {}

    def read(self, unit: Unit, status: Any, beat: Beat | None) -> tuple[Any, Loss | None]:
        """The status as it counts, and why this worker is gone; None where it is not."""
        now = time.monotonic()
        error = status.error
        failure = error.health_check_failure if isinstance(error, WorkerHealthCheckFailedError) else None
        gone = None if beat is None else beat.gone.get(unit.slot)
        if gone is not None and gone.since_s > now - unit.started:
            gone = None  # its predecessor
        if isinstance(failure, ActorUnavailableError):
            since = self._unavailable_since.setdefault(unit.name, now)
            if gone is not None:
                return status, Loss(f"unreachable, and no member any more ({gone.why})", node_lives=False)
            if now - since > UNAVAILABLE_S:
                return status, Loss(f"unreachable for {now - since:.0f} s", node_lives=False)
            return WorkerStatus(running=True), None
        self._unavailable_since.pop(unit.name, None)
        if isinstance(failure, RayActorError):
            return status, Loss(_in_short(failure))
        if isinstance(error, WorkerHealthCheckTimeoutError):
            return status, Loss(_in_short(error))
        if status.running and gone is not None and gone.since_s > self._leave_s:
            why = f"its process goes on {gone.since_s:.0f} s after the membership counted it out ({gone.why})"
            return status, Loss(why)
        return status, None


def _in_short(error: Exception) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:500]
