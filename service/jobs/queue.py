"""Which jobs may start, and with how many workers: pure, no clock, no effects.

A job is granted places, one for each worker, and is told to take no more. It is started with all of workers.min
granted or not at all, so none holds a part of them while it waits for the rest.

* By priority, then in the order of arrival. A job keeps its places until it is over; none that trains is stopped for
  another.
* A job behind one that waits may start where that one does not fit. After PATIENCE_S of waiting what it needs is kept
  for it, so that small jobs do not keep a large one waiting for ever: nobody starts any more behind it but who needs
  other places, as one without GPUs behind one that waits for a GPU.
* More than workers.min is granted only while nobody waits: one place after another, to all that want more in turn.
* A minimum that was raised while the job runs is granted before those who wait are looked at. Till then the job trains
  with what it has.
* Where machines were lost, so that there are fewer places than were granted, a job that has stood still below its
  minimum for PATIENCE_S gives back what it holds, if another waits that could use it: the last of them in the order.

When one that waits may start is said where it follows from when those that hold places are over. Who waits before it is
taken to start first, and to stay: nothing is known of its speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace

from thinwire.contract.places import Room

PATIENCE_S = 300.0
MOST_HOLDERS = 20
"""Named to one who waits."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A job that is not over, as the queue sees it.

    gpus: its workers take GPUs. each: how many CPUs, and GPUs, a worker takes: that is a place. granted: None where it
    has not been started. living: workers that are there, which after a resize may be more. grows: it would follow a
    larger grant. queued_at: since when it waits. stalled_at: since when it has had fewer workers than its minimum.
    """

    id: str
    least: int
    most: int
    priority: int = 0
    created_at: float = 0.0
    gpus: bool = False
    each: int = 1
    granted: int | None = None
    living: int = 0
    grows: bool = True
    queued_at: float | None = None
    stalled_at: float | None = None
    waits: bool = True
    """To be started; else it can only hold places."""
    over_at: float | None = None
    """When its last step is made, as its steps go; None where that is not known."""
    arrival: int = 0

    @property
    def order(self) -> tuple[int, int, float, str]:
        """Who has the least is the first."""
        return -self.priority, self.arrival, self.created_at, self.id


@dataclass(frozen=True, slots=True)
class Waits:
    """A job that waits. free, total: places of its kind. never: the cluster, as it is, has too few. starts_at: when all
    that it needs will be free; None where that is not known.
    """

    claim: Claim
    free: int
    total: int
    never: bool
    starts_at: float | None = None


@dataclass(frozen=True, slots=True)
class Grants:
    """The places of each job that has some, and who waits, the next first. back: who is to give its places back."""

    places: dict[str, int]
    waiting: tuple[Waits, ...]
    back: Claim | None = None


class _Free:
    def __init__(self, room: Room) -> None:
        self.cpus, self.gpus = room.cpus - room.others_cpus, room.gpus - room.others_gpus

    def of(self, claim: Claim) -> int:
        return max(0, min(self.cpus, self.gpus) if claim.gpus else self.cpus) // claim.each

    def take(self, claim: Claim, places: int) -> None:
        self.cpus -= places * claim.each
        self.gpus -= places * claim.each if claim.gpus else 0


def grant(room: Room, claims: Sequence[Claim], now: float) -> Grants:
    """What each job may have now. room: what the cluster has. now: unix seconds, as in the claims."""
    free = _Free(room)
    places: dict[str, int] = {}
    for claim in claims:
        if claim.granted is not None:
            places[claim.id] = min(claim.granted, claim.most)
            free.take(claim, max(places[claim.id], claim.living))
    back = _back(room, free, claims, now)
    in_order = sorted(claims, key=lambda claim: (claim.id not in places, claim.order))
    waiting: list[Waits] = []
    wanted, left = False, copy(free)  # left: without what is kept for those that have waited for long
    for claim in in_order:
        missing = claim.least - places.get(claim.id, 0)
        if missing <= 0 or not claim.waits:
            continue
        if missing <= left.of(claim):
            places[claim.id] = claim.least
            free.take(claim, missing)
            left.take(claim, missing)
            continue
        total = _total(room, claim)
        never = claim.least > total
        wanted |= not never
        if claim.id not in places:
            waiting.append(Waits(claim, 0, total, never))
            if not never and claim.queued_at is not None and now - claim.queued_at >= PATIENCE_S:
                left.take(claim, missing)
    if not wanted:
        _grow(free, [claim for claim in in_order if claim.id in places and claim.grows], places)
    starts = _starts(free, [(one, places[one.id]) for one in claims if one.id in places], waiting, now)
    waits = [replace(one, free=free.of(one.claim), starts_at=starts.get(one.claim.id)) for one in waiting]
    return Grants(places, tuple(waits), back)


def _starts(free: _Free, holding: list[tuple[Claim, int]], waiting: list[Waits], now: float) -> dict[str, float]:
    """When those that wait find all of their places free, by id; without those of whom it is not known."""
    ends = sorted((max(now, one.over_at), one.id, one, held) for one, held in holding if one.over_at is not None)
    found: dict[str, float] = {}
    taken = copy(free)  # by those before it
    for waits in waiting:
        if waits.never:
            continue
        claim, then, at = waits.claim, copy(taken), now
        for end, _, one, held in ends:
            if claim.least <= then.of(claim):
                break
            then.take(one, -max(held, one.living))
            at = end
        if claim.least <= then.of(claim):
            found[claim.id] = at
        taken.take(claim, claim.least)
    return found


def _total(room: Room, claim: Claim) -> int:
    return (min(room.cpus, room.gpus) if claim.gpus else room.cpus) // claim.each


def _back(room: Room, free: _Free, claims: Sequence[Claim], now: float) -> Claim | None:
    """Who gives its places back. free: what is left of the room, less than nothing where machines were lost."""
    stalled = [one for one in claims if one.waits and one.granted is not None and one.stalled_at is not None]
    if not stalled or min(free.cpus, free.gpus) >= 0:
        return None
    last = max(stalled, key=lambda claim: claim.order)
    if last.stalled_at is None or now - last.stalled_at < PATIENCE_S:
        return None
    others = [one for one in claims if one.waits and one is not last and (one in stalled or one.granted is None)]
    return last if any(one.least <= _total(room, one) for one in others) else None


def _grow(free: _Free, claims: list[Claim], places: dict[str, int]) -> None:
    """Give out what is free, a place at a time."""
    while claims := [claim for claim in claims if places[claim.id] < claim.most and free.of(claim)]:
        for claim in claims:
            if free.of(claim):
                places[claim.id] += 1
                free.take(claim, 1)
