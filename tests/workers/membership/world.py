"""A world around the rules, without sockets or clocks: workers that join, step, answer, die and hang as they are told.

Every seat that is given is held against the laws when it is given. Messages to a worker wait until it reads.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from thinwire.workers.membership import Identity, Limits, Seat, Standing
from thinwire.workers.membership import messages as m
from thinwire.workers.membership.attendance import Close, Send, Timing
from thinwire.workers.membership.rules import Rules

TIMING = Timing(
    start_wait_s=2.0,
    beat_timeout_s=3.0,
    join_timeout_s=3.0,
    adopt_s=1.0,
    quiet_s=1.5,
    return_s=0.5,
    form_s=3.0,
    lease_s=6.0,
)


@dataclass
class Actor:
    identity: Identity
    inbox: deque[m.FromServer] = field(default_factory=deque)
    connected: bool = False
    hangs: bool = False
    ended: bool = False
    seat: Seat | None = None
    joining: Standing | None = None
    over: bool = False
    step: int = 0
    promise: m.Proposal | None = None
    confirmed: bool = False
    cut: bool = False
    of_old_server: bool = False
    refused: bool = False  # and may not have read it

    @property
    def stopped(self) -> bool:
        """It may not step: it joins, or is at a step to which it said yes."""
        return self.joining is not None or (self.promise is not None and self.step >= self.promise.step)


class World:
    def __init__(self, least: int, most: int) -> None:
        self.now = 0.0
        self.rules = Rules(Limits(least, most), TIMING, self.now)
        self.actors: list[Actor] = []
        self.seats: dict[int, tuple[str, ...]] = {}
        self.stops: dict[tuple[int, int], set[int]] = {}  # generation and proposal: where members stopped

    def living(self) -> list[Actor]:
        return [actor for actor in self.actors if not actor.ended]

    def come(self, slot: int) -> None:
        if any(actor.identity.slot == slot for actor in self.living()):
            return
        actor = Actor(Identity(f"id{len(self.actors)}", slot, "h", 1))
        self.actors.append(actor)
        self.connect(actor)

    def connect(self, actor: Actor) -> None:
        actor.connected = True
        refusal = self.rules.hello(actor.identity, actor.seat, self.now)
        self.deliver()
        if refusal is not None:
            blameless = not actor.refused and not actor.hangs
            assert not (refusal.verdict == "fenced" and blameless), f"a living member was left out: {refusal.why}"
            self.end(actor)
        elif actor.connected:
            if actor.seat is not None:
                self.rules.formed(actor.identity.id, actor.seat.generation, self.now)
            if actor.joining is not None:
                self.say_join(actor)

    def join(self, actor: Actor) -> None:
        """As a training loop does: as a newcomer, when it is over, or where it stopped as planned."""
        planned = actor.confirmed and actor.promise is not None and actor.step == actor.promise.step
        if actor.joining is not None or not (actor.seat is None or actor.over or planned):
            return
        if planned and actor.promise is not None and actor.seat is not None and not actor.over:
            stops = self.stops.setdefault((actor.seat.generation, actor.promise.number), set())
            stops.add(actor.step)
            assert len(stops) == 1
            if actor.promise.leaving:
                self.finish(actor)
                return
        generation, rank = (actor.seat.generation, actor.seat.rank) if actor.seat else (None, None)
        actor.joining = Standing(generation, rank, actor.step, actor.seat is not None)
        actor.promise = None
        if actor.connected:
            self.say_join(actor)

    def say_join(self, actor: Actor) -> None:
        assert actor.joining is not None
        self.rules.join(actor.identity.id, actor.seat.generation if actor.seat else 0, actor.joining, self.now)
        self.deliver()

    def take_step(self, actor: Actor) -> None:
        if actor.seat is None or actor.over or actor.hangs or actor.stopped:
            return
        actor.step += 1
        if actor.cut and actor.promise is not None and actor.step == actor.promise.step:
            actor.over = True

    def read(self, actor: Actor) -> None:
        """All that waits for it."""
        while actor.inbox and not actor.ended and not actor.hangs:
            message = actor.inbox.popleft()
            present = actor.seat.generation if actor.seat else 0
            match message:
                case m.Refusal():
                    self.end(actor)
                case m.Seating(seat=seat) if seat.generation > present:
                    self.sit(actor, seat)
                case m.LostPeer(generation=generation) | m.Over(generation=generation) if generation == present:
                    actor.over = True
                case m.Proposal():
                    yes = message.generation == present and actor.joining is None and actor.step < message.step
                    yes = yes and not actor.over and actor.promise is None
                    if yes:
                        actor.promise, actor.confirmed, actor.cut = message, False, False
                        actor.of_old_server = False
                    if actor.connected:
                        id = actor.identity.id
                        self.rules.answer(id, message.number, yes=yes, step=actor.step, now=self.now)
                        self.deliver()
                case m.Confirm() if actor.promise and not actor.cut and actor.promise.number == message.number:
                    actor.confirmed = True
                case m.Confirm():
                    assert actor.over or actor.joining is not None, "it was confirmed without a promise"
                case m.Cancel() if actor.promise and not actor.cut and actor.promise.number == message.number:
                    assert not actor.confirmed or actor.of_old_server
                    actor.promise = actor.promise if actor.confirmed else None

    def sit(self, actor: Actor, seat: Seat) -> None:
        actor.seat, actor.joining, actor.over = seat, None, False
        actor.promise, actor.confirmed, actor.cut = None, False, False
        actor.step = max(member.standing.step for member in seat.members)
        if actor.connected:
            self.rules.formed(actor.identity.id, seat.generation, self.now)

    def die(self, actor: Actor) -> None:
        if actor.connected:
            self.rules.gone(actor.identity.id, "it died", self.now)
        self.end(actor)
        self.deliver()

    def finish(self, actor: Actor) -> None:
        if actor.connected and actor.seat is not None:
            self.rules.finished_by(actor.identity.id, "finished", self.now)
        elif actor.connected:
            self.rules.gone(actor.identity.id, "its connection ended", self.now)
        self.end(actor)
        self.deliver()

    def end(self, actor: Actor) -> None:
        actor.ended, actor.connected = True, False
        actor.inbox.clear()

    def wait(self, seconds: float) -> None:
        """Time passes; whoever does not hang sends beats."""
        until = self.now + seconds
        while self.now < until:
            self.now += 0.25
            for actor in self.living():
                if actor.connected and not actor.hangs:
                    self.rules.beat(actor.identity.id, 1, actor.step, 0.1, self.now)
            self.rules.tick(self.now)
            self.deliver()

    def restart(self, first: int = 0) -> None:
        """The server is another one, with an empty memory. Those that do not hang come back."""
        self.rules = Rules(self.rules.limits, TIMING, self.now)
        for actor in self.living():
            actor.connected = False
            actor.inbox.clear()
            actor.of_old_server = True
            actor.cut = actor.cut or (actor.promise is not None and not actor.confirmed)
        back = [actor for actor in self.living() if not actor.hangs]
        # A seat that nobody who lives has heard of never was.
        self.seats = {a.seat.generation: self.seats[a.seat.generation] for a in back if a.seat}
        for actor in back[first:] + back[:first]:
            if not actor.connected and not actor.ended:
                self.connect(actor)

    def deliver(self) -> None:
        by_id = {actor.identity.id: actor for actor in self.actors}
        for effect in self.rules.take():
            match effect:
                case Send(to, message):
                    if by_id[to].connected:
                        by_id[to].inbox.append(message)
                    by_id[to].refused = by_id[to].refused or isinstance(message, m.Refusal)
                    if isinstance(message, m.Seating):
                        self.check(by_id[to], message.seat)
                case Close(id):
                    by_id[id].connected = False

    def check(self, actor: Actor, seat: Seat) -> None:
        """The laws of a seat."""
        ids = tuple(member.identity.id for member in seat.members)
        assert ids == self.seats.setdefault(seat.generation, ids), "two generations have one number"
        assert len(set(ids)) == len(ids) == seat.size, "a member has two seats"
        assert ids[seat.rank] == actor.identity.id, "ranks are places in the list of members"
        slots = [member.identity.slot for member in seat.members]
        assert len(set(slots)) == len(slots), "two members fill one slot"
        assert seat.lost == tuple(sorted(seat.lost, key=lambda gone: gone.rank))
        assert not {gone.id for gone in seat.lost} & set(ids), "a lost member is seated"
