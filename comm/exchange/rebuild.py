"""What can the others say of the error memory of a rank that is gone? From the rows of the last exchange, and outliers.

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

from thinwire.comm.exchange.kept_sums import KeptSums
from thinwire.comm.exchange.rows import BucketRows, Crossing, Received
from thinwire.comm.kernels.blocks import RowMemory
from thinwire.comm.kernels.choose import Kernels

SERVER = 0.5
WORKER = 0.4


def add_rebuilt_(
    part_N: Tensor,
    memory: KeptSums,
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
    worker_N = memory.worker_N
    for one, crossing in rows:
        sent_b = torch.empty_like(worker_N[one.span])
        kernels.decode(crossing.sent, one.table, sent_b)
        for rank, (start, stop) in enumerate(one.chunks):
            at, here = slice(start, stop), slice(start - one.span.start, stop - one.span.start)
            if start == stop:
                continue
            if rank not in missing:
                of_each = (WORKER * sent_b[here] - (1 - WORKER) * worker_N[at]) / (holders * size)
                part_N[at] += len(missing) * of_each
                continue
            part_N[at] += SERVER / holders * sent_b[here]
            if result is not None:
                out_c = torch.empty_like(part_N[at])
                result.decode_(out_c, start, stop)
                part_N[at] -= SERVER * out_c
        for rank in missing:
            if one.own_table.numel:
                part_N[one.own] -= WORKER / size * _collected(one, crossing, kernels, rank)
    if result is not None and memory.outliers is not None:
        for rank in missing:
            memory.outliers.add_(part_N, rank)
    part_N[rows[0][0].layout.dead(0, part_N.numel())] = 0


def left_squares(
    memory: KeptSums,
    rows: Sequence[tuple[BucketRows, Crossing]],
    kernels: Kernels,
    rank: int,
    result: Received,
) -> Tensor:
    """float[2]: of this rank's server error, and of its worker error, the squared norm that would be lost of them.

    What the others would not find if this rank died instead: seen where it serves, and scaled up for the worker error;
    of the others' worker errors, which are not here, the mean is taken to be independent of this one's.
    """
    size, served = len(rows[0][0].chunks), 0
    found = memory.worker_N.new_zeros(2)
    worker_N = memory.worker_N
    known_N = torch.zeros_like(worker_N)
    if memory.outliers is not None:
        memory.outliers.add_(known_N, rank)
    for (one, crossing), kept in zip(rows, memory.server, strict=True):
        if not one.own_table.numel:
            continue
        served += one.own_table.numel
        own_c = _collected(one, crossing, kernels, rank)
        others_c = torch.zeros_like(own_c)
        for other in range(size):
            if other != rank:
                others_c += _collected(one, crossing, kernels, other)
        others_c /= max(1, size - 1)
        out_c = torch.empty_like(own_c)
        result.decode_(out_c, one.own.start, one.own.stop)
        error_c = kept.sum_c - kept.sent(one.own_table)
        found[0] += (error_c - known_N[one.own] - SERVER * (others_c - out_c)).square().sum()
        found[1] += (worker_N[one.own] - WORKER * (others_c - own_c)).square().sum()
    if served:
        found[1] *= worker_N.numel() / served
    found[1] += WORKER**2 / max(1, size - 1) * worker_N.square().sum()
    return found


def _collected(one: BucketRows, crossing: Crossing, kernels: Kernels, rank: int) -> Tensor:
    """What this rank was sent of its own chunk by that rank: float[c], new."""
    sent_c = crossing.collected.values_V.new_empty(one.own_table.numel)
    row = RowMemory.of(crossing.collected_nB[rank], sent_c.dtype)
    kernels.decode(row, one.own_table, sent_c)
    return sent_c
