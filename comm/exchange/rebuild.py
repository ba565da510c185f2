"""The error memory of a rank that is gone, as the others estimate it: from the rows of the last exchange, and outliers.

Of n ranks rank p is gone; C_i is what rank i sent in the last exchange, out its result; bars are means of survivors:

    E_p ~ outliers of p + SERVER (bar C - out)              on the chunk that p served, where d_p ~ bar d
    d_p ~ WORKER (bar d + bar C - C_p)                      on all other chunks, whose servers have the rows of p

What p sent carried part of what it had, so the more it sent the less is left: d_p falls with C_p, and E_p with out, by
which p has delivered; and rises with what the others gave. Where all ranks sent the same and out is that, nothing is
added. No byte is sent for this: each survivor adds its own part to its share of R, and the sum over them is R.

SERVER and WORKER are least squares, rounded, over recorded runs (benchmarks/results/rebuilt). Fitted to the truth of a
run, which nobody has, they would lose 1 to 4 points of 100 less with four ranks, and 11 less with two.

Outliers are the largest server errors of every rank, on every rank, in full precision. An element that gave far more
than its block's scale can carry waits for many steps, for a scale carries it off a little in each. So a few errors are
large, and change slowly: it is enough to send them every PERIOD exchanges, which adds 0.4 % to the bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from thinwire.comm.exchange.rows import BucketRows, Crossing, Received
from thinwire.comm.kernels.blocks import RowMemory
from thinwire.comm.kernels.fused_reference import Kernels
from thinwire.comm.kernels.kept import larger_than
from thinwire.comm.protocol import Group

if TYPE_CHECKING:  # it holds Outliers
    from thinwire.comm.exchange.memory import ErrorMemory

SERVER = 0.5
WORKER = 0.4
PERIOD = 16
"""Exchanges of one memory from one sending to the next; the first is with the first exchange."""
ONE_IN = 512
"""Of the elements that a rank serves: one in so many is sent."""
SAMPLED = 1 << 16
"""Elements by which the bound is found that so many reach."""


def add_rebuilt_(
    part_N: Tensor,
    memory: ErrorMemory,
    rows: Sequence[tuple[BucketRows, Crossing]],
    kernels: Kernels,
    missing: Collection[int],
    holders: int,
    result: Received | None,
) -> None:
    """part <- part + this survivor's part of what is estimated of the missing ranks. Local.

    part: float[N], memory.share(holders, missing). rows: of each bucket, and what has crossed in the exchange that the
    memory stands at. result: of that exchange, on one of the survivors alone.
    """
    size = len(rows[0][0].chunks)
    for (one, crossing), kept in zip(rows, memory.worker, strict=True):
        # One vector of a bucket's size at a time: a regroup is when a rank holds the most.
        error_b = kept.error().mul_(len(missing) * (WORKER - 1) / (holders * size))
        _add_left(part_N, error_b, one, missing)
        del error_b
        sent_b = part_N.new_empty(one.table.numel)
        kernels.decode(crossing.sent, one.table, sent_b)
        for rank in missing:
            start, stop = one.chunks[rank]
            if start < stop:
                part_N[start:stop].add_(sent_b[start - one.span.start : stop - one.span.start], alpha=SERVER / holders)
        _add_left(part_N, sent_b.mul_(len(missing) * WORKER / (holders * size)), one, missing)
        del sent_b
        for rank in missing:
            start, stop = one.chunks[rank]
            if result is not None and start < stop:
                out_c = part_N.new_empty(stop - start)
                result.decode_(out_c, start, stop)
                part_N[start:stop].sub_(out_c, alpha=SERVER)
        for rank in missing:
            if one.own_table.numel:
                part_N[one.own] -= WORKER / size * _collected(one, crossing, kernels, rank)
    if result is not None and memory.outliers is not None:
        for rank in missing:
            memory.outliers.add_(part_N, rank)
    part_N[rows[0][0].layout.dead(0, part_N.numel())] = 0


def left_squares(
    memory: ErrorMemory,
    rows: Sequence[tuple[BucketRows, Crossing]],
    kernels: Kernels,
    rank: int,
    result: Received,
) -> Tensor:
    """float[2]: of this rank's server error, and of its worker error, the squared norm that would be lost of them.

    What the others would not find if this rank died instead: seen where it serves, and scaled up for the worker error;
    of the others' worker errors, which are not here, the mean is taken to be independent of this one's.
    """
    size, served, layout = len(rows[0][0].chunks), 0, rows[0][0].layout
    found, worker = memory.worker[0].scale_b.new_zeros(2), 0.0
    known = memory.outliers.known(rank) if memory.outliers is not None else []
    for k, ((one, crossing), kept, of_worker) in enumerate(zip(rows, memory.server, memory.worker, strict=True)):
        error_b = of_worker.error()
        worker += torch.linalg.vector_norm(error_b) ** 2
        if not one.own_table.numel:
            continue
        served += one.own_table.numel
        own_c = _collected(one, crossing, kernels, rank)
        others_c = torch.zeros_like(own_c)
        for other in range(size):
            if other != rank:
                others_c += _collected(one, crossing, kernels, other)
        others_c /= max(1, size - 1)
        here = slice(one.own.start - one.span.start, one.own.stop - one.span.start)
        found[1] += own_c.sub_(others_c).mul_(WORKER).add_(error_b[here]).square_().sum()
        del error_b
        out_c = own_c
        result.decode_(out_c, one.own.start, one.own.stop)
        error_c = kept.error()
        if known:
            at_k, known_k = known[k]
            error_c.index_add_(0, at_k, known_k, alpha=-1)
        found[0] += error_c.sub_(others_c.sub_(out_c).mul_(SERVER)).square_().sum()
    if served:
        found[1] *= layout.numel / served
    found[1] += WORKER**2 / max(1, size - 1) * worker
    return found


def _add_left(part_N: Tensor, x_b: Tensor, one: BucketRows, missing: Collection[int]) -> None:
    """part <- part + x of one bucket, where ranks serve that are not missing."""
    for rank, (start, stop) in enumerate(one.chunks):
        if rank not in missing:
            part_N[start:stop] += x_b[start - one.span.start : stop - one.span.start]


def _collected(one: BucketRows, crossing: Crossing, kernels: Kernels, rank: int) -> Tensor:
    """What this rank was sent of its own chunk by that rank: float[c], new."""
    sent_c = crossing.collected.values_V.new_empty(one.own_table.numel)
    row = RowMemory.of(crossing.collected_nB[rank], sent_c.dtype)
    kernels.decode(row, one.own_table, sent_c)
    return sent_c


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
            at_k = torch.arange(0, sum_c.numel(), stride, device=sum_c.device)
            block_k = torch.bucketize(at_k, rows.own_table.starts, right=True) - 1
            sampled_k = sum_c[at_k]
            found.append((sampled_k.abs() - scale_b[block_k]).abs_() * (sampled_k != 0))
        size_k = torch.cat(found)
        rank = self._most * size_k.numel() // max(1, served)
        return float(size_k.topk(max(1, rank)).values[-1]) if rank < size_k.numel() else 0.0
