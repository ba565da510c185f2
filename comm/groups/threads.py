"""n ranks as threads of one process, on the CPU or on one GPU: the transport of tests, of the lab and of first tries.

A collective is: show my tensor, wait for all, read theirs, wait for all. A rank that raises breaks the barrier, so its
peers get PeerLost instead of waiting for ever. Where one barrier breaks, of the group or of a part of it, all do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from thinwire.comm.calls import NOWHERE, Calls, Place, interrupted, mismatch
from thinwire.comm.errors import PeerLost
from thinwire.comm.groups.blocking import FINISHED, Blocking
from thinwire.comm.groups.nodes import Part, PartStats
from thinwire.comm.groups.sent_bytes import all_gather_bytes, all_reduce_bytes, all_to_all_bytes, broadcast_bytes
from thinwire.comm.protocol import Pending, Stats
from thinwire.comm.signals import armed
from thinwire.comm.wire.link_classes import Box, named_box

T = TypeVar("T")


@dataclass(slots=True)
class Meeting:
    """What the ranks of one group share: where they wait, what they show, who has left and how often each has come.

    members: their ranks in the whole group. reports: of each rank the collective that it is in, the call of its user,
    and what to do where others are not in it. left, all: of the whole group and its parts together; left by the ranks
    of the whole.
    """

    members: tuple[int, ...]
    barrier: threading.Barrier
    shown: list[Any]
    reports: list[tuple[Place, str, str]]
    came: list[int]
    left: dict[int, str] = field(default_factory=dict)
    all: dict[tuple[int, ...], Meeting] = field(default_factory=dict)

    @classmethod
    def of(cls, members: Sequence[int], timeout_s: float | None) -> Meeting:
        """A new one, of a whole group."""
        size = len(members)
        barrier, reports = threading.Barrier(size, timeout=timeout_s), [(NOWHERE, "", "")] * size
        made = cls(
            tuple(members), barrier, [torch.empty(0, dtype=torch.float32, device="cpu")] * size, reports, [0] * size
        )
        made.all[made.members] = made
        return made

    def part(self, members: Sequence[int]) -> Meeting:
        """That of these ranks of the whole: one, made by the first that asks."""
        made = Meeting.of(members, self.barrier._timeout)  # type: ignore[attr-defined]
        made.left, made.all = self.left, self.all
        found = self.all.setdefault(made.members, made)
        if self.barrier.broken:
            found.barrier.abort()
        return found

    def end(self) -> None:
        """Nobody can meet any more, in the whole or in any part."""
        for one in list(self.all.values()):
            one.barrier.abort()


class ThreadGroup(Blocking):
    """One rank's end of a group of threads; `ThreadGroup.create(n)` makes all n ends.

    box: where this rank is said to be. whole: of which this is a part.
    """

    def __init__(
        self, rank: int, size: int, meeting: Meeting, *, box: Box | None = None, whole: ThreadGroup | None = None
    ) -> None:
        self.rank = rank
        self.size = size
        self.box = box
        self.stats = Stats()
        self.calls: Calls = Calls() if whole is None else whole.calls
        self._communicator = 0
        self._meeting = meeting
        self._whole = self if whole is None else whole
        self._parts: dict[Part, ThreadGroup] = {}

    @classmethod
    def create(cls, size: int, timeout_s: float = 60.0, boxes: Sequence[Hashable] | None = None) -> list[ThreadGroup]:
        """Make the ends of a group of `size` ranks. A rank that waits longer than `timeout_s` raises PeerLost.

        boxes: of each rank, where it is said to be, such as (0, 0, 1, 1); None: all are where this process is.
        """
        if size < 1:
            raise ValueError(f"size = {size}: a group has at least one rank")
        if boxes is not None and len(boxes) != size:
            raise ValueError(f"boxes = {boxes!r}: must name the box of each of {size} ranks")
        meeting = Meeting.of(range(size), timeout_s)
        named = [None if boxes is None else named_box(f"box {boxes[rank]}") for rank in range(size)]
        return [cls(rank, size, meeting, box=named[rank]) for rank in range(size)]

    def part(self, part: Part, ranks: Sequence[int]) -> ThreadGroup:
        """The group of these ranks: comm.groups.nodes."""
        if part not in self._parts:
            meeting = self._meeting.part(ranks)
            made = ThreadGroup(ranks.index(self.rank), len(ranks), meeting, box=self.box, whole=self)
            made.stats, made._communicator = PartStats(self.stats, part), part.communicator
            self._parts[part] = made
        return self._parts[part]

    def leave(self, reason: str = "it raised, or was stopped") -> None:
        """Break the group: every rank that waits, now or later, raises PeerLost, which names the first that left."""
        if not self._meeting.barrier.broken:  # else this rank leaves because another one did
            self._meeting.left[self._whole.rank] = reason
        self._meeting.end()

    def all_to_all(self, out_nB: Tensor, in_nB: Tensor) -> None:
        """out[i] on rank j <- in[j] of rank i. Raises: PeerLost."""
        theirs = self._show("all_to_all", in_nB, in_nB.nbytes)
        for row, rows in zip(out_nB, theirs, strict=True):
            row.copy_(rows[self.rank])
        self._wait()
        self.stats.count("all_to_all", all_to_all_bytes(in_nB, self.size))

    def all_gather(self, out_nB: Tensor, in_B: Tensor) -> None:
        """out[i] <- in of rank i. Raises: PeerLost."""
        theirs = self._show("all_gather", in_B, in_B.nbytes)
        for row, own in zip(out_nB, theirs, strict=True):
            row.copy_(own)
        self._wait()
        self.stats.count("all_gather", all_gather_bytes(in_B, self.size))

    def start_all_to_all_v(
        self, out_B: Tensor, in_B: Tensor, of: Sequence[int], to: Sequence[int], num_bytes: int
    ) -> Pending:
        """As Uneven of comm.protocol, done when this returns. Raises: PeerLost."""
        rows = torch.split(in_B, list(to))
        theirs = self._show("all_to_all_v", rows, num_bytes)
        for out, shown in zip(torch.split(out_B, list(of)), theirs, strict=True):
            out.copy_(shown[self.rank])
        self._wait()
        self.stats.count_sent("all_to_all_v", in_B.numel() - rows[self.rank].numel())
        return FINISHED

    def mean_(self, x: Tensor) -> None:
        """x <- mean over ranks, summed in order of rank. Raises: PeerLost."""
        x.copy_(self._sum(x).div_(x.new_full((), self.size)))
        self.stats.count("mean", all_reduce_bytes(x, self.size))

    def sum_(self, x: Tensor) -> None:
        """x <- sum over ranks, in order of rank. Raises: PeerLost."""
        x.copy_(self._sum(x))
        self.stats.count("sum", all_reduce_bytes(x, self.size))

    def broadcast_(self, x: Tensor, src: int = 0) -> None:
        """x <- x of rank `src`. Raises: PeerLost."""
        theirs = self._show("broadcast", x, x.nbytes)
        if self.rank != src:
            x.copy_(theirs[src])
        self._wait()
        self.stats.count("broadcast", broadcast_bytes(x, self.size, self.rank, src), src, x.nbytes)

    def _sum(self, x: Tensor) -> Tensor:
        theirs = self._show("all_reduce", x, x.nbytes)
        total = theirs[0].clone()
        for other in theirs[1:]:
            total.add_(other)
        self._wait()
        return total

    def _show(self, collective: str, shown: T, num_bytes: int) -> list[T]:
        meeting, calls = self._meeting, self.calls
        if meeting.barrier.broken:  # others may still read what was shown
            self._wait()
        at = Place(self._communicator, calls.begun[self._communicator] + 1, collective, num_bytes)
        meeting.shown[self.rank], meeting.reports[self.rank] = shown, (at, calls.words(), calls.remedy)
        self._wait()
        calls.begin(at)
        if any(theirs.differs(at) for theirs, _, _ in meeting.reports):
            reports = list(meeting.reports)
            self._wait()  # all have read the reports
            raise mismatch(
                {rank: f"{call} ({place})" for rank, (place, call, _) in enumerate(reports)},
                [remedy for _, _, remedy in reports],
            )
        return meeting.shown

    def _wait(self) -> None:
        if not self._meeting.barrier.broken:  # who comes after the others gave up has not come: they ask who is missing
            self._meeting.came[self.rank] += 1
        try:
            with armed():
                self._meeting.barrier.wait()
        except threading.BrokenBarrierError as error:
            self._meeting.end()
            raise self._lost() from error
        except BaseException as error:  # a signal's: the others wait for what this rank does not go on with
            self.leave(interrupted(error, self.calls))
            raise

    def _lost(self) -> PeerLost:
        came = self._meeting.came
        lost = {rank: f"it left: {reason}" for rank, reason in self._meeting.left.items()}
        if not lost:
            late = [
                member for member, times in zip(self._meeting.members, came, strict=True) if times < came[self.rank]
            ]
            lost = dict.fromkeys(late, "it did not come within the time-out")
        who = "; ".join(f"rank {rank} ({why})" for rank, why in lost.items())
        who = who or "its peers, which gave up waiting for it at the time-out"
        return PeerLost(
            f"rank {self._whole.rank} of {self._whole.size} lost {who}",
            next(iter(lost)) if len(lost) == 1 else None,
            tuple(lost),
        )


def run_threads(
    size: int, work: Callable[[ThreadGroup], T], timeout_s: float = 60.0, boxes: Sequence[Hashable] | None = None
) -> list[T]:
    """Run `work(group)` on `size` threads and return their results in order of rank. boxes: as in ThreadGroup.create.

    Raises the first error that is not PeerLost (the cause), else the first PeerLost (the consequence).
    """
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}

    def body(group: ThreadGroup) -> None:
        # A thread keeps to torch.set_num_threads() only once it has asked: its first products would be summed on all
        # cores, to other bits than those that come after.
        torch.get_num_threads()
        try:
            results[group.rank] = work(group)
        except BaseException as error:  # noqa: BLE001 - carried to the caller's thread and raised there
            errors[group.rank] = error
            group.leave(f"{type(error).__name__}: {error}")

    groups = ThreadGroup.create(size, timeout_s, boxes)
    threads = [threading.Thread(target=body, args=(group,), daemon=True) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    causes = sorted(errors.items(), key=lambda item: (isinstance(item[1], PeerLost), item[0]))
    if causes:
        raise causes[0][1]
    return [results[rank] for rank in range(size)]
