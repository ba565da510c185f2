"""Which kernels a vector gets: numba's on the CPU, plain torch elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from thinwire.comm.kernels import fused_reference
from thinwire.comm.kernels.blocks import BlockTable
from thinwire.comm.layout import BYTE

CPU_DTYPES = (torch.float32, torch.float64)
ROW_BYTES = 2 * BYTE


class Kernels(Protocol):
    """The fused kernels; fused_reference says what each computes."""

    def encode_sum(
        self, c_c: Tensor, scale_b: Tensor, x_c: Tensor, table: BlockTable, out_scale_b: Tensor, out_bits_B: Tensor
    ) -> None:
        """As fused_reference.encode_sum."""

    def encode_momentum(
        self,
        c_c: Tensor,
        scale_b: Tensor,
        g_parts: Sequence[Tensor],
        beta1: float,
        m_scale_b: Tensor,
        m_bits_B: Tensor,
        m_table: BlockTable,
        table: BlockTable,
        out_scale_b: Tensor,
        out_bits_B: Tensor,
    ) -> None:
        """As fused_reference.encode_momentum."""

    def serve(
        self,
        b_c: Tensor,
        scale_b: Tensor,
        in_scale_nb: Tensor,
        in_bits_nB: Tensor,
        table: BlockTable,
        out_scale_b: Tensor,
        out_bits_B: Tensor,
    ) -> None:
        """As fused_reference.serve."""

    def decode(self, scale_b: Tensor, bits_B: Tensor, table: BlockTable, out_c: Tensor) -> None:
        """As fused_reference.decode."""

    def descend(
        self,
        p_c: Tensor,
        divisor_c: Tensor,
        scale_b: Tensor,
        bits_B: Tensor,
        lr: float,
        decay: float,
        table: BlockTable,
    ) -> None:
        """As fused_reference.descend."""

    def undo_sum(self, c_c: Tensor, scale_b: Tensor, x_c: Tensor, written_scale_b: Tensor, table: BlockTable) -> None:
        """As fused_reference.undo_sum."""

    def undo_momentum(
        self,
        c_c: Tensor,
        scale_b: Tensor,
        g_parts: Sequence[Tensor],
        beta1: float,
        m_scale_b: Tensor,
        m_bits_B: Tensor,
        written_scale_b: Tensor,
        table: BlockTable,
    ) -> None:
        """As fused_reference.undo_momentum."""

    def undo_serve(
        self,
        b_c: Tensor,
        scale_b: Tensor,
        in_scale_nb: Tensor,
        in_bits_nB: Tensor,
        written_scale_b: Tensor,
        table: BlockTable,
    ) -> None:
        """As fused_reference.undo_serve."""

    def all_finite(self, scale_b: Tensor) -> Tensor | bool:
        """As fused_reference.all_finite."""


def kernels_for(device: torch.device, dtype: torch.dtype, threads: int = 1) -> Kernels:
    """The fastest kernels for contiguous vectors of this device and dtype. threads: cores that one call may use."""
    if device.type == "cpu" and dtype in CPU_DTYPES:
        return _on_cpu(threads)
    return fused_reference


def warm_up(dtype: torch.dtype) -> None:
    """Compile the kernels of the CPU for this dtype, or load them from numba's cache: seconds, or a part of one.

    Without it the first call of each compiles, which peers may take for a rank that is gone. The cache lies beside
    the modules where that can be written, else in the user's cache folder; NUMBA_CACHE_DIR names another.
    """
    if dtype not in CPU_DTYPES:
        return
    kernels, like = _on_cpu(1), torch.zeros(BYTE, dtype=dtype)
    table = BlockTable.from_spans([(0, BYTE)], [], like)
    c_c, x_c, scale_b, row_scale_b = like.clone(), like.clone(), like[:1].clone(), like[:1].clone()
    rows_nB = torch.zeros((1, ROW_BYTES), dtype=torch.uint8)
    in_scale_nb, in_bits_nB, bits_B = rows_nB[:, :BYTE].view(dtype)[:, :1], rows_nB[:, -1:], rows_nB[0, :1].clone()
    kernels.encode_sum(c_c, scale_b, x_c, table, row_scale_b, bits_B)
    kernels.undo_sum(c_c, scale_b, x_c, row_scale_b, table)
    kernels.encode_momentum(c_c, scale_b, [x_c], 0.9, row_scale_b, bits_B, table, table, scale_b.clone(), bits_B)
    kernels.undo_momentum(c_c, scale_b, [x_c], 0.9, row_scale_b, bits_B, scale_b.clone(), table)
    kernels.serve(c_c, scale_b, in_scale_nb, in_bits_nB, table, row_scale_b, bits_B)
    kernels.undo_serve(c_c, scale_b, in_scale_nb, in_bits_nB, row_scale_b, table)
    kernels.decode(row_scale_b, bits_B, table, x_c)
    kernels.descend(c_c, x_c, row_scale_b, bits_B, 0.1, 0.0, table)
    kernels.all_finite(row_scale_b)


@cache
def _on_cpu(threads: int) -> Kernels:
    # Not at the top: importing numba takes half a second, which only vectors on a CPU need.
    from thinwire.comm.kernels.cpu import CpuKernels

    return CpuKernels(threads)
