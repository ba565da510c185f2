"""What is carried between machines, and what is not: directions that are cut, and TCP's own time-outs.

A direction between two machines is up or down. What is sent over one that is down waits, as TCP sends it again, and
arrives after the heal; unless one side has given the connection up before, after USER_TIMEOUT_S without an
acknowledgement. Then that side alone knows. The other learns it when it sends something and is answered by a reset.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Literal

from tests.workers.membership.simulator.clockwork import Call, Clockwork
from tests.workers.membership.simulator.machines import Machine, Process

USER_TIMEOUT_S = 10.0
"""TCP_USER_TIMEOUT of both sides (messages.py)."""
_END = object()


How = Literal["closed", "reset", "timed out"]
"""How a connection ends: the peer has closed it, or its system knows of no such connection; or nothing came through."""


class Network:
    """Which directions are up. delay_s: the longest that a packet takes."""

    def __init__(self, clockwork: Clockwork) -> None:
        self._clockwork = clockwork
        self._cuts: dict[tuple[str, str], int] = {}
        self._changed: list[Callable[[], bool]] = []
        self.delay_s = 0.02

    def cut(self, source: Machine | None, target: Machine | None) -> None:
        """One direction; None stands for all machines, also those that are yet to come. Cuts add up."""
        way = (source.name if source else "", target.name if target else "")
        self._cuts[way] = self._cuts.get(way, 0) + 1

    def heal(self, source: Machine | None, target: Machine | None) -> None:
        """Take one cut away."""
        self._cuts[source.name if source else "", target.name if target else ""] -= 1
        self.changed()

    def up(self, source: Machine, target: Machine) -> bool:
        """Does a packet arrive?"""
        if not (source.powered and target.powered) or source.asleep or target.asleep:
            return False
        cuts, ways = self._cuts, ((source.name, target.name), (source.name, ""), ("", target.name))
        return source is target or not cuts or not any(cuts.get(way) for way in ways)

    def both(self, one: Machine, other: Machine) -> bool:
        """Do packets and their acknowledgements arrive?"""
        return self.up(one, other) and self.up(other, one)

    def delay(self) -> float:
        """Of one packet."""
        return self._clockwork.chance.uniform(0.001, self.delay_s)

    def carry(self, source: Process, target: Process, message: Any) -> float:
        """How long this message, or the end of a connection, takes between a worker and the server."""
        return self.delay()

    def watch(self, call: Callable[[], bool]) -> None:
        """Call it at each heal, until it answers False."""
        self._changed.append(call)

    def changed(self) -> None:
        """A direction may be up that was down: what waits goes on."""
        watching, self._changed = self._changed, []
        self._changed = [call for call in watching if call()] + self._changed


class Stream:
    """One direction of a connection between two workers. It never gives up: a collective has a time-out of its own."""

    def __init__(self, network: Network, clockwork: Clockwork, source: Process, target: Process) -> None:
        self._network, self._clockwork = network, clockwork
        self._source, self._target = source, target
        self._queue: deque[Call] = deque()
        self._moving = False

    def send(self, deliver: Call) -> None:
        """Have it called in the target, after what was sent before."""
        self._queue.append(deliver)
        if not self._moving:
            self._move()

    def _move(self) -> None:
        if not self._queue:
            return
        if self._network.up(self._source.machine, self._target.machine):
            self._moving = True
            self._clockwork.after(self._network.delay(), self._arrive)
        else:
            self._network.watch(self._again)

    def _again(self) -> bool:
        if not self._moving and self._queue and self._network.up(self._source.machine, self._target.machine):
            self._move()
        return bool(self._queue) and not self._moving

    def _arrive(self) -> None:
        self._moving = False
        if self._network.up(self._source.machine, self._target.machine):
            self._target.do("train", self._queue.popleft())
        self._move()


class Side:
    """One end of a connection with the membership. heard and ended are called in its process."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.heard: Callable[[Any], None] = lambda message: None
        self.ended: Callable[[str, How], None] = lambda why, how: None
        self.is_open = True
        self.closed = False
        """By this side itself, which hears nothing more then."""
        self.queue: deque[Any] = deque()
        self.moving = False
        self.watching = False
        self.unacknowledged_since: float | None = None
        self.other: Side


class Connection:
    """Messages arrive in the order in which they were sent, or not at all."""

    def __init__(self, network: Network, clockwork: Clockwork, client: Process, server: Process) -> None:
        self._network, self._clockwork = network, clockwork
        self.client, self.server = Side(client), Side(server)
        self.client.other, self.server.other = self.server, self.client
        for side in (self.client, self.server):
            side.process.at_death.append(lambda side=side: self._died(side))

    def send(self, side: Side, message: Any) -> None:
        """Raises: OSError where this side knows of the end."""
        if not side.is_open:
            raise OSError("broken pipe")
        side.queue.append(message)
        self._move(side)

    def close(self, side: Side) -> None:
        """This side ends it; what was sent before still arrives."""
        if side.is_open:
            side.is_open, side.closed = False, True
            side.queue.append(_END)
            self._move(side)

    def reset(self, side: Side, why: str) -> None:
        """Something between the two has ended it for this side."""
        self._end(side, why, "reset")

    def _died(self, side: Side) -> None:
        if side.process.machine.powered:
            self.close(side)
        elif side.is_open:  # nobody says anything
            side.is_open = False
            side.queue.clear()

    def _end(self, side: Side, why: str, how: How) -> None:
        if side.is_open:
            side.is_open = False
            side.process.do("read", lambda: side.ended(why, how))
        side.queue.clear()

    def _move(self, side: Side) -> None:
        if side.moving or not side.queue:
            return
        if self._network.up(side.process.machine, side.other.process.machine):
            side.moving = True
            carried_s = self._network.carry(side.process, side.other.process, side.queue[0])
            self._clockwork.after(carried_s, lambda: self._arrive(side))
        else:
            self._unacknowledged(side)

    def _arrive(self, side: Side) -> None:
        side.moving = False
        here, there = side.process.machine, side.other.process.machine
        if not self._network.up(here, there):
            self._unacknowledged(side)
            return
        if not side.queue:
            return
        message = side.queue.popleft()
        back = self._network.up(there, here)
        if side.other.is_open:
            if message is _END:
                self._end(side.other, "its connection ended", "closed")
            else:
                side.other.process.do("read", lambda: self._hear(side.other, message))
        elif message is not _END and back:
            self._end(side, "its connection broke: Connection reset by peer", "reset")
        if not back:
            self._unacknowledged(side)
        self._move(side)

    def _hear(self, side: Side, message: Any) -> None:
        if not side.closed:
            side.heard(message)

    def _unacknowledged(self, side: Side) -> None:
        if side.unacknowledged_since is None:
            since = side.unacknowledged_since = self._clockwork.now
            patience_s = USER_TIMEOUT_S + self._clockwork.chance.uniform(0.0, 3.0)
            self._clockwork.after(patience_s, lambda: self._give_up(side, since))
        if not side.watching:
            side.watching = True
            self._network.watch(lambda: self._again(side))

    def _give_up(self, side: Side, since: float) -> None:
        if side.unacknowledged_since == since:
            self._end(side, "its connection broke: Connection timed out", "timed out")

    def _again(self, side: Side) -> bool:
        here, there = side.process.machine, side.other.process.machine
        if self._network.both(here, there):
            side.unacknowledged_since, side.watching = None, False
            pause_s = self._clockwork.chance.uniform(0.0, 1.0)  # until TCP tries again
            self._clockwork.after(pause_s, lambda: self._move(side))
            return False
        if self._network.up(here, there):
            self._move(side)
        return True
