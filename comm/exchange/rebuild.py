"""The error memory of a rank that is gone, as the others estimate it: from the rows of the last exchange, and outliers.

Of n ranks rank p is gone; C_i is what rank i sent in the last exchange, out its result; bars are means of survivors:

    E_p ~ outliers of p + SERVER (bar C - out)              on the chunk that p served, where d_p ~ bar d
    d_p ~ WORKER (bar d + bar C - C_p)                      on all other chunks, whose servers have the rows of p

What p sent carried part of what it had, so the more it sent the less is left: d_p falls with C_p, and E_p with out, by
which p has delivered; and rises with what the others gave. Where all ranks sent the same and out is that, nothing is
added. No byte is sent for this: each survivor adds its own part to its share of R, and the sum over them is R.

SERVER and WORKER are least squares, rounded, over recorded runs (benchmarks/results/rebuilt). Fitted to the truth of a
run, which nobody has, they would lose 1 to 4 points of 100 less with four ranks, and 11 less with two.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from thinwire.comm.exchange.memory import ErrorMemory
from thinwire.comm.exchange.rows import BucketRows, Crossing, Received
from thinwire.comm.kernels.blocks import RowMemory
from thinwire.comm.kernels.fused_reference import Kernels

SERVER = 0.5
WORKER = 0.4


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
