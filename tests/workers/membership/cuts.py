"""Members and a server on a network that can be cut, on a clock of its own. No sockets, no threads, no waiting.

Each member is the real one without its threads (state.py), the server is its rules. A step is committed where all
members of a generation reach one another and each may commit. Every seat is held against the laws when it is given.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque

from thinwire.workers.membership import messages as m
from thinwire.workers.membership.attendance import Close, Happened, Keep, Send, Timing
from thinwire.workers.membership.commit_lease import CommitLease
from thinwire.workers.membership.rules import Rules
from thinwire.workers.membership.seats import Identity, Limits, Seat, Standing
from thinwire.workers.membership.state import Ended, State

TICK_S = 0.25
BEATS = 0.1
"""Of the time after which a worker is silent."""
GIVEN_UP_S = 10.0
"""After which both systems end a connection over which nothing comes through."""
TIMING = Timing(start_wait_s=2.0)


class Node:
    def __init__(self, net: Net, slot: int, signature: dict[str, str] | None = None, floor: int = 0) -> None:
        self.net = net
        self.slot = slot
        self.identity = Identity(f"id{len(net.nodes)}", slot, f"host{slot}", 100 + slot)
        self.state = State(self.identity, lambda: net.now)
        self.state.signature, self.state.floor = signature, floor
        self.state.lease = CommitLease((net.timing.lease_s - 1.0) / 1.05)
        self.inbox: deque[m.FromServer] = deque()
        self.side = 0
        self.alive, self.stopped, self.connected, self.forms = True, False, False, True
        self.hangs = False
        self.step = 0
        self.unheard_since: float | None = None
        self.beat_at = net.now - TICK_S * (len(net.nodes) % 4)  # they do not beat at one moment

    @property
    def id(self) -> str:
        return self.identity.id

    @property
    def generation(self) -> int:
        return self.state.seat.generation if self.state.seat else 0

    @property
    def trains(self) -> bool:
        state = self.state
        stops = state.ended is not None or state.over is not None or state.standing is not None
        stops = stops or self.step >= state.stop_at
        return self.alive and not self.stopped and not stops and state.seat is not None and state.formed

    def run(self) -> None:
        """One tick of its threads."""
        state = self.state
        if state.ended is not None:
            self.alive = False
            return
        reaches = self.side == self.net.server_side
        if self.connected and not reaches:
            self.unheard_since = self.unheard_since or self.net.now
            if self.net.now - self.unheard_since >= GIVEN_UP_S:
                self.connected = False
                state.cut()
                self.net.open.discard(self.id)
                self.net.rules.cut(self.id, "its connection broke: timed out", self.net.now)
        if reaches:
            self.unheard_since = None
            if not self.connected:
                refusal = self.net.rules.hello(self.identity, state.seat, self.net.now)
                self.inbox.clear()
                if refusal is not None:
                    self.net.refused.setdefault(self.id, refusal)
                    state.heard(refusal)
                    return
                self.connected = True
                self.net.open.add(self.id)
                self.net.deliver()
            while self.inbox:
                self.say(*state.heard(self.inbox.popleft()))
            if self.id not in self.net.open:
                self.connected = False
                state.cut()
        if self.net.now - self.beat_at >= BEATS * self.net.timing.beat_timeout_s:
            self.beat_at = self.net.now
            self.say(state.beat())
        if state.seat is not None and not state.formed and state.standing is None and self.forms:
            state.formed = True
            self.say(m.Formed(generation=state.seat.generation))
        if state.standing is None and state.over is None and self.step >= state.stop_at:
            self.stop()
        if not self.hangs and state.standing is None and (state.seat is None or state.over is not None):
            self.join()

    def stop(self) -> None:
        """At the step to which it said yes."""
        state, promise = self.state, self.state.promise
        assert promise is not None
        assert state.seat is not None
        if promise.cut:
            state.over = "nobody can tell whether the others were confirmed"
        elif promise.confirmed:
            at = self.net.stops.setdefault((state.seat.generation, promise.proposal.number), self.step)
            assert at == self.step, "members stop at two steps"
            if promise.proposal.leaving:
                self.finish()
            elif not self.hangs:
                self.join()

    def finish(self) -> None:
        """Leave at a clean end."""
        self.say(m.Goodbye(reason="finished", clean=True))
        with self.state.changed:
            self.state.left = True
            self.state.end(Ended("it has left"))
        self.net.kill(self)

    def join(self) -> None:
        state, seat = self.state, self.state.seat
        state.promise, state.stop_at = None, math.inf
        state.standing = Standing(
            *((seat.generation, seat.rank) if seat else (None, None)), self.step, seat is not None
        )
        self.say(state.join(state.standing))

    def say(self, *messages: m.FromMember) -> None:
        if self.side != self.net.server_side:
            return
        for message in messages:
            if not self.connected or self.id not in self.net.open:
                return
            self.net.rules.heard(self.id, message, self.net.now)
            self.net.deliver()


class Net:
    """`least` to `most` workers. commits: time, generation and slots of each step that was committed."""

    def __init__(self, least: int, most: int, timing: Timing = TIMING) -> None:
        self.now = 1000.0
        self.limits, self.timing = Limits(least, most), timing
        self.rules = Rules(self.limits, timing, self.now)
        self.server_side = 0
        self.nodes: list[Node] = []
        self.commits: list[tuple[float, int, tuple[int, ...]]] = []
        self.events: list[Happened] = []
        self.kept: list[Keep] = []
        self.open: set[str] = set()  # connections, at the server
        self.refused: dict[str, m.Refusal] = {}
        self.seats: dict[int, tuple[str, ...]] = {}
        self.stops: dict[tuple[int, int], int] = {}  # by generation and proposal

    def add(self, *slots: int, signature: dict[str, str] | None = None, floor: int = 0) -> list[Node]:
        new = []
        for slot in slots:
            new.append(Node(self, slot, signature, floor))
            self.nodes.append(new[-1])
        return new

    def formed(self, count: int) -> list[Node]:
        """`count` workers that train in generation 1."""
        nodes = self.add(*range(count))
        self.run(4.0)
        assert all(node.trains and node.generation == 1 for node in nodes)
        return nodes

    def cut(self, *nodes: Node, side: int = 1) -> None:
        """These are on this side of the network from now on."""
        for node in nodes:
            node.side = side

    def kill(self, *nodes: Node) -> None:
        """kill -9: the system of the process ends its connection."""
        for node in nodes:
            node.alive = False
            if node.id in self.open and node.side == self.server_side:
                self.end_connection(node)

    def end_connection(self, node: Node) -> None:
        """It, or its system, ends its connection. A process that lives gives up its lease before it does that."""
        node.state.give_up_lease()
        node.connected = False
        self.open.discard(node.id)
        self.rules.gone(node.id, "its connection ended", self.now)
        self.deliver()

    def restart(self, quiet_s: float | None = None) -> None:
        """Another server, that was told what was kept."""
        kept = self.kept[-1] if self.kept else Keep(0, True)
        if quiet_s is None:
            quiet_s = 0.0 if kept.vacant else self.timing.lease_s
        timing = dataclasses.replace(self.timing, quiet_s=quiet_s)
        self.rules = Rules(self.limits, timing, self.now, after=kept.generation)
        self.open.clear()
        for node in self.nodes:
            node.connected = False
            node.state.cut()

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now += TICK_S
            for node in self.nodes:
                if node.alive and not node.stopped:
                    node.run()
            self.rules.tick(self.now)
            self.deliver()
            self._train()

    def said(self, kind: str) -> list[Happened]:
        return [event for event in self.events if event.kind == kind]

    def committed(self, since: float) -> set[tuple[int, tuple[int, ...]]]:
        """Generations that have committed, and their slots."""
        return {(generation, slots) for at, generation, slots in self.commits if at > since}

    def deliver(self) -> None:
        by_id = {node.id: node for node in self.nodes}
        for effect in self.rules.take():
            match effect:
                case Send(to, message):
                    if isinstance(message, m.Seating):
                        self._check(message.seat, to)
                    elif isinstance(message, m.Refusal):
                        self.refused.setdefault(to, message)
                    if to in self.open:
                        by_id[to].inbox.append(message)
                case Close(id):
                    self.open.discard(id)
                case Happened():
                    self.events.append(effect)
                case Keep():
                    self.kept.append(effect)

    def _check(self, seat: Seat, to: str) -> None:
        """The laws of a seat."""
        ids = tuple(member.identity.id for member in seat.members)
        slots = {member.identity.slot for member in seat.members}
        assert ids == self.seats.setdefault(seat.generation, ids), "two generations have one number"
        assert ids[seat.rank] == to, "ranks are places in the list of members"
        assert len(slots) == len(set(ids)) == seat.size, "a member has two seats, or two fill one slot"
        assert seat.lost == tuple(sorted(seat.lost, key=lambda gone: gone.rank))
        assert not {gone.id for gone in seat.lost} & set(ids), "a lost member is seated"

    def _train(self) -> None:
        groups: dict[tuple[int, int], list[Node]] = {}
        for node in self.nodes:
            if node.trains and node.state.may_commit():
                groups.setdefault((node.generation, node.side), []).append(node)
        whole = []
        for (generation, _), nodes in groups.items():
            seat = nodes[0].state.seat
            assert seat is not None
            if len(nodes) == seat.size:
                whole.append(generation)
                step = max(node.step for node in nodes) + 1  # whoever is new is given the state
                for node in nodes:
                    node.step = node.state.step = step
                self.commits.append((self.now, generation, tuple(node.slot for node in nodes)))
        assert len(whole) <= 1, f"generations {whole} commit at once"
