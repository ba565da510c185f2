"""What does the membership of a job of n workers cost?

One process simulates them (tests/workers/membership/simulator): the real rules, the real state of each member, its
laws watched. Each case begins with n workers that train, and ends when all that are left have their seats:

    forming             n newcomers come within 0.1 s
    training            nothing happens for 10 s
    a death, ten        so many processes end at once
    server              the membership's process ends; another one, which knows nothing, takes its place after 1 s
    100 join            at once
    half                the job is resized to n / 2

Messages are counted as they are sent, with the bytes of their lines. Each host has a link of one rate in each
direction, on which messages wait for one another; a packet takes the latency. Simulated seconds hold no time of a
processor: that is measured, of the rules by themselves, and of the server's lines. What workers say to one another
while they form their group is not simulated, but for the time that it takes.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from tests.workers.membership.simulator.clockwork import Clockwork
from tests.workers.membership.simulator.group import Group
from tests.workers.membership.simulator.job import Job, Settings
from tests.workers.membership.simulator.machines import Process
from tests.workers.membership.simulator.network import Network
from tests.workers.membership.simulator.worker import Worker
from thinwire.workers.membership import messages as m
from thinwire.workers.membership.attendance import Effect
from thinwire.workers.membership.rules import Rules
from thinwire.workers.membership.seats import Identity, Limits, Seat

LATENCY_S, RATE_BIT = 0.0005, 1e9
STEP_S, TICK_S = 0.2, 0.05
MOST_S = 600.0
PAIR_S = 0.0004
"""Of processor time, for one peer, when a group forms (docs/elasticity.md)."""


class Meter:
    """What crossed since it was reset. Keys are names of hosts."""

    def __init__(self) -> None:
        self.sent: Counter[str] = Counter()
        self.received: Counter[str] = Counter()
        self.bytes_sent: Counter[str] = Counter()
        self.bytes_received: Counter[str] = Counter()
        self.kinds: Counter[str] = Counter()
        self.largest = 0
        self.rules_s = self.lines_s = 0.0


class Links(Network):
    """Every host has a link of so many bits a second in each direction; a packet takes latency_s."""

    def __init__(self, clockwork: Clockwork, latency_s: float, rate_bit: float) -> None:
        super().__init__(clockwork)
        self.meter = Meter()
        self._latency_s, self._byte_s = latency_s, 8 / rate_bit
        self._out: dict[str, float] = {}
        self._in: dict[str, float] = {}

    def delay(self) -> float:
        """Of one packet."""
        return self._latency_s

    def carry(self, source: Process, target: Process, message: Any) -> float:
        """In line behind what its host sends, and what the other receives."""
        size = self._counted(source, target, message) if isinstance(message, BaseModel) else 0
        now, here, there = self._clockwork.now, source.machine.name, target.machine.name
        begins = max(now, self._out.get(here, 0.0))
        self._out[here] = begins + size * self._byte_s
        arrives = max(begins + self._latency_s, self._in.get(there, 0.0)) + size * self._byte_s
        self._in[there] = arrives
        return arrives - now

    def _counted(self, source: Process, target: Process, message: Any) -> int:
        meter, from_server = self.meter, source.name == "server"
        began = time.thread_time()
        line = m.encoded(message)
        if not from_server:
            began = time.thread_time()
            m.from_member.validate_json(line)
        meter.lines_s += time.thread_time() - began
        size = len(line)
        here, there = source.machine.name, target.machine.name
        meter.sent[here] += 1
        meter.received[there] += 1
        meter.bytes_sent[here] += size
        meter.bytes_received[there] += size
        meter.kinds[message.kind] += 1
        meter.largest = max(meter.largest, size)
        return size


class Timed(Rules):
    """The rules, with a clock around each call from outside. meter: set by who reads it."""

    meter: Meter | None = None
    _depth = 0

    @contextmanager
    def _timed(self) -> Iterator[None]:
        self._depth += 1
        began = time.thread_time()
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth and self.meter is not None:
                self.meter.rules_s += time.thread_time() - began

    def take(self) -> list[Effect]:
        """As Rules."""
        with self._timed():
            return super().take()

    def hello(self, identity: Identity, seat: Seat | int | None, now: float) -> m.Refusal | None:
        """As Rules."""
        with self._timed():
            return super().hello(identity, seat, now)

    def heard(self, id: str, message: m.FromMember, now: float) -> None:
        """As Rules."""
        with self._timed():
            super().heard(id, message, now)

    def gone(self, id: str, why: str, now: float) -> None:
        """As Rules."""
        with self._timed():
            super().gone(id, why, now)

    def tick(self, now: float) -> None:
        """As Rules."""
        with self._timed():
            super().tick(now)

    def set_limits(self, limits: Limits, now: float) -> None:
        """As Rules."""
        with self._timed():
            super().set_limits(limits, now)


class Mesh(Group):
    """A group whose members all reach one another: what all give, all have at once. One event where Group has n^2."""

    def __init__(self, job: Many, seat: Seat) -> None:
        super().__init__(job, seat)
        self._many = job
        self._ended = False
        self._values: dict[int, dict[int, Any]] = {}

    def arrive(self, worker: Worker, rank: int) -> None:
        """The last that arrives forms it for all."""
        self.there[rank] = worker
        if len(self.there) == self.size:
            self._many.seated_at = self._many.clockwork.now
            self._many.clockwork.after(PAIR_S * self.size, self._formed)

    def unreachable(self, rank: int) -> dict[int, str]:
        """Nobody."""
        return {}

    def unreached(self, rank: int) -> set[int]:
        """Nobody."""
        return set()

    def send(self, rank: int, number: int, value: Any) -> None:
        """The last that gives its data completes it for all."""
        values = self._values.setdefault(number, {})
        values[rank] = value
        self._sent[self.ids[rank]] = number
        if len(values) == self.size:
            del self._values[number]
            self._soon(lambda worker: worker.collected(self, number, values))

    def leave(self, rank: int) -> None:
        """The first that leaves fails it for all."""
        if not self._ended:
            self._ended = True
            self._soon(lambda worker: worker.peer_ended(self))

    def _formed(self) -> None:
        self._many.formed = self
        self._all(lambda worker: worker.formed(self))

    def _soon(self, call: Callable[[Worker], None]) -> None:
        self._many.clockwork.after(self._many.network.delay(), lambda: self._all(call))

    def _all(self, call: Callable[[Worker], None]) -> None:
        for worker in self.there.values():
            worker.do("train", lambda worker=worker: call(worker))  # type: ignore[misc]


class Many(Job):
    """A job of n workers, without a fault that is not asked for. Raises: Broken."""

    group_type = Mesh

    def __init__(self, n: int, latency_s: float, rate_bit: float) -> None:
        super().__init__(n, Settings(rules=Timed, save_every=2**53, tick_s=TICK_S))
        self.network: Links = Links(self.clockwork, latency_s, rate_bit)
        self.limits = Limits(max(n // 2, 1), n)
        self.formed: Mesh | None = None
        self.seated_at = 0.0

    def start_server(self) -> None:
        """As Job, and measured."""
        super().start_server()
        assert self.server is not None
        assert isinstance(self.server.rules, Timed)
        self.server.rules.meter = self.network.meter

    def start(self, slots: range) -> None:
        """Newcomers, within 0.1 s. Each joins up to 1 s later."""
        for slot in slots:
            self.clockwork.after(self.chance.uniform(0.0, 0.1), lambda slot=slot: self._worker(slot))  # type: ignore[misc]

    def resize(self, limits: Limits) -> None:
        """As the driver asks the server."""
        self.limits, server = limits, self.server
        assert server is not None
        server.rules.set_limits(limits, server.now())
        server.do_effects()

    def until_formed(self, size: int) -> None:
        """Until a later generation of so many has its group. Raises: Stuck."""
        before = self.formed
        self._run(
            lambda: self.formed is not before and self.formed is not None and self.formed.size == size,
            f"a generation of {size}",
        )

    def until_back(self, size: int) -> None:
        """Until so many members are connected with the server, and it waits for nobody else."""
        self._run(self._all_back(size), f"{size} members at the new server")

    def pass_s(self, seconds: float) -> None:
        """Let time pass."""
        until = self.clockwork.now + seconds
        self.clockwork.run(lambda: self.clockwork.now >= until)

    def _all_back(self, size: int) -> Callable[[], bool]:
        def back() -> bool:
            server = self.server
            if server is None or not server.alive or server.num_connected < size:
                return False
            self.seated_at = self.clockwork.now
            return True

        return back

    def _run(self, until: Callable[[], bool], what: str) -> None:
        most = self.clockwork.now + MOST_S
        self.clockwork.run(lambda: until() or self.clockwork.now > most)
        if not until():
            raise Stuck(f"{what} did not come in {MOST_S:g} s: {self.server.rules.snapshot(0).status_text}")  # type: ignore[union-attr]

    def _worker(self, slot: int) -> None:
        super()._worker(slot)
        for worker in list(self.workers.values())[-1:]:
            worker.compute_s = STEP_S


class Stuck(Exception):
    """A case did not end."""


def _form(job: Many, n: int) -> None:
    job.start_server()
    job.start(range(n))
    job.until_formed(n)


def _train(job: Many, n: int) -> None:
    job.pass_s(10.0)
    job.seated_at = job.clockwork.now


def _die(count: int) -> Callable[[Many, int], None]:
    def die(job: Many, n: int) -> None:
        for worker in job.chance.sample(list(job.workers.values()), count):
            worker.kill()
        job.until_formed(n - count)

    return die


def _lose_server(job: Many, n: int) -> None:
    assert job.server is not None
    job.server.kill()
    job.clockwork.after(1.0, job.start_server)
    job.until_back(n)


def _join(count: int) -> Callable[[Many, int], None]:
    def join(job: Many, n: int) -> None:
        job.resize(Limits(job.limits.min, n + count))
        job.start(range(n, n + count))
        job.until_formed(n + count)

    return join


def _halve(job: Many, n: int) -> None:
    job.resize(Limits(1, n // 2))
    job.until_formed(n // 2)


@dataclass(frozen=True, slots=True)
class Case:
    """least: the fewest workers with which it means something."""

    act: Callable[[Many, int], None]
    least: int = 1


CASES = {
    "forming": Case(_form),
    "training": Case(_train),
    "a death": Case(_die(1), 2),
    "ten deaths": Case(_die(10), 20),
    "server": Case(_lose_server),
    "100 join": Case(_join(100)),
    "half": Case(_halve, 2),
}


def measure(name: str, n: int, latency_s: float = LATENCY_S, rate_bit: float = RATE_BIT) -> dict[str, Any]:
    """Of one case: messages and bytes of all and of the server, of the worker that has most, and seconds.

    Raises: Broken, Stuck.
    """
    job, case = Many(n, latency_s, rate_bit), CASES[name]
    if name != "forming":
        _form(job, n)
        job.pass_s(3.0)
    meter = job.network.meter = Meter()
    if job.server is not None:
        job.server.rules.meter = meter  # type: ignore[attr-defined]
    began, generation = job.clockwork.now, job.formed.generation if job.formed else 0
    gc.collect()
    case.act(job, n)
    head = job.head.name
    passed = meter.sent + meter.received
    passed_bytes = meter.bytes_sent + meter.bytes_received
    del passed[head]
    assert job.formed is not None
    return {
        "case": name,
        "n": n,
        "messages": meter.sent.total(),
        "bytes": meter.bytes_sent.total(),
        "server_sent_bytes": meter.bytes_sent[head],
        "server_received_bytes": meter.bytes_received[head],
        "worker_messages": max(passed.values()),
        "worker_bytes": max(count for host, count in passed_bytes.items() if host != head),
        "largest_bytes": meter.largest,
        "seconds": job.seated_at - began,
        "generations": job.formed.generation - generation,
        "rules_s": meter.rules_s,
        "lines_s": meter.lines_s,
        "kinds": dict(sorted(meter.kinds.items())),
    }


def exponent(sizes: list[int], values: list[float]) -> float:
    """The slope of a line through the logarithms, by least squares. Raises: ValueError for fewer than two sizes."""
    xs, ys = [math.log(n) for n in sizes], [math.log(max(value, 1e-9)) for value in values]
    return statistics.linear_regression(xs, ys).slope
