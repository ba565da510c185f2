"""The process of the membership server: the real Rules, with what server.py does around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.workers.membership.simulator.machines import Process
from tests.workers.membership.simulator.network import Connection, How, Side
from thinwire.workers.membership import messages as m
from thinwire.workers.membership.attendance import Close, Happened, Keep, Send, Timing
from thinwire.workers.membership.rules import Rules

if TYPE_CHECKING:
    from tests.workers.membership.simulator.job import Job


class Server(Process):
    """From its start to its death. Another one knows only what the job's key-value store has kept."""

    def __init__(self, job: Job, rules: Callable[..., Rules], timing: Timing, after: int) -> None:
        super().__init__(job.head, "server")
        self._job = job
        self.rules = rules(job.limits, timing, self.machine.monotonic(), after=after)
        self._outboxes: dict[str, tuple[Connection, Side]] = {}
        self._tick()

    def now(self) -> float:
        """The clock that the rules are told."""
        return self.machine.monotonic()

    def accept(self, connection: Connection) -> None:
        """A worker has connected."""
        side = connection.server
        side.heard = lambda message: self._meet(connection, side, message)

    def connected(self, id: str) -> bool:
        """Is it here?"""
        return id in self._outboxes

    @property
    def num_connected(self) -> int:
        return len(self._outboxes)

    def _meet(self, connection: Connection, side: Side, hello: m.Hello) -> None:
        id = hello.identity.id
        refusal = self.rules.hello(hello.identity, hello.seated, self.now())
        if refusal is None:
            if before := self._outboxes.get(id):
                before[0].close(before[1])
            self._outboxes[id] = (connection, side)
            side.heard = lambda message: self._hear(id, side, message)
            side.ended = lambda why, how: self._gone(id, side, why, how)
        self.do_effects()
        if refusal is not None:
            self._job.laws.told(id, refusal)
            self._write(connection, side, refusal)
            connection.close(side)

    def _hear(self, id: str, side: Side, message: Any) -> None:
        if id not in self._outboxes or self._outboxes[id][1] is not side:
            return
        self._job.laws.server_heard(id)
        self.rules.heard(id, message, self.now())
        self.do_effects()

    def _gone(self, id: str, side: Side, why: str, how: How) -> None:
        if id in self._outboxes and self._outboxes[id][1] is side:
            del self._outboxes[id]
            rules = self.rules
            {"closed": rules.gone, "reset": rules.reset, "timed out": rules.cut}[how](id, why, self.now())
            self.do_effects()

    def do_effects(self) -> None:
        """What the rules ask for."""
        for effect in self.rules.take():
            match effect:
                case Send(to, message):
                    if isinstance(message, m.Seating):
                        self._job.laws.seated(message, to)
                    elif isinstance(message, m.Refusal):
                        self._job.laws.told(to, message)
                    if to in self._outboxes:
                        self._write(*self._outboxes[to], message)
                case Close(id):
                    if outbox := self._outboxes.pop(id, None):
                        outbox[0].close(outbox[1])
                case Keep():
                    self._job.kept = effect
                case Happened():
                    self._job.happened(effect)

    def _write(self, connection: Connection, side: Side, message: Any) -> None:
        if side.is_open:  # else its end is still to be read
            connection.send(side, message)

    def _tick(self) -> None:
        self.rules.tick(self.now())
        self.do_effects()
        self.after(self._job.settings.tick_s, "clock", self._tick)
