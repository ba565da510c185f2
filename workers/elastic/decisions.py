"""What the worker group decides at a poll: who is gone, whom to start or to let go.

Nothing here calls Ray.

Which of Ray Train's answers to a poll mean that a worker is gone: a worker that Ray cannot reach may be alive, so that
is death after UNAVAILABLE_S, or as soon as the membership has counted it out. One that still is a member may train
while this host is cut off: it has MEMBER_UNAVAILABLE_S. Where a machine has vanished nothing tells Ray so: a poll stays
without an answer, and once the membership has counted that worker out too it has UNANSWERED_S. A worker whose process
lives but that the membership has counted out long ago hangs: it must make room. An error of a train function is none of
these: see failures.py.

Whom to start and whom to let go: the membership server itself asks the surplus of those that are seated; `decide` asks
those that wait for a seat.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from ray.exceptions import ActorUnavailableError, RayActorError
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError, WorkerHealthCheckTimeoutError
from ray.train.v2._internal.execution.worker_group.poll import WorkerStatus

from thinwire.workers.elastic.bring_up import Unit
from thinwire.workers.elastic.membership_actor import Headcount
from thinwire.workers.elastic.worker_side import Failed

UNAVAILABLE_S = 20.0
UNANSWERED_S = 10.0
"""A poll takes milliseconds, and on a busy machine less than this."""
MEMBER_UNAVAILABLE_S = 60.0
"""As long as Ray lets a node be cut off from its head; by then no lease holds (workers/membership/commit_lease.py)."""
LONGEST_MESSAGE = 4000
"""Characters of an error."""


@dataclass(frozen=True, slots=True)
class Loss:
    """Why a worker is gone. node_lives: its place can be filled again; else the node may be gone with it.

    answered: something has told that it is gone; else the node may be silent, and Ray not know it.
    """

    why: str
    node_lives: bool = True
    answered: bool = True


class Health:
    """Remembers since when a worker cannot be reached."""

    def __init__(self, leave_s: float) -> None:
        self._leave_s = leave_s
        self._unavailable_since: dict[str, float] = {}

    def read(
        self, unit: Unit, status: Any, headcount: Headcount | None, unanswered_s: float = 0.0
    ) -> tuple[Any, Loss | None]:
        """The status as it counts, and why this worker is gone; None where it is not.

        unanswered_s: for how long the poll has been without an answer.
        """
        now = time.monotonic()
        error = status.error
        failure = error.health_check_failure if isinstance(error, WorkerHealthCheckFailedError) else None
        gone = None if headcount is None else headcount.gone.get(unit.slot)
        if gone is not None and gone.since_s > now - unit.started:
            gone = None  # its predecessor
        member = headcount is not None and unit.slot in headcount.seated
        if isinstance(failure, ActorUnavailableError):
            since = self._unavailable_since.setdefault(unit.name, now)
            if gone is not None:
                return status, Loss(f"unreachable, and no member any more ({gone.why})", False, answered=False)
            if now - since > (MEMBER_UNAVAILABLE_S if member else UNAVAILABLE_S):
                return status, Loss(f"unreachable for {now - since:.0f} s", False, answered=False)
            return WorkerStatus(running=True), None
        self._unavailable_since.pop(unit.name, None)
        if isinstance(failure, RayActorError):
            return status, Loss(_in_short(failure))
        if isinstance(error, WorkerHealthCheckTimeoutError):
            return status, Loss(_in_short(error), answered=False)
        if (
            status.running
            and unanswered_s > (UNANSWERED_S if gone is not None else MEMBER_UNAVAILABLE_S)
            and not member
        ):
            told = "is not seated" if gone is None else gone.why
            return status, Loss(f"no answer for {unanswered_s:.0f} s, and no member ({told})", answered=False)
        if status.running and gone is not None and gone.since_s > self._leave_s:
            why = f"its process goes on {gone.since_s:.0f} s after the membership counted it out ({gone.why})"
            return status, Loss(why)
        return status, None


def _in_short(error: Exception) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:500]


def own_error(status: Any) -> Failed | None:
    """The error that a train function has ended with; None where it runs, or has ended well. status: as it counts."""
    if status.running:
        return None
    if status.error is not None:
        return Failed(type(status.error).__name__, str(status.error).strip()[-LONGEST_MESSAGE:])
    return status.return_value if isinstance(status.return_value, Failed) else None


@dataclass(frozen=True, slots=True)
class Decision:
    """Slots."""

    start: tuple[int, ...] = ()
    cancel: tuple[int, ...] = ()
    dismiss: tuple[int, ...] = ()


def decide(
    target: int, running: Collection[int], coming: dict[int, bool], ending: Collection[int], seated: Collection[int]
) -> Decision:
    """What brings the job to `target` workers.

    running: slots whose worker lives. coming: slots on their way, and whether they have their resources. ending: slots
    on their way that were cancelled. seated: slots of the present generation. The lowest free slots are started; what
    waits for resources is cancelled first, then the highest slots.
    """
    surplus = len(running) + len(coming) - target
    if surplus < 0:
        taken = {*running, *coming, *ending}
        missing = -surplus - len(ending)  # their slots are free in a moment
        free = (slot for slot in range(len(taken) + max(missing, 0)) if slot not in taken)
        return Decision(start=tuple(slot for slot, _ in zip(free, range(missing), strict=False)))
    cancel = sorted(coming, key=lambda slot: (coming[slot], -slot))[:surplus]
    asked_by_server = max(sum(slot in seated for slot in running) - target, 0)
    idle = sorted((slot for slot in running if slot not in seated), reverse=True)
    return Decision(cancel=tuple(cancel), dismiss=tuple(idle[: max(surplus - len(cancel) - asked_by_server, 0)]))
