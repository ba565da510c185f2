"""Who is here, who has gone and why, and what has happened to the present generation; with what it takes to lose one.

An id that has gone is never taken again: `past` says what it is told when it comes back. What the rules ask the server
to do is left here as effects.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pydantic import JsonValue

from thinwire.workers.membership import messages as m
from thinwire.workers.membership import roster
from thinwire.workers.membership.messages import FromServer
from thinwire.workers.membership.plans import Plans
from thinwire.workers.membership.roster import Worker
from thinwire.workers.membership.seats import (
    LONGEST_REASON,
    Identity,
    Limits,
    LostMember,
    Seat,
    Seated,
    Snapshot,
    Status,
    worker_name,
)


@dataclass(frozen=True, slots=True)
class Timing:
    """How long the rules wait. quiet_s: no first generation closes earlier than this after the start of the server."""

    start_wait_s: float = 20.0
    beat_timeout_s: float = 10.0
    join_timeout_s: float = 10.0
    adopt_s: float = 5.0
    quiet_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Send:
    """Send this to that worker, after what was sent before."""

    to: str
    message: FromServer


@dataclass(frozen=True, slots=True)
class Close:
    """End the connection of that worker when all is sent."""

    id: str


@dataclass(frozen=True, slots=True)
class Happened:
    """For the log and the metrics."""

    kind: str
    generation: int
    fields: dict[str, JsonValue]


Effect = Send | Close | Happened


@dataclass(slots=True)
class Present:
    """The present generation: who was seated, and what has happened since.

    reason, lost_before: why it came to be. over: why it ends, where that is not planned. planned: the change that was
    confirmed; leaving: the ids of those that leave by it. at_end: a member has come to a clean end, and the others will
    too.
    """

    generation: int = 0
    seats: tuple[Seated, ...] = ()
    reason: str = ""
    lost_before: tuple[LostMember, ...] = ()
    lost: list[LostMember] = field(default_factory=list)
    over: str | None = None
    planned: str | None = None
    leaving: frozenset[str] = frozenset()
    regroup_since: float | None = None
    at_end: bool = False
    store: m.StoreAt | None = None

    def seating(self, rank: int) -> m.Seating:
        """What the member of this rank is told."""
        seat = Seat(self.generation, rank, len(self.seats), self.seats, self.reason, self.lost_before)
        return m.Seating(seat=seat)

    def news(self) -> list[m.FromServer]:
        """What a member that comes back has to hear."""
        heard: list[m.FromServer] = [self.lost_peer(gone) for gone in self.lost]
        if self.over is not None and not self.lost:
            heard.append(m.Over(generation=self.generation, why=self.over))
        return [*heard, *([self.store] if self.store else [])]

    def lost_peer(self, gone: LostMember) -> m.LostPeer:
        """What the others are told."""
        return m.LostPeer(generation=self.generation, rank=gone.rank, why=gone.why)


class Attendance:
    """The workers, and the effects that are to be taken."""

    def __init__(self) -> None:
        self.workers: dict[str, Worker] = {}
        self.awaited: dict[str, int] = {}
        """Ids and ranks of an adopted generation that have not come back yet."""
        self.unwanted: dict[str, str] = {}
        """Ids that are to leave, and why."""
        self.past: dict[str, m.Refusal] = {}
        self.plans = Plans()
        self.effects: list[Effect] = []
        self.present = Present()

    def members(self) -> list[Worker]:
        """The living of the present generation, by rank."""
        return roster.members(self.workers.values())

    def begin(self, present: Present) -> None:
        """Another generation is the present one, and nothing has happened to it."""
        self.present = present
        self.plans.reset()

    def say(self, kind: str, **fields: JsonValue) -> None:
        """For the log."""
        self.effects.append(Happened(kind, self.present.generation, fields))

    def send(self, id: str, message: m.FromServer) -> None:
        """To one worker."""
        self.effects.append(Send(id, message))

    def tell(self, message: m.FromServer, but: str | None = None) -> None:
        """To all members of the present generation."""
        for worker in self.members():
            if worker.identity.id != but:
                self.send(worker.identity.id, message)

    def cancel(self) -> None:
        """The open plan, if there is one, is none."""
        if plan := self.plans.open:
            self.plans.open = None
            self.say("cancelled", step=plan.step)
            self.tell(m.Cancel(number=plan.number))

    def remove(self, worker: Worker, past: m.Refusal) -> None:
        """It is gone, and when it comes back it is told why."""
        del self.workers[worker.identity.id]
        self.unwanted.pop(worker.identity.id, None)
        self.past[worker.identity.id] = past

    def dismiss(self, worker: Worker, why: str) -> None:
        """Send it away; it is not lost."""
        id = worker.identity.id
        refusal = m.Refusal(verdict="dismissed", why=why)
        self.effects += [Send(id, refusal), Close(id)]
        self.remove(worker, refusal)
        self.say("dismissed", slot=worker.identity.slot, id=id, rank=worker.rank, why=why)

    def lose(self, worker: Worker, why: str, kind: str, now: float) -> None:
        """It is gone without a clean goodbye."""
        who = worker.identity
        self.remove(worker, m.Refusal(verdict="fenced", why=f"it was counted as lost: {why}"))
        self.say(kind, slot=who.slot, id=who.id, rank=worker.rank, why=why)
        if worker.rank is not None:
            self._count_lost(who, worker.rank, why, now)

    def lose_awaited(self, id: str, why: str, now: float) -> None:
        """A member of an adopted generation does not come back."""
        rank = self.awaited.pop(id)
        who = self.present.seats[rank].identity
        self.past[id] = m.Refusal(verdict="fenced", why=f"it was counted as lost: {why}")
        self.say("lost", slot=who.slot, id=id, rank=rank, why=why)
        self._count_lost(who, rank, why, now)

    def fence(self, worker: Worker, why: str, now: float) -> None:
        """It may live, but the others go on without it."""
        self.send(worker.identity.id, m.Refusal(verdict="fenced", why=why))
        self.effects.append(Close(worker.identity.id))
        self.lose(worker, why, "fenced", now)

    def snapshot(self, limits: Limits, *, finished: bool, events: int) -> Snapshot:
        """All that people are told. events: how many there have been."""
        present, workers = self.members(), list(self.workers.values())
        joined = len(roster.seating(workers))
        status, text = self._status(limits, joined, finished=finished)
        steps = [w.step for w in present] or [seated.standing.step for seated in self.present.seats]
        return Snapshot(
            generation=self.present.generation,
            status=status,
            status_text=text,
            limits=limits,
            members=tuple(w.occupant() for w in present),
            waiting=tuple(w.occupant() for w in sorted(workers, key=lambda w: w.identity.slot) if w.rank is None),
            joined=joined,
            last_step=max(steps, default=0),
            events=events,
        )

    def _status(self, limits: Limits, num_joined: int, *, finished: bool) -> tuple[Status, str]:
        """One word, and one line."""
        generation, members, num_awaited = self.present.generation, self.members(), len(self.awaited)
        if finished:
            return "finished", f"finished in generation {generation}"
        if num_awaited:
            of = len(self.present.seats)
            return "regrouping", f"restarted; waiting for {num_awaited} of {of} workers to come back"
        if members and self.present.regroup_since is None:
            return "training", f"training with {len(members)} workers in generation {generation}"
        coming = sum(w.standing is None for w in members)
        if coming:
            return "regrouping", f"regrouping after generation {generation}: waiting for {coming} of {len(members)}"
        if num_joined < limits.min:
            return "waiting for workers", f"waiting for workers: {num_joined} of {limits.min}"
        return "forming", f"forming: {num_joined} of at most {limits.max} workers have come"

    def _count_lost(self, who: Identity, rank: int, why: str, now: float) -> None:
        present = self.present
        gone = LostMember(who.id, who.slot, rank, why[:LONGEST_REASON])
        present.lost.append(gone)
        present.over = present.over or f"worker {worker_name(who)} was lost: {why}"
        if present.regroup_since is None:
            present.regroup_since = now
        self.cancel()
        self.tell(present.lost_peer(gone))
