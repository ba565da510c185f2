"""How many workers are wanted against how many there are: whom to start, to cancel, to ask to leave. Pure.

The membership server itself asks the surplus of those that are seated; here only those that wait without a seat are.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


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
