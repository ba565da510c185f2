"""Which errors of kept sums reach a bound? One pass over the sums, for those few that are worth sending.

e = c - s sgn(c)      picked where |e| >= bound and c is not 0, as it is where an element is dead
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from thinwire.comm.kernels.blocks import BlockTable

if TYPE_CHECKING:
    from thinwire.comm.kernels.compiled import Array


def larger_than(sum_c: Tensor, scale_b: Tensor, table: BlockTable, bound: float, most: int) -> tuple[Tensor, Tensor]:
    """Positions int64[k] and errors float[k], ascending, of the first `most` elements at most. New tensors.

    sum: float[c], kept sums of one chunk. scale: float[b]. table: its blocks.
    """
    if sum_c.device.type == "cpu" and sum_c.dtype in (torch.float32, torch.float64):
        return _on_cpu(sum_c, scale_b, table, bound, most)
    return reference(sum_c, scale_b, table, bound, most)


def reference(sum_c: Tensor, scale_b: Tensor, table: BlockTable, bound: float, most: int) -> tuple[Tensor, Tensor]:
    """The same in plain torch, on any device."""
    scale_c = torch.repeat_interleave(scale_b, table.starts.diff(), output_size=table.numel)
    size_c = sum_c.abs().sub_(scale_c)
    at_k = ((size_c.abs() >= bound) & (sum_c != 0)).nonzero().view(-1)[:most]
    return at_k, torch.where(sum_c[at_k] >= 0, size_c[at_k], -size_c[at_k])


def _on_cpu(sum_c: Tensor, scale_b: Tensor, table: BlockTable, bound: float, most: int) -> tuple[Tensor, Tensor]:
    # Not at the top: importing numba takes half a second, which only vectors on a CPU need.
    from thinwire.comm.kernels.arrays import blocks_of, scales_of, values_of
    from thinwire.comm.kernels.cpu_loops import pick

    at_k, error_k = torch.empty(most, dtype=torch.int64), sum_c.new_empty(most)
    sums: Array = values_of(sum_c, table)
    limit = sums.dtype.type(bound)
    found = pick(sums, scales_of(scale_b, table), blocks_of(table).starts, limit, at_k.numpy(), error_k.numpy())
    return at_k[:found], error_k[:found]
