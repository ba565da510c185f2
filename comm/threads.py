"""n ranks as threads of one process, on the CPU or on one GPU: the transport of tests, of the lab and of first tries.

A collective is: show my tensor, wait for all, read theirs, wait for all. A rank that raises breaks the barrier, so its
peers get PeerLost instead of waiting for ever.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from thinwire.comm.errors import PeerLost
from thinwire.comm.pending import Blocking
from thinwire.comm.protocol import Stats
from thinwire.comm.sent_bytes import all_gather_bytes, all_reduce_bytes, all_to_all_bytes, broadcast_bytes

T = TypeVar("T")


class ThreadGroup(Blocking):
    """One rank's end of a group of threads; `ThreadGroup.create(n)` makes all n ends."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, shown: list[Tensor]) -> None:
        self.rank = rank
        self.size = size
        self.stats = Stats()
        self._barrier = barrier
        self._shown = shown

    @classmethod
    def create(cls, size: int, timeout_s: float = 60.0) -> list[ThreadGroup]:
        """Make the ends of a group of `size` ranks. A rank that waits longer than `timeout_s` raises PeerLost."""
        if size < 1:
            raise ValueError(f"size = {size}: a group has at least one rank")
        barrier = threading.Barrier(size, timeout=timeout_s)
        shown = [torch.empty(0)] * size
        return [cls(rank, size, barrier, shown) for rank in range(size)]

    def leave(self) -> None:
        """Break the group: every rank that waits, now or later, raises PeerLost."""
        self._barrier.abort()

    def all_to_all(self, out_nB: Tensor, in_nB: Tensor) -> None:
        """out[i] on rank j <- in[j] of rank i. Raises: PeerLost."""
        theirs = self._show(in_nB)
        for row, rows in zip(out_nB, theirs, strict=True):
            row.copy_(rows[self.rank])
        self._wait()
        self.stats.count("all_to_all", all_to_all_bytes(in_nB, self.size))

    def all_gather(self, out_nB: Tensor, in_B: Tensor) -> None:
        """out[i] <- in of rank i. Raises: PeerLost."""
        theirs = self._show(in_B)
        for row, own in zip(out_nB, theirs, strict=True):
            row.copy_(own)
        self._wait()
        self.stats.count("all_gather", all_gather_bytes(in_B, self.size))

    def mean_(self, x: Tensor) -> None:
        """X <- mean over ranks, summed in order of rank. Raises: PeerLost."""
        x.copy_(self._sum(x).div_(self.size))
        self.stats.count("mean", all_reduce_bytes(x, self.size))

    def sum_(self, x: Tensor) -> None:
        """X <- sum over ranks, in order of rank. Raises: PeerLost."""
        x.copy_(self._sum(x))
        self.stats.count("sum", all_reduce_bytes(x, self.size))

    def broadcast_(self, x: Tensor, src: int = 0) -> None:
        """X <- x of rank `src`. Raises: PeerLost."""
        theirs = self._show(x)
        if self.rank != src:
            x.copy_(theirs[src])
        self._wait()
        self.stats.count("broadcast", broadcast_bytes(x, self.size, self.rank, src), src, x.nbytes)

    def _sum(self, x: Tensor) -> Tensor:
        theirs = self._show(x)
        total = theirs[0].clone()
        for other in theirs[1:]:
            total.add_(other)
        self._wait()
        return total

    def _show(self, tensor: Tensor) -> list[Tensor]:
        self._shown[self.rank] = tensor
        self._wait()
        return self._shown

    def _wait(self) -> None:
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError as error:
            raise PeerLost(
                f"rank {self.rank} of {self.size} lost a peer: another thread of the group raised, left, or did not "
                "come within the time-out"
            ) from error


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
            group.leave()

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
