"""Groups whose collectives are done when they return: what they share, one rank alone, and one that mirrors itself.

Code written for asynchronous collectives runs on them unchanged, one collective after the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from thinwire.comm.groups.sent_bytes import all_gather_bytes, all_reduce_bytes, all_to_all_bytes, broadcast_bytes
from thinwire.comm.protocol import Pending, Stats


class Finished:
    """A Pending with nothing left to wait for."""

    __slots__ = ()

    def wait(self) -> None:
        """Return at once."""


FINISHED = Finished()


class Blocking:
    """Mixin: start_* of a group whose collectives block. One communicator; a failure is raised where it is started."""

    def all_to_all(self, out_nB: Tensor, in_nB: Tensor) -> None:
        """The group's own."""
        raise NotImplementedError

    def all_gather(self, out_nB: Tensor, in_B: Tensor) -> None:
        """The group's own."""
        raise NotImplementedError

    def sum_(self, x: Tensor) -> None:
        """x <- sum over ranks of x. The group's own."""
        raise NotImplementedError

    def start_all_to_all(self, out_nB: Tensor, in_nB: Tensor) -> Pending:
        """all_to_all, done when this returns. Raises: PeerLost."""
        self.all_to_all(out_nB, in_nB)
        return FINISHED

    def start_all_gather(self, out_nB: Tensor, in_B: Tensor) -> Pending:
        """all_gather, done when this returns. Raises: PeerLost."""
        self.all_gather(out_nB, in_B)
        return FINISHED

    def start_sum_(self, x: Tensor) -> Pending:
        """x <- sum over ranks of x, not divided; done when this returns. Raises: PeerLost."""
        self.sum_(x)
        return FINISHED

    def second_communicator(self) -> Self:
        """The group itself: nothing overlaps."""
        return self


class SoloGroup(Blocking):
    """One rank without a process group: every collective is the identity and sends nothing."""

    rank = 0
    size = 1

    def __init__(self) -> None:
        self.stats = Stats()

    def all_to_all(self, out_nB: Tensor, in_nB: Tensor) -> None:
        """out <- in."""
        out_nB.copy_(in_nB)

    def all_gather(self, out_nB: Tensor, in_B: Tensor) -> None:
        """out[0] <- in."""
        out_nB.view(-1).copy_(in_B.view(-1))

    def start_all_to_all_v(
        self, out_B: Tensor, in_B: Tensor, of: Sequence[int], to: Sequence[int], num_bytes: int
    ) -> Pending:
        """out <- in."""
        out_B.copy_(in_B)
        return FINISHED

    def mean_(self, x: Tensor) -> None:
        """X is its own mean."""

    def sum_(self, x: Tensor) -> None:
        """X is its own sum."""

    def broadcast_(self, x: Tensor, src: int = 0) -> None:
        """X is already everywhere."""


class MirroredGroup(Blocking):
    """Rank 0 of `size` ranks that are all itself: what it would get from the others, it takes from itself, at once.

    For a rehearsal. An optimizer on this group runs what a rank of n runs, hooks, kernels and threads, and only the
    wire is missing: what its step takes is what its processor does. Its numbers are good for nothing but that; its
    bytes are counted as if they were sent. Never raises PeerLost.

    Rows of a compressed exchange differ in form from chunk to chunk. What another rank would serve of its chunk is
    therefore what this rank has sent to it: a row of that form, and as finite as its own.
    """

    def __init__(self, size: int, first: MirroredGroup | None = None) -> None:
        """first: of which this one is the second communicator."""
        if size < 1:
            raise ValueError(f"size = {size}: a group has at least one rank")
        self.rank = 0
        self.size = size
        self.stats: Stats = Stats() if first is None else first.stats
        self._second: MirroredGroup | None = None
        self._sent: deque[Tensor] = deque() if first is None else first._sent
        """Rows of the exchanges whose second phase is still to come, oldest first."""

    def all_to_all(self, out_nB: Tensor, in_nB: Tensor) -> None:
        """Each row of out <- the row of in that is for this rank: all have sent the same."""
        self.stats.count("all_to_all", all_to_all_bytes(in_nB, self.size))
        out_nB.copy_(in_nB[:1].expand_as(out_nB))
        self._sent.append(in_nB)

    def all_gather(self, out_nB: Tensor, in_B: Tensor) -> None:
        """Each row of out <- in; in the second phase of an exchange other rows are what was sent in the first."""
        self.stats.count("all_gather", all_gather_bytes(in_B, self.size))
        if self._sent and self._sent[0].shape == out_nB.shape:
            out_nB.copy_(self._sent.popleft())
            out_nB[self.rank].copy_(in_B)
        else:
            out_nB.copy_(in_B.expand_as(out_nB))

    def start_all_to_all_v(
        self, out_B: Tensor, in_B: Tensor, of: Sequence[int], to: Sequence[int], num_bytes: int
    ) -> Pending:
        """Each row of out <- the row of in that is for this rank, as far as it goes, then zeros."""
        own_B = torch.split(in_B, list(to))[self.rank]
        self.stats.count_sent("all_to_all_v", in_B.numel() - own_B.numel())
        out_B.zero_()
        for row_B in torch.split(out_B, list(of)):
            row_B[: own_B.numel()].copy_(own_B[: row_B.numel()])
        return FINISHED

    def mean_(self, x: Tensor) -> None:
        """X stays: all have the same."""
        self.stats.count("mean", all_reduce_bytes(x, self.size))

    def sum_(self, x: Tensor) -> None:
        """X stays, as if the others had zeros: to add up is work of the transport, not of the rank."""
        self.stats.count("sum", all_reduce_bytes(x, self.size))

    def broadcast_(self, x: Tensor, src: int = 0) -> None:
        """X stays."""
        self.stats.count("broadcast", broadcast_bytes(x, self.size, self.rank, src), src, x.nbytes)

    def second_communicator(self) -> MirroredGroup:
        """Another one with the same stats, so that both phases of an exchange are at work as on a real group."""
        if self.size == 1:
            return self
        if self._second is None:
            self._second = MirroredGroup(self.size, self)
        return self._second
