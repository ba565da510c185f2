"""The rank that the others wait for, step after step: each rank knows how long it waited for its exchange.

Nobody's clock is compared with another's: of a step's ranks the one that waited least came last. How long each waited
travels with the losses, in the one collective that averages them every few steps (step_log.py): 8 bytes a rank and
step, and nothing more is sent or waited for. So does how long each computed outside of optimizer.step(): it shows
whether the last one computed longer than the others by about as much as they waited, or no longer, and then came late
by what is not computing: its data, its link, other work on its cores.

    comes last      it computes longer, waits for its data, writes, or shares its cores: the others wait longer than it
    a slow link     all wait, the one behind that link as long as the others: nobody is named, for nobody came late
    a tie           within LEAST_SHARE of a step, or LEAST_S: nobody was waited for

Two that are equally late share the steps between them, and neither is named. The waits are those of the host: on a GPU
the host waits for its own device too, and nothing is said.
"""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.comm.protocol import Group
from thinwire.contract.figures import NAMED
from thinwire.workers.membership.seats import Seat

RECENT = 200
"""Steps that a share is of."""
LEAST_KNOWN = 50
"""So many steps before anybody is named."""
FORGIVEN = 0.35
"""Below it, it is said of a worker that was named that it is so no more."""
MOSTLY = 0.5
"""Of the wait: a rank that computes longer by so much is late because it computes."""
LEAST_SHARE, LEAST_S = 0.05, 1e-3
"""Of a step, and seconds: a rank that makes the others wait for less makes nobody wait."""


@dataclass(frozen=True, slots=True)
class Last:
    """The rank that came last to the exchange of a step, and how much longer the others waited (their median), seconds.

    computed_s: how much longer than the others (their median) it computed; None where that is not known of all.
    """

    rank: int
    seconds: float
    computed_s: float | None = None


def last_of(waits: Sequence[float], step_s: float, computed: Sequence[float] = ()) -> Last | None:
    """Of the seconds that each rank waited in one step; None for a tie, and for one rank alone.

    computed: the seconds that each computed; empty where they are not known of all.
    """
    if len(waits) < 2:
        return None
    rank = min(range(len(waits)), key=waits.__getitem__)
    seconds = -_more(waits, rank)
    if seconds <= max(LEAST_SHARE * step_s, LEAST_S):
        return None
    return Last(rank, seconds, _more(computed, rank) if computed else None)


def _more(values: Sequence[float], rank: int) -> float:
    """Of one rank, than the median of the others."""
    return values[rank] - statistics.median(value for other, value in enumerate(values) if other != rank)


@dataclass(frozen=True, slots=True)
class Slow:
    """A rank that comes last in this share of so many steps, and how long the others wait in such a step, of how
    long a one. over: it was named before, and is late no more. computed_s: how much longer than they it computes in
    such a step; None where that is not known."""

    rank: int
    share: float
    steps: int
    wait_s: float
    step_s: float
    over: bool = False
    computed_s: float | None = None


class Recent:
    """The last steps of which it is known which rank came last."""

    def __init__(self) -> None:
        self._steps: deque[tuple[Last | None, float]] = deque(maxlen=RECENT)
        self._named: int | None = None

    def take(self, last: Last | None, step_s: float) -> None:
        """One more step, in which something was exchanged."""
        self._steps.append((last, step_s))

    def share(self, rank: int) -> float | None:
        """Of the steps, that in which this rank came last; None while there are none."""
        return len(self._lasts(rank)) / len(self._steps) if self._steps else None

    @property
    def slowest(self) -> tuple[int, float] | None:
        """The rank with the largest share, and that; None while there are no steps."""
        if not self._steps:
            return None
        counts = Counter(last.rank for last, _ in self._steps if last is not None)
        rank, count = max(counts.items(), key=lambda one: (one[1], -one[0]), default=(0, 0))
        return rank, count / len(self._steps)

    def news(self) -> Slow | None:
        """The rank that is last most of the time, or is so no more, where that was not reported yet."""
        if len(self._steps) < LEAST_KNOWN:
            return None
        counts = Counter(last.rank for last, _ in self._steps if last is not None)
        named = self._named
        if named is not None and counts[named] < FORGIVEN * len(self._steps):
            self._named = None
            return self._slow(named, over=True)
        for worst, count in counts.most_common(1):
            if worst != named and count >= NAMED * len(self._steps):
                self._named = worst
                return self._slow(worst)
        return None

    def _slow(self, rank: int, *, over: bool = False) -> Slow:
        lasts, step_s = self._lasts(rank), statistics.fmean(seconds for _, seconds in self._steps)
        wait_s = statistics.fmean(lasts) if lasts else 0.0
        known = [last.computed_s for last in self._of(rank) if last.computed_s is not None]
        computed_s = statistics.fmean(known) if known else None
        return Slow(rank, len(lasts) / len(self._steps), len(self._steps), wait_s, step_s, over, computed_s)

    def _lasts(self, rank: int) -> list[float]:
        return [last.seconds for last in self._of(rank)]

    def _of(self, rank: int) -> list[Last]:
        return [last for last, _ in self._steps if last is not None and last.rank == rank]


class Waits:
    """How long this rank waits in the steps of one group, and which rank came last in them. Made when the group is."""

    def __init__(self, group: Group, seat: Seat | None = None) -> None:
        """seat: who the ranks are, where that is known."""
        self.size, self.rank = group.size, group.rank
        self.recent = Recent()
        self._seat = seat
        self._stats, self._counted_s = group.stats, group.stats.waited_s
        self._own: deque[float] = deque(maxlen=RECENT)

    def of_step(self) -> float:
        """Seconds that this rank has waited since the last time that it was asked."""
        waited_s, self._counted_s = self._stats.waited_s - self._counted_s, self._stats.waited_s
        self._own.append(waited_s)
        return waited_s

    @property
    def mean_s(self) -> float | None:
        """Of a recent step; None before the first, and for one rank alone."""
        return statistics.fmean(self._own) if self._own and self.size > 1 else None

    def worker(self, rank: int) -> int:
        """What this rank is called for people: its slot, where workers are replaced one by one."""
        return rank if self._seat is None else self._seat.members[rank].identity.slot

    def name(self, rank: int) -> str:
        """In words, with where it runs."""
        if self._seat is None:
            return f"rank {rank}"
        who = self._seat.members[rank].identity
        return f"worker {who.slot} (rank {rank}, {who.node or who.host}, pid {who.pid})"

    def words(self, slow: Slow) -> str:
        """In words."""
        what = f"{self.name(slow.rank)} is the last in {slow.share:.0%} of the last {slow.steps} steps"
        if slow.over:
            return f"{what}: the others do not wait for it any more"
        waits = f"the others wait {_seconds(slow.wait_s)} for it in a step of {_seconds(slow.step_s)}"
        return f"{what}: {waits}{_why(slow)}"


def _why(slow: Slow) -> str:
    """Does it compute longer? From half of the wait on that is why."""
    if slow.computed_s is None:
        return ""
    if slow.computed_s >= MOSTLY * slow.wait_s:
        return f"; it computes {_seconds(slow.computed_s)} longer than they do"
    return "; it computes no longer than they do: look at its data, its link (thinwire doctor), other work on its cores"


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 0.095 else f"{1e3 * value:.0f} ms"
