"""What has encoding left out of kept sums? e = c - s sgn(c), s being the scale of an element's block; c where dead.

A change of ranks and a save want it of every element, while others wait: one pass on a CPU.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from thinwire.comm.kernels.blocks import BlockTable

PIECE = 16
"""Blocks of which errors are worked out at a time, where it takes several passes."""


def left_out_(sum_c: Tensor, scale_b: Tensor, table: BlockTable, out_c: Tensor) -> Tensor:
    """out <- e. Returns it.

    sum: float or bfloat16[c]. scale: float[b]. table: their blocks. out: float[c]; may be the sums themselves.
    """
    if sum_c.device.type == "cpu" and sum_c.dtype == out_c.dtype and sum_c.dtype in (torch.float32, torch.float64):
        # Not at the top: importing numba takes half a second, which only vectors on a CPU need.
        from thinwire.comm.kernels.arrays import blocks_of, scales_of, values_of
        from thinwire.comm.kernels.cpu_loops import left_out

        blocks = blocks_of(table)
        left_out(
            values_of(sum_c, table), scales_of(scale_b, table), blocks.starts, blocks.dead, values_of(out_c, table)
        )
        return out_c
    return reference(sum_c, scale_b, table, out_c)


def reference(sum_c: Tensor, scale_b: Tensor, table: BlockTable, out_c: Tensor) -> Tensor:
    """The same in plain torch on any device, some blocks at a time, without scratch of a whole bucket."""
    bounds, dead_k = [*table.starts[:-1:PIECE].tolist(), table.numel], sum_c[table.dead].to(out_c)
    for (low, high), first in zip(pairwise(bounds), range(0, table.num_blocks, PIECE), strict=True):
        piece_c, blocks = sum_c[low:high], slice(first, first + PIECE)
        lengths = table.starts[first : first + PIECE + 1].diff()
        scale_c = torch.repeat_interleave(scale_b[blocks], lengths, output_size=high - low)
        torch.sub(piece_c, torch.where(piece_c >= 0, scale_c, -scale_c), out=out_c[low:high])
    out_c[table.dead] = dead_k  # of which nothing was sent
    return out_c
