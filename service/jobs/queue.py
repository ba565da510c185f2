"""Which jobs may start, and with how many workers: pure, no clock, no effects.

A job is granted places, one for each worker, and is told to take no more. It is started with all of workers.min
granted or not at all, so none holds a part of them while it waits for the rest.

* By priority; among projects of equal priority the one first that uses least of the cluster for its weight, by the
  resource that it uses most of (dominant resource fairness, Ghodsi et al., NSDI 2011); of equal ones the one whose turn
  it is, by what was started before (start-time fair queueing, Goyal et al., SIGCOMM 1996); in a project in the order of
  arrival. A job keeps its places until it is over; none that trains is stopped for another.
* Waiting makes up for priority: a job gains a point in RISES_S, beside those of its project; and so do the jobs of the
  project that uses least, beside the others', since that was served. So everyone's turn comes.
* A project, or a person in it, that has as many jobs running as it may waits, and keeps nobody else waiting.
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

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from itertools import chain
from types import MappingProxyType
from typing import NamedTuple

from thinwire.contract.places import Room
from thinwire.contract.projects import DEFAULT, whose_limits

PATIENCE_S = 300.0
RISES_S = 360.0
"""An hour makes up for the ten points between low and normal, and between normal and high."""
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
    project: str = DEFAULT
    person: str | None = None

    @property
    def order(self) -> tuple[int, int, float, str]:
        """Who has the least is the first."""
        return -self.priority, self.arrival, self.created_at, self.id


class Served(NamedTuple):
    """Of the last job of a project that got places: when, which turn it was, and which the next one has.

    A job's turn is the next of its project, or the newest turn of all where that is later, so that who has not asked
    for long has nothing saved up. The next comes later by the job's share of the cluster for its project's weight.
    """

    at: float = 0.0
    turn: float = 0.0
    next_turn: float = 0.0


@dataclass(frozen=True, slots=True)
class Share:
    """What is said of a project. running, running_of_one: how many of its jobs may have places at once, and of one
    person's; None: however many. served: as it was left by the last job of it that got places.
    """

    weight: float = 1.0
    served: Served = field(default_factory=Served)
    running: int | None = None
    running_of_one: int | None = None


@dataclass(frozen=True, slots=True)
class Waits:
    """A job that waits. free, total: places of its kind. never: the cluster, as it is, has too few. starts_at: when all
    that it needs will be free; None where that is not known. held: why it may not start whatever is free.
    """

    claim: Claim
    free: int
    total: int
    never: bool
    starts_at: float | None = None
    held: str | None = None


@dataclass(frozen=True, slots=True)
class Grants:
    """The places of each job that has some, and who waits, the next first. back: who is to give its places back.
    served: of the projects whose jobs have places that had none.
    """

    places: dict[str, int]
    waiting: tuple[Waits, ...]
    back: Claim | None = None
    served: Mapping[str, Served] = field(default_factory=dict)


class _Free:
    def __init__(self, room: Room) -> None:
        self.cpus, self.gpus = room.cpus - room.others_cpus, room.gpus - room.others_gpus

    def of(self, claim: Claim) -> int:
        return max(0, min(self.cpus, self.gpus) if claim.gpus else self.cpus) // claim.each

    def take(self, claim: Claim, places: int) -> None:
        self.cpus -= places * claim.each
        self.gpus -= places * claim.each if claim.gpus else 0


NO_SHARES: Mapping[str, Share] = MappingProxyType({})


@dataclass(slots=True)
class _Used:
    """What the jobs of a project have: CPUs and GPUs, and how many jobs; and those of each person. order: which of this
    look was served last.
    """

    share: Share
    served: Served
    order: int = 0
    cpus: int = 0
    gpus: int = 0
    jobs: int = 0
    of: Counter[str | None] = field(default_factory=Counter)

    def add(self, claim: Claim, places: int, *, new: bool) -> None:
        self.cpus += places * claim.each
        self.gpus += places * claim.each if claim.gpus else 0
        self.jobs += new
        self.of[claim.person] += new

    def of_room(self, room: Room) -> float:
        """Its share of the cluster for its weight, by the resource that it uses most of."""
        return _share(room, self.cpus, self.gpus) / self.share.weight

    def held(self, claim: Claim) -> str | None:
        """Why one more of its jobs may not start; None where it may."""
        most, of_one = self.share.running, self.share.running_of_one
        if most is not None and self.jobs >= most:
            return f"{whose_limits(claim.project, None)} has {self.jobs} of {most} running_jobs"
        if of_one is not None and claim.person is not None and self.of[claim.person] >= of_one:
            return f"{whose_limits(claim.project, claim.person)} has {self.of[claim.person]} of {of_one} running_jobs"
        return None


def _share(room: Room, cpus: int, gpus: int) -> float:
    return max(cpus / max(1, room.cpus), gpus / max(1, room.gpus))


class _Turns:
    """The jobs that wait, one after the other, the next first; `took` says of one that it has got places."""

    def __init__(self, room: Room, used: dict[str, _Used], newest: float, waiting: Sequence[Claim], now: float) -> None:
        """used: modified. newest: the latest turn that any project has had."""
        self._room, self._used, self._now, self.newest = room, used, now, newest
        self.served: set[str] = set()
        self._count = max((one.order for one in used.values()), default=0)
        by_project: dict[str, list[Claim]] = {}
        for claim in waiting:
            by_project.setdefault(claim.project, []).append(claim)
        self._queues = {name: deque(sorted(jobs, key=self._in_project)) for name, jobs in by_project.items()}
        least = min((used[name].of_room(room) for name in by_project), default=0.0)
        self._risen = {
            name: self._points(max(used[name].served.at, self._since(jobs[0])))
            if used[name].of_room(room) <= least
            else 0
            for name, jobs in self._queues.items()
        }

    def __iter__(self) -> Iterator[Claim]:
        heap = [(self._key(name), name) for name in self._queues]  # a project's key changes by its own jobs alone
        heapify(heap)
        while len(heap) > 1:
            _, name = heappop(heap)
            yield self._queues[name].popleft()
            if self._queues[name]:
                heappush(heap, (self._key(name), name))
        for _, name in heap:
            yield from self._queues[name]

    def took(self, claim: Claim, places: int, *, new: bool) -> None:
        """It has so many places more. new: it had none."""
        used = self._used[claim.project]
        used.add(claim, places, new=new)
        if new:
            turn = max(self.newest, used.served.next_turn)
            cost = _share(self._room, places * claim.each, places * claim.each if claim.gpus else 0) / used.share.weight
            used.served = Served(self._now, turn, round(turn + cost, 9))  # or equal ones would differ by an error
            self._count += 1
            used.order, self.newest = self._count, turn
            self.served.add(claim.project)

    def _key(self, name: str) -> tuple[object, ...]:
        used, head = self._used[name], self._queues[name][0]
        share, served = used.of_room(self._room), used.served
        return -head.priority - self._risen[name], share, served.next_turn, served.at, used.order, head.order

    def _in_project(self, claim: Claim) -> tuple[object, ...]:
        return -claim.priority - self._points(self._since(claim)), claim.order[1:]

    def _since(self, claim: Claim) -> float:
        return self._now if claim.queued_at is None else claim.queued_at

    def _points(self, since: float) -> int:
        return int(max(0.0, self._now - since) // RISES_S)


def grant(room: Room, claims: Sequence[Claim], now: float, shares: Mapping[str, Share] = NO_SHARES) -> Grants:
    """What each job may have now. room: what the cluster has. now: unix seconds, as in the claims. shares: of projects;
    of one that is not named, as of a new one.
    """
    free = _Free(room)
    places: dict[str, int] = {}
    for claim in claims:
        if claim.granted is not None:
            places[claim.id] = min(claim.granted, claim.most)
            free.take(claim, max(places[claim.id], claim.living))
    back = _back(room, free, claims, now)
    in_order = sorted(claims, key=lambda claim: claim.order)
    used = _used(claims, places, shares)
    newest = max((one.served.turn for one in shares.values()), default=0.0)
    raised = [one for one in in_order if one.waits and one.id in places and one.least > places[one.id]]
    turns = _Turns(room, used, newest, [one for one in claims if one.waits and one.id not in places], now)
    waiting: list[Waits] = []
    wanted, left = False, copy(free)  # left: without what is kept for those that have waited for long
    for claim in chain(raised, turns):
        is_new = claim.id not in places
        missing = claim.least - places.get(claim.id, 0)
        held = used[claim.project].held(claim) if is_new else None
        if held is None and missing <= left.of(claim):
            places[claim.id] = claim.least
            free.take(claim, missing)
            left.take(claim, missing)
            turns.took(claim, missing, new=is_new)
            continue
        total = _total(room, claim)
        never = claim.least > total
        wanted |= not never and held is None
        if is_new:
            waiting.append(Waits(claim, 0, total, never, held=held))
            if not never and held is None and claim.queued_at is not None and now - claim.queued_at >= PATIENCE_S:
                left.take(claim, missing)
    if not wanted:
        had = {one.id for one in claims if one.granted is not None}
        growing = [one for one in in_order if one.id in places and one.grows]
        _grow(free, sorted(growing, key=lambda one: one.id not in had), places)
    served = {name: used[name].served for name in turns.served}
    waiting = _as_it_will_be(room, used, turns.newest, waiting, now)
    starts = _starts(free, [(one, places[one.id]) for one in claims if one.id in places], waiting, now)
    waits = [replace(one, free=free.of(one.claim), starts_at=starts.get(one.claim.id)) for one in waiting]
    return Grants(places, tuple(waits), back, served)


def _used(claims: Sequence[Claim], places: dict[str, int], shares: Mapping[str, Share]) -> dict[str, _Used]:
    """What each project has, of those of which there are jobs."""
    found: dict[str, _Used] = {}
    for claim in claims:
        if claim.project not in found:
            share = shares.get(claim.project, Share())
            found[claim.project] = _Used(share, share.served)
        if claim.id in places:
            found[claim.project].add(claim, places[claim.id], new=True)
    return found


def _as_it_will_be(room: Room, used: dict[str, _Used], newest: float, waiting: list[Waits], now: float) -> list[Waits]:
    """In the order in which they start, if none that has places ends before: each that starts is then counted. used:
    modified.
    """
    if len({one.claim.project for one in waiting}) < 2:
        return waiting
    by_id = {one.claim.id: one for one in waiting}
    turns = _Turns(room, used, newest, [one.claim for one in waiting], now)
    found = []
    for claim in turns:
        found.append(by_id[claim.id])
        if not by_id[claim.id].never and by_id[claim.id].held is None:
            turns.took(claim, claim.least, new=True)
    return found


def _starts(free: _Free, holding: list[tuple[Claim, int]], waiting: list[Waits], now: float) -> dict[str, float]:
    """When those that wait find all of their places free, by id; without those of whom it is not known."""
    ends = sorted((max(now, one.over_at), one.id, one, held) for one, held in holding if one.over_at is not None)
    found: dict[str, float] = {}
    taken = copy(free)  # by those before it
    for waits in waiting:
        if waits.never or waits.held is not None:
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
