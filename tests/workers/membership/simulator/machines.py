"""Machines with clocks of their own, and processes that are killed, stopped and woken.

A stopped process does nothing: what would have happened in it waits. When it is woken its threads go on in any order,
each of them where it was.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from tests.workers.membership.simulator.clockwork import Call, Clockwork


@dataclass
class Machine:
    """rate: of its clocks, against true time. wall_s: what its clock of the day is wrong by.

    asleep: suspended; no process runs, no packet is answered, and its monotonic clock stands. There is one clock that
    does not: CLOCK_BOOTTIME.
    """

    clockwork: Clockwork
    name: str
    rate: float = 1.0
    wall_s: float = 0.0
    asleep: bool = False
    powered: bool = True
    _slept_s: float = 0.0
    _asleep_since: float = 0.0

    def boottime(self) -> float:
        """Seconds, also while it is suspended."""
        return 1000.0 + self.rate * self.clockwork.now

    def monotonic(self) -> float:
        """Seconds, without those in which it was suspended."""
        slept_s = self._slept_s + (self.clockwork.now - self._asleep_since if self.asleep else 0.0)
        return 1000.0 + self.rate * (self.clockwork.now - slept_s)

    def wall(self) -> float:
        """The clock of the day."""
        return 1.7e9 + self.wall_s + self.rate * self.clockwork.now

    def sleep(self) -> None:
        """Suspend it."""
        if not self.asleep:
            self.asleep, self._asleep_since = True, self.clockwork.now

    def resume(self) -> None:
        """Wake it up."""
        if self.asleep:
            self._slept_s += self.clockwork.now - self._asleep_since
            self.asleep = False


class Process:
    """Something that runs on a machine, in named threads."""

    def __init__(self, machine: Machine, name: str) -> None:
        self.machine, self.name = machine, name
        self.alive = True
        self._stops = 0
        self._waiting: list[tuple[str, Call]] = []
        self.at_death: list[Call] = []

    @property
    def stopped(self) -> bool:
        return self._stops > 0

    def do(self, thread: str, call: Call) -> None:
        """Now, or when it is woken; never once it is dead."""
        if not self.alive:
            return
        if self._stops:
            self._waiting.append((thread, call))
        else:
            call()

    def after(self, seconds: float, thread: str, call: Call) -> None:
        """After so many seconds of its clock."""
        self.machine.clockwork.after(seconds / self.machine.rate, lambda: self.do(thread, call))

    def stop(self) -> None:
        """SIGSTOP, or its machine is suspended."""
        self._stops += 1

    def wake(self) -> None:
        """SIGCONT."""
        self._stops -= 1
        if self._stops or not self.alive:
            return
        threads: dict[str, deque[Call]] = {}
        for thread, call in self._waiting:
            threads.setdefault(thread, deque()).append(call)
        self._waiting = []
        while threads:
            thread = self.machine.clockwork.chance.choice(list(threads))
            call = threads[thread].popleft()
            if not threads[thread]:
                del threads[thread]
            self.do(thread, call)

    def kill(self) -> None:
        """SIGKILL, or its own end."""
        if self.alive:
            self.alive = False
            self._waiting = []
            for call in self.at_death:
                call()


Say = Callable[[str, str], None]
"""Who, and what: for the timeline."""
