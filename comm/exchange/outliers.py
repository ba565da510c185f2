"""The largest server errors of every rank, on every rank, in full precision: what a rank that dies leaves of them.

An element that gave far more than its block's scale can carry waits for many steps, for a scale carries it off a little
in each. So a few errors are large, and change slowly. It is enough to send them every PERIOD exchanges, which adds
0.4 % to the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.comm.exchange.rows import BucketRows
from thinwire.comm.kernels.kept import larger_than
from thinwire.comm.protocol import Group

PERIOD = 16
"""Exchanges of one memory from one sending to the next; the first is with the first exchange."""
ONE_IN = 512
"""Of the elements that a rank serves: one in so many is sent."""
SAMPLED = 1 << 16
"""Elements by which the bound is found that so many reach."""


class Outliers:
    """Of each rank: where its largest server errors are, counted in what it serves, and what they are.

    exchanges: commits since the error memory was written from outside. Not part of what is saved.
    """

    def __init__(self, rows: Sequence[BucketRows], group: Group, like: Tensor) -> None:
        self._rows, self._group = rows, group
        served = max(sum(b - a for a, b in (one.chunks[rank] for one in rows)) for rank in range(group.size))
        self._most = 2 * max(1, served // (2 * ONE_IN))  # even, so that values are aligned behind positions
        self._room = torch.zeros(
            (2, group.size, self._most * (4 + like.element_size())), dtype=torch.uint8, device=like.device
        )
        self._now, self._like, self._known = 0, like, False
        self.exchanges = 0

    @property
    def is_due(self) -> bool:
        """Is the next exchange one that sends them? Alike on every rank."""
        return self.exchanges % PERIOD == 0

    def forget(self) -> None:
        """The errors were written from outside: what is known of them is of before."""
        self.exchanges, self._known = 0, False

    def send(self, sums: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Gather those of all ranks. sums: of each bucket, kept sums and scales that this rank serves. Collective.

        Raises: PeerLost, and what was known stays.
        """
        at_k, error_k = self._largest(sums)
        own_at, own_error = at_k.new_zeros(self._most, dtype=torch.int32), self._like.new_zeros(self._most)
        own_at[: at_k.numel()], own_error[: at_k.numel()] = at_k.to(torch.int32), error_k
        self._group.all_gather(
            self._room[1 - self._now], torch.cat([own_at.view(torch.uint8), own_error.view(torch.uint8)])
        )
        self._now, self._known = 1 - self._now, True

    def add_(self, part_N: Tensor, rank: int, weight: float = 1.0) -> None:
        """part <- part + weight * what is known of this rank's server error, in its place. part: float[N]."""
        for one, (at_k, error_k) in zip(self._rows, self.known(rank), strict=False):
            part_N[one.chunks[rank][0] : one.chunks[rank][1]].index_add_(0, at_k, error_k, alpha=weight)

    def known(self, rank: int) -> list[tuple[Tensor, Tensor]]:
        """Of each bucket, what is known of this rank's server error: where, in its chunk, and what. Else empty."""
        if not self._known:
            return []
        bytes_B = self._room[self._now, rank]
        at_k = bytes_B[: 4 * self._most].view(torch.int32).long()
        error_k = bytes_B[4 * self._most :].view(self._like.dtype)
        begin, found = 0, []
        for one in self._rows:
            start, stop = one.chunks[rank]
            here_k = (at_k >= begin) & (at_k < begin + stop - start)
            found.append((at_k[here_k] - begin, error_k[here_k]))
            begin += stop - start
        return found

    def _largest(self, sums: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        bound = self._bound(sums)
        at, errors, begin = [], [], 0
        for rows, (sum_c, scale_b) in zip(self._rows, sums, strict=True):
            if sum_c.numel():
                at_k, error_k = larger_than(sum_c.to(self._like), scale_b, rows.own_table, bound, 2 * self._most)
                at.append(at_k + begin)
                errors.append(error_k)
            begin += sum_c.numel()
        if not at:
            return torch.zeros(0, dtype=torch.int64, device=self._like.device), self._like.new_zeros(0)
        at_k, error_k = torch.cat(at), torch.cat(errors)
        if at_k.numel() > self._most:
            best_k = error_k.abs().topk(self._most).indices
            at_k, error_k = at_k[best_k], error_k[best_k]
        return at_k, error_k

    def _bound(self, sums: Sequence[tuple[Tensor, Tensor]]) -> float:
        """What about as many errors reach as are sent."""
        served = sum(sum_c.numel() for sum_c, _ in sums)
        stride = max(1, served // SAMPLED)
        found = []
        for rows, (sum_c, scale_b) in zip(self._rows, sums, strict=True):
            at_k = torch.arange(0, sum_c.numel(), stride, dtype=torch.int64, device=sum_c.device)
            block_k = torch.bucketize(at_k, rows.own_table.starts, right=True) - 1
            sampled_k = sum_c[at_k]
            found.append((sampled_k.abs() - scale_b[block_k]).abs_() * (sampled_k != 0))
        size_k = torch.cat(found)
        rank = self._most * size_k.numel() // max(1, served)
        return float(size_k.topk(max(1, rank)).values[-1]) if rank < size_k.numel() else 0.0
