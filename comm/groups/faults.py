"""A group that fails by a plan: to test code where a rank fails in the middle. Shipped for tests of your own.

    def work(group):
        faulty = FaultyGroup(group)
        reducer = flat_reducer(faulty, layout, codec, like)          # its own calls are not counted: not armed
        faulty.arm(Fault(ranks=(2,), collective="all_gather", call=3, what=What.LOSE))
        with pytest.raises(PeerLost): ...
    run_threads(3, work)

The two phases of an exchange are "all_to_all" and "all_gather", one call a bucket:

    before phase 1 of bucket k              Fault(ranks, "all_to_all", k)
    after phase 1 of bucket k               Fault(ranks, "all_to_all", k, When.AFTER)
    between the phases of bucket k          Fault(ranks, "all_gather", k)
    after phase 2, on some ranks only       Fault((0, 3), "all_gather", k, When.AFTER)

AFTER is after the collective's `wait`. A rank that fails leaves the group, where it can (ThreadGroup, TorchGroup), so
that its peers fail as well, in the collective they wait in. Both communicators, and parts of the group, count together.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from torch import Tensor

from thinwire.comm.calls import Calls, calls_of
from thinwire.comm.errors import PeerLost
from thinwire.comm.groups.nodes import Part, Parting
from thinwire.comm.groups.watching import Gate, await_device, before_abort, hold
from thinwire.comm.protocol import Group, Leavable, Pending, Stats, Uneven
from thinwire.comm.wire.link_classes import Box, Boxed


class When(Enum):
    """On which side of a collective."""

    BEFORE = "before"
    AFTER = "after"


class What(Enum):
    """What happens to the rank.

    LOSE: it leaves and raises PeerLost. ALONE: it raises PeerLost and tells nobody, so that its peers may finish. HANG:
    it sleeps, then leaves. KILL: its process is killed (all ranks of a ThreadGroup!). NAN: BEFORE, what it gives, and
    AFTER, what it gets, holds a NaN: element 0 of a float vector, the first value behind the 8-byte header of a row.
    """

    LOSE = "lose"
    ALONE = "alone"
    HANG = "hang"
    KILL = "kill"
    NAN = "nan"


@dataclass(frozen=True, slots=True)
class Fault:
    """On these ranks, at the call of this number (from 0, of this collective, since arming).

    collective: one of COLLECTIVES. hang_s: how long HANG sleeps.
    """

    ranks: tuple[int, ...]
    collective: str
    call: int = 0
    when: When = When.BEFORE
    what: What = What.LOSE
    hang_s: float = 3600.0

    def __post_init__(self) -> None:
        if self.collective not in COLLECTIVES:
            raise ValueError(f"collective = {self.collective!r}: must be one of {', '.join(COLLECTIVES)}")


COLLECTIVES = ("all_to_all", "all_to_all_v", "all_gather", "sum", "mean", "broadcast")


class Armed:
    """The faults that wait, and the calls that were made, of both communicators of one rank."""

    def __init__(self, faults: tuple[Fault, ...]) -> None:
        self._faults = faults
        self._calls: Counter[str] = Counter()
        self._lock = threading.Lock()  # each communicator may be used from a thread of its own

    def next_call(self, rank: int, collective: str) -> dict[When, Fault]:
        """Count a call; what is to happen around it."""
        with self._lock:
            call = self._calls[collective]
            self._calls[collective] += 1
        due = [f for f in self._faults if rank in f.ranks and (f.collective, f.call) == (collective, call)]
        return {fault.when: fault for fault in due}


class FaultyGroup:
    """A Group around another one, which fails by a plan. `faults`: as if armed at once."""

    def __init__(self, group: Group, *faults: Fault) -> None:
        self.rank, self.size = group.rank, group.size
        self._group = group
        self._armed = [Armed(faults)]  # in a list, which both communicators and all parts share
        self._at = group.rank
        """This rank in the whole group: by that faults name it."""
        self._second: FaultyGroup | None = None
        self._parts: dict[Part, FaultyGroup] = {}

    @property
    def stats(self) -> Stats:
        """Those of the group below."""
        return self._group.stats

    @property
    def calls(self) -> Calls:
        """Those of the group below."""
        return calls_of(self._group)

    def await_device(self, what: str, done: Callable[[], bool]) -> None:
        """As the group below, where collectives of that run on a GPU."""
        await_device(self._group, what, done)

    def before_abort(self, gate: Gate) -> None:
        """As the group below."""
        before_abort(self._group, gate)

    def arm(self, *faults: Fault) -> None:
        """Forget all earlier faults and count calls from here."""
        self._armed[0] = Armed(faults)

    def leave(self, reason: str = "it raised, or was stopped") -> None:
        """Leave the group below, where that is possible."""
        if isinstance(self._group, Leavable):
            self._group.leave(reason)

    def all_to_all(self, out_nB: Tensor, in_nB: Tensor) -> None:
        """As the group below."""
        self._run("all_to_all", out_nB, in_nB, self._group.start_all_to_all).wait()

    def all_gather(self, out_nB: Tensor, in_B: Tensor) -> None:
        """As the group below."""
        self._run("all_gather", out_nB, in_B, self._group.start_all_gather).wait()

    def mean_(self, x: Tensor) -> None:
        """As the group below."""
        self._run("mean", x, x, lambda out, _: self._group.mean_(out)).wait()

    def broadcast_(self, x: Tensor, src: int = 0) -> None:
        """As the group below."""
        self._run("broadcast", x, x, lambda out, _: self._group.broadcast_(out, src)).wait()

    def start_all_to_all(self, out_nB: Tensor, in_nB: Tensor) -> Pending:
        """As the group below."""
        return self._run("all_to_all", out_nB, in_nB, self._group.start_all_to_all)

    def start_all_to_all_v(
        self, out_B: Tensor, in_B: Tensor, of: Sequence[int], to: Sequence[int], num_bytes: int
    ) -> Pending:
        """As the group below. No fault of NAN: rows have no header."""
        assert isinstance(self._group, Uneven)
        below = self._group.start_all_to_all_v
        return self._run("all_to_all_v", out_B, in_B, lambda out, given: below(out, given, of, to, num_bytes))

    def start_all_gather(self, out_nB: Tensor, in_B: Tensor) -> Pending:
        """As the group below."""
        return self._run("all_gather", out_nB, in_B, self._group.start_all_gather)

    def start_sum_(self, x: Tensor) -> Pending:
        """As the group below."""
        return self._run("sum", x, x, lambda out, _: self._group.start_sum_(out))

    def second_communicator(self) -> FaultyGroup:
        """The second communicator of the group below, with the same faults and the same count of calls."""
        if self._second is None:
            below = self._group.second_communicator()
            self._second = self if below is self._group else FaultyGroup(below)
            self._second._armed, self._second._at = self._armed, self._at
        return self._second

    @property
    def box(self) -> Box | None:
        """That of the group below, where it was given one."""
        return self._group.box if isinstance(self._group, Boxed) else None

    def part(self, part: Part, ranks: Sequence[int]) -> FaultyGroup:
        """That of the group below, with the same faults and the same count of calls."""
        if part not in self._parts:
            assert isinstance(self._group, Parting)
            made = FaultyGroup(self._group.part(part, ranks))
            made._armed, made._at = self._armed, self._at
            self._parts[part] = made
        return self._parts[part]

    def _run(
        self, collective: str, out: Tensor, given: Tensor, start: Callable[[Tensor, Tensor], Pending | None]
    ) -> Pending:
        due = self._armed[0].next_call(self._at, collective)
        if When.BEFORE in due:
            given = self._happen(due[When.BEFORE], given if given is out else given.clone())
        pending = start(out, given)
        return FaultyPending(pending, given, out, lambda: self._after(due, out))

    def _after(self, due: dict[When, Fault], out: Tensor) -> None:
        if When.AFTER in due:
            self._happen(due[When.AFTER], out)

    def _happen(self, fault: Fault, tensor: Tensor) -> Tensor:
        if fault.what is What.NAN:
            return _with_nan(tensor)
        if fault.what is What.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        if fault.what is What.HANG:
            time.sleep(fault.hang_s)
        reason = f"injected {fault.when.value} {fault.collective} {fault.call}"
        if fault.what is not What.ALONE:
            self.leave(reason)
        raise PeerLost(f"rank {self._at}: {reason}", self._at)


class FaultyPending:
    """A Pending after whose wait something may happen, once."""

    def __init__(self, pending: Pending | None, given: Tensor, out: Tensor, after: Callable[[], None]) -> None:
        self._pending, self._after = pending, after
        self._tensors: tuple[Tensor, ...] = (given, out)  # a copy that was made for a fault lives until it was sent
        self._waited = False

    def wait(self) -> None:
        """As the Pending below. Raises: PeerLost."""
        if self._pending is not None:
            self._pending.wait()
        self._end()

    def hold(self) -> None:
        """As the Pending below. Raises: PeerLost."""
        if self._pending is not None:
            hold(self._pending)
        self._end()

    def _end(self) -> None:
        if not self._waited:
            self._waited, self._tensors = True, ()
            self._after()


def _with_nan(tensor: Tensor) -> Tensor:
    """A NaN into floats, or into rows of bytes: 0xff is one in every floating-point format."""
    if tensor.is_floating_point():
        tensor.view(-1)[0] = float("nan")
    else:
        tensor.view(-1, tensor.shape[-1])[:, 8:16] = 0xFF
    return tensor
