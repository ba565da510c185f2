"""One rank of a case: makes the methods, lets them take turns, and says on stdout what each turn took.

    python -m benchmarks.wire.child '{"load": "gpt-10m", "methods": [...], ...}'      with RANK, WORLD_SIZE, MASTER_*

A round is one turn of each method: a step, or so many that they fill turn_s. All ranks begin a step together, after a
barrier outside the clock, for what they made their arguments in differs. A turn that raises on any rank drops its
method on all of them, and the others go on: each family has a process group of its own.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import sys
import time
import traceback
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.marked_lines import tell
from benchmarks.wire.cases import LOADS
from benchmarks.wire.loads import Inputs
from benchmarks.wire.methods import COMPUTE, Family, Method, Setting, known, maker
from benchmarks.wire.phases import PhaseClock

COUNTED_ROUNDS = 2
"""The parent reads the frame counters around every turn of so many rounds."""
ANSWER_S = 30.0
MOST_ROUNDS_A_TURN = 10


@dataclass(frozen=True, slots=True)
class Orders:
    """What the parent wants. budget_s: no round begins after so long, but for the fewest. timeout_s: of a collective.

    turn_s: a turn has more steps than one where these take less.
    answers: a folder in which the parent makes a file for each request to read the counters; None: it reads none.
    """

    load: str
    methods: list[str]
    budget_s: float
    fewest_rounds: int
    most_rounds: int
    turn_s: float
    timeout_s: float
    answers: str | None
    plugins: tuple[str, ...] = ()


class _PeerFailed(Exception):
    """A peer has told that its step raised."""


class Rank:
    """This process among its peers. Its control group has no part in what is measured."""

    def __init__(self, orders: Orders) -> None:
        self.orders = orders
        dist.init_process_group("gloo", timeout=timedelta(seconds=2 * orders.timeout_s + 60))
        self.rank = dist.get_rank()
        self.clock = PhaseClock()
        self.load = LOADS[orders.load]
        self.inputs = Inputs(self.load, self.rank)
        self.families: dict[str, Family] = {}
        self._rounds_a_turn: dict[str, int] = {}
        self._requests = 0

    def say(self, kind: str, **values: Any) -> None:
        """One line to the parent."""
        tell(kind=kind, rank=self.rank, **values)

    def all_well(self, error: str | None) -> bool:
        """Has no rank an error? A barrier too. Raises RuntimeError where a peer is gone."""
        flag = torch.tensor(0 if error is None else 1)
        dist.all_reduce(flag)
        return int(flag) == 0

    def make(self, methods: list[Method]) -> list[Method]:
        """Make and settle all families. Returns the methods that can be run."""
        self.inputs.alike = True
        broken: set[str] = set()
        for method in methods:
            if method.family in self.families or method.family in broken:
                continue
            self.say("begin", method=method.name, what="set-up")
            error = None
            group = dist.new_group(timeout=timedelta(seconds=self.orders.timeout_s))
            try:
                family = maker(method.family)(Setting(self.load, group, self.clock))
                family.settle(self.inputs)
            except Exception as caught:  # noqa: BLE001 - told as the result of the method
                error = _told(caught)
            if self.all_well(error):
                self.families[method.family] = family
            else:
                broken.add(method.family)
                for lost in methods:
                    if lost.family == method.family:
                        self.say("failed", method=lost.name, error=error)
        self.inputs.alike = False
        return [method for method in methods if method.family not in broken]

    def turn(self, method: Method, round_number: int, counted: bool) -> bool:
        """One turn; round 0 and below are not counted. Returns whether it went well on every rank."""
        family = self.families[method.family]
        self.say("begin", method=method.name, what=f"round {round_number}")
        if counted:
            self._read_counters(method, round_number, "before")
        self.all_well(None)
        error, seconds, well = None, [], None
        sent_before = family.sent_bytes()
        self.clock.take()
        try:
            for arguments in self._arguments(family, method):
                began = time.perf_counter()
                family.step(arguments)
                seconds.append(time.perf_counter() - began)
        except _PeerFailed:
            well = False
        except Exception as caught:  # noqa: BLE001 - told as the result of the method
            error = _told(caught)
        phases = self.clock.take()
        well = self.all_well(error) if well is None else well
        if counted:
            self._read_counters(method, round_number, "after")
        if not well:
            self.say("failed", method=method.name, error=error)
        elif round_number <= 0:
            whole_s = torch.tensor(sum(seconds))
            dist.broadcast(whole_s, 0)
            rounds = round(self.orders.turn_s / float(whole_s))
            self._rounds_a_turn[method.name] = min(max(1, rounds), MOST_ROUNDS_A_TURN)
        else:
            sent = family.sent_bytes() - sent_before
            self.say("turn", method=method.name, round=round_number, seconds=seconds, phases=phases, sent_bytes=sent)
        return well

    def _arguments(self, family: Family, method: Method) -> Iterator[tuple[Any, ...]]:
        """Of each step of a turn, when all ranks have made theirs. Raises: _PeerFailed."""
        for _ in range(self._rounds_a_turn.get(method.name, 1)):
            for _ in range(family.use(method.variant)):
                arguments = self.inputs.next()
                if not self.all_well(None):
                    raise _PeerFailed
                yield arguments

    def go_on(self, wish: bool) -> bool:
        """What rank 0 wishes."""
        flag = torch.tensor(int(wish))
        dist.broadcast(flag, 0)
        return bool(flag)

    def check_families(self, methods: list[Method]) -> None:
        """Tell of each family: do all ranks hold the same bits after its last sync? Did it overlap?"""
        for family in dict.fromkeys(method.family for method in methods):
            parameters = self.families[family].parameters()
            checksum = 0
            for parameter in parameters:
                checksum = zlib.crc32(parameter.detach().view(-1).view(torch.uint8).numpy().data, checksum)
            low = torch.tensor([checksum, -checksum])
            dist.all_reduce(low, dist.ReduceOp.MIN)
            finite = all(bool(torch.isfinite(parameter).all()) for parameter in parameters)
            if self.rank == 0:
                equal, overlap = int(low[0]) == -int(low[1]), self.families[family].overlap
                size = getattr(self.families[family], "bucket_elements", None)
                self.say("family", family=family, equal=equal, finite=finite, overlap=overlap, bucket_elements=size)

    def _read_counters(self, method: Method, round_number: int, when: str) -> None:
        """Let the parent read the frame counters while nothing is on its way."""
        if self.orders.answers is None:
            return
        if self.rank == 0:
            self._requests += 1
            self.say("count", id=self._requests, method=method.name, round=round_number, when=when)
            answer = Path(self.orders.answers) / str(self._requests)
            until = time.monotonic() + ANSWER_S
            while not answer.exists():
                if time.monotonic() > until:
                    raise RuntimeError(f"the parent did not read the frame counters within {ANSWER_S:g} s")
                time.sleep(0.002)
        dist.barrier()


def run(orders: Orders) -> None:
    """All of it, for this rank."""
    for plugin in orders.plugins:
        import_module(plugin)
    rank = Rank(orders)
    methods = rank.make([known(name) for name in orders.methods])
    gc.collect()
    gc.disable()  # a collection of one rank in the middle of a turn would hold up all
    began = time.monotonic()
    methods = [method for method in methods if rank.turn(method, 0, counted=False)]
    warm_s = time.monotonic() - began
    # Where rounds are cheap one more: DDP has its buckets only from the second step.
    if rank.go_on(warm_s < orders.budget_s / 8):
        methods = [method for method in methods if rank.turn(method, -1, counted=False)]
    began = time.monotonic()
    done = 0
    while rank.go_on(
        bool([method for method in methods if method.name != COMPUTE])
        and done < orders.most_rounds
        and (done < orders.fewest_rounds or (time.monotonic() - began) * (done + 1) / done < orders.budget_s)
    ):
        done += 1
        first = done % max(len(methods), 1)  # nobody always comes after the same one
        well = {}
        for method in methods[first:] + methods[:first]:
            well[method.name] = rank.turn(method, done, counted=done <= COUNTED_ROUNDS)
        methods = [method for method in methods if well[method.name]]
        gc.collect()
        if rank.rank == 0:
            rank.say("round", round=done, seconds=time.monotonic() - began)
    rank.check_families(methods)
    rank.say("end", rounds=done)
    dist.barrier()


def _told(error: BaseException) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"[:2000]


def main() -> None:
    """Read the orders, run, leave."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a killed parent leaves nothing
    torch.set_num_threads(1)
    run(Orders(**json.loads(sys.argv[1])))
    sys.stdout.flush()
    # Process groups of dropped methods may hold threads that never end; all that is wanted has been said.
    os._exit(0)


def argument(orders: Orders) -> str:
    """The orders as the command line takes them."""
    return json.dumps(asdict(orders))


if __name__ == "__main__":
    main()
