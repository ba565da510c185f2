"""Which kernels a vector gets: numba's on the CPU, plain torch elsewhere."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from thinwire.comm.kernels import fused_reference
from thinwire.comm.kernels.blocks import BlockTable


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
        g_c: Tensor,
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
        g_c: Tensor,
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
    return fused_reference


def warm_up(dtype: torch.dtype) -> None:
    """Compile the kernels of the CPU for this dtype, or load them from numba's cache."""
