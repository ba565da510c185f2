"""n ranks as threads of one process, on the CPU or on one GPU: the transport of tests, of the lab and of first tries.

A collective is: show my tensor, wait for all, read theirs, wait for all. A rank that raises breaks the barrier, so its
peers get PeerLost instead of waiting for ever.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from thinwire.comm.calls import NOWHERE, Calls, Place, interrupted, mismatch
from thinwire.comm.errors import PeerLost
from thinwire.comm.groups.pending import Blocking
from thinwire.comm.groups.sent_bytes import all_gather_bytes, all_reduce_bytes, all_to_all_bytes, broadcast_bytes
from thinwire.comm.protocol import Stats
from thinwire.comm.signals import armed

T = TypeVar("T")


@dataclass(slots=True)
class Meeting:
    """What the ranks of one group share: where they wait, what they show, who has left and how often each has come.

    told: of each rank the collective that it is in, the call of its user, and what to do where others are not in it.
    """

    barrier: threading.Barrier
    shown: list[Tensor]
    told: list[tuple[Place, str, str]]
    came: list[int]
    left: dict[int, str] = field(default_factory=dict)


class ThreadGroup(Blocking):
    """One rank's end of a group of threads; `ThreadGroup.create(n)` makes all n ends."""

    def __init__(self, rank: int, size: int, meeting: Meeting) -> None:
        self.rank = rank
        self.size = size
        self.stats = Stats()
        self.calls = Calls()
        self._meeting = meeting

    @classmethod
    def create(cls, size: int, timeout_s: float = 60.0) -> list[ThreadGroup]:
        """Make the ends of a group of `size` ranks. A rank that waits longer than `timeout_s` raises PeerLost."""
        if size < 1:
            raise ValueError(f"size = {size}: a group has at least one rank")
        barrier, told = threading.Barrier(size, timeout=timeout_s), [(NOWHERE, "", "")] * size
        meeting = Meeting(barrier, [torch.empty(0)] * size, told, [0] * size)
        return [cls(rank, size, meeting) for rank in range(size)]

    def leave(self, reason: str = "it raised, or was told to stop") -> None:
        """Break the group: every rank that waits, now or later, raises PeerLost, which names the first that left."""
        if not self._meeting.barrier.broken:  # else this rank leaves because another one did
            self._meeting.left[self.rank] = reason
        self._meeting.barrier.abort()

    def all_to_all(self, out_nB: Tensor, in_nB: Tensor) -> None:
        """out[i] on rank j <- in[j] of rank i. Raises: PeerLost."""
        theirs = self._show("all_to_all", in_nB)
        for row, rows in zip(out_nB, theirs, strict=True):
            row.copy_(rows[self.rank])
        self._wait()
        self.stats.count("all_to_all", all_to_all_bytes(in_nB, self.size))

    def all_gather(self, out_nB: Tensor, in_B: Tensor) -> None:
        """out[i] <- in of rank i. Raises: PeerLost."""
        theirs = self._show("all_gather", in_B)
        for row, own in zip(out_nB, theirs, strict=True):
            row.copy_(own)
        self._wait()
        self.stats.count("all_gather", all_gather_bytes(in_B, self.size))

    def mean_(self, x: Tensor) -> None:
        """x <- mean over ranks, summed in order of rank. Raises: PeerLost."""
        x.copy_(self._sum(x).div_(self.size))
        self.stats.count("mean", all_reduce_bytes(x, self.size))

    def sum_(self, x: Tensor) -> None:
        """x <- sum over ranks, in order of rank. Raises: PeerLost."""
        x.copy_(self._sum(x))
        self.stats.count("sum", all_reduce_bytes(x, self.size))

    def broadcast_(self, x: Tensor, src: int = 0) -> None:
        """x <- x of rank `src`. Raises: PeerLost."""
        theirs = self._show("broadcast", x)
        if self.rank != src:
            x.copy_(theirs[src])
        self._wait()
        self.stats.count("broadcast", broadcast_bytes(x, self.size, self.rank, src), src, x.nbytes)

    def _sum(self, x: Tensor) -> Tensor:
        theirs = self._show("all_reduce", x)
        total = theirs[0].clone()
        for other in theirs[1:]:
            total.add_(other)
        self._wait()
        return total

    def _show(self, collective: str, tensor: Tensor) -> list[Tensor]:
        meeting, calls = self._meeting, self.calls
        at = Place(0, calls.begun[0] + 1, collective, tensor.nbytes)
        meeting.shown[self.rank], meeting.told[self.rank] = tensor, (at, calls.told(), calls.remedy)
        self._wait()
        calls.begin(at)
        if any(theirs.differs(at) for theirs, _, _ in meeting.told):
            told = list(meeting.told)
            self._wait()  # all have read what was told
            raise mismatch(
                {rank: f"{call} ({place})" for rank, (place, call, _) in enumerate(told)},
                [remedy for _, _, remedy in told],
            )
        return meeting.shown

    def _wait(self) -> None:
        if not self._meeting.barrier.broken:  # who comes after the others gave up has not come: they ask who is missing
            self._meeting.came[self.rank] += 1
        try:
            with armed():
                self._meeting.barrier.wait()
        except threading.BrokenBarrierError as error:
            raise self._lost() from error
        except BaseException as error:  # a signal's: the others wait for what this rank does not go on with
            self.leave(interrupted(error, self.calls))
            raise

    def _lost(self) -> PeerLost:
        came = self._meeting.came
        lost = {rank: f"it left: {reason}" for rank, reason in self._meeting.left.items()}
        if not lost:
            late = [rank for rank in range(self.size) if came[rank] < came[self.rank]]
            lost = dict.fromkeys(late, "it did not come within the time-out")
        who = "; ".join(f"rank {rank} ({why})" for rank, why in lost.items())
        return PeerLost(
            f"rank {self.rank} of {self.size} lost {who or 'its peers, which gave up waiting for it at the time-out'}",
            next(iter(lost)) if len(lost) == 1 else None,
            tuple(lost),
        )


def run_threads(size: int, work: Callable[[ThreadGroup], T], timeout_s: float = 60.0) -> list[T]:
    """Run `work(group)` on `size` threads and return their results in order of rank.

    Raises the first error that is not PeerLost (the cause), else the first PeerLost (the consequence).
    """
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}

    def body(group: ThreadGroup) -> None:
        try:
            results[group.rank] = work(group)
        except BaseException as error:  # noqa: BLE001 - carried to the caller's thread and raised there
            errors[group.rank] = error
            group.leave(f"{type(error).__name__}: {error}")

    threads = [
        threading.Thread(target=body, args=(group,), daemon=True) for group in ThreadGroup.create(size, timeout_s)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    causes = sorted(errors.items(), key=lambda item: (isinstance(item[1], PeerLost), item[0]))
    if causes:
        raise causes[0][1]
    return [results[rank] for rank in range(size)]
