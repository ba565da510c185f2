"""What is asked of kept sums now and then: the errors that encoding has left out, and the few largest of them.

    e = c - s sgn(c)      s: the scale of an element's block; c where it is dead

A change of ranks and a save want e of every element, while others wait: one pass on a CPU. What is worth sending to
others is where |e| reaches a bound and c is not 0, as it is where an element is dead.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from thinwire.comm.kernels.blocks import BlockTable

LOOPED = (torch.float32, torch.float64)
"""What there are loops for, on a CPU."""
PIECE = 16
"""Blocks of which errors are worked out at a time, where it takes several passes."""


def left_out_(sum_c: Tensor, scale_b: Tensor, table: BlockTable, out_c: Tensor) -> Tensor:
    """out <- e. Returns it.

    sum: float or bfloat16[c]. scale: float[b]. table: their blocks. out: float[c]; may be the sums themselves.
    """
    if sum_c.device.type == "cpu" and sum_c.dtype == out_c.dtype and sum_c.dtype in LOOPED:
        # Not at the top: importing numba takes half a second, which only vectors on a CPU need.
        from thinwire.comm.kernels.arrays import blocks_of, scales_of, values_of
        from thinwire.comm.kernels.cpu import left_out

        blocks = blocks_of(table)
        left_out(
            values_of(sum_c, table), scales_of(scale_b, table), blocks.starts, blocks.dead, values_of(out_c, table)
        )
        return out_c
    return left_out_in_torch_(sum_c, scale_b, table, out_c)


def left_out_in_torch_(sum_c: Tensor, scale_b: Tensor, table: BlockTable, out_c: Tensor) -> Tensor:
    """The same in plain torch on any device, some blocks at a time, without scratch of a whole bucket."""
    bounds, dead_k = [*table.starts[:-1:PIECE].tolist(), table.numel], sum_c[table.dead].to(out_c)
    for (low, high), first in zip(pairwise(bounds), range(0, table.num_blocks, PIECE), strict=True):
        piece_c, blocks = sum_c[low:high], slice(first, first + PIECE)
        lengths = table.starts[first : first + PIECE + 1].diff()
        scale_c = torch.repeat_interleave(scale_b[blocks], lengths, output_size=high - low)
        torch.sub(piece_c, torch.where(piece_c >= 0, scale_c, -scale_c), out=out_c[low:high])
    out_c[table.dead] = dead_k  # of which nothing was sent
    return out_c


def larger_than(sum_c: Tensor, scale_b: Tensor, table: BlockTable, bound: float, most: int) -> tuple[Tensor, Tensor]:
    """Positions int64[k] and errors float[k], ascending, of the first `most` elements at most. New tensors.

    sum: float[c], kept sums of one chunk. scale: float[b]. table: its blocks.
    """
    if sum_c.device.type != "cpu" or sum_c.dtype not in LOOPED:
        return larger_than_in_torch(sum_c, scale_b, table, bound, most)
    # Not at the top: as above.
    from thinwire.comm.kernels.arrays import blocks_of, scales_of, values_of
    from thinwire.comm.kernels.cpu import pick

    at_k, error_k = torch.empty(most, dtype=torch.int64, device="cpu"), sum_c.new_empty(most)
    sums = values_of(sum_c, table)
    limit = sums.dtype.type(bound)
    found = pick(sums, scales_of(scale_b, table), blocks_of(table).starts, limit, at_k.numpy(), error_k.numpy())
    return at_k[:found], error_k[:found]


def larger_than_in_torch(
    sum_c: Tensor, scale_b: Tensor, table: BlockTable, bound: float, most: int
) -> tuple[Tensor, Tensor]:
    """The same in plain torch, on any device."""
    scale_c = torch.repeat_interleave(scale_b, table.starts.diff(), output_size=table.numel)
    size_c = sum_c.abs().sub_(scale_c)
    at_k = ((size_c.abs() >= bound) & (sum_c != 0)).nonzero().view(-1)[:most]
    return at_k, torch.where(sum_c[at_k] >= 0, size_c[at_k], -size_c[at_k])
