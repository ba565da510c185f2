"""Which kernels a vector gets: numba's on the CPU, CUDA's on a GPU where CuPy is, plain torch elsewhere."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from thinwire.comm.kernels import fused_reference
from thinwire.comm.kernels.bf16 import NONE, Noise, narrow
from thinwire.comm.kernels.blocks import BlockTable, Pieces, RowMemory
from thinwire.comm.kernels.cuda import int8
from thinwire.comm.kernels.cuda.launch import Launcher
from thinwire.comm.kernels.largest import larger_than
from thinwire.comm.kernels.left_out import left_out_
from thinwire.comm.layout import BYTE, VectorLayout

if TYPE_CHECKING:  # it imports this module's Kernels
    from thinwire.comm.kernels.cuda.kernels import CudaKernels

logger = logging.getLogger(__name__)
CPU_DTYPES = (torch.float32, torch.float64)


class Kernels(Protocol):
    """The fused kernels, each called once for a bucket or a chunk; fused_reference says what each computes.

    encode_* may leave the flags of rows as they are: flag() writes them. serve writes them.
    """

    def encode_sum(
        self, c_c: Tensor, scale_b: Tensor, x_c: Tensor, table: BlockTable, out: RowMemory, noise: Noise = NONE
    ) -> None:
        """As fused_reference.encode_sum."""

    def encode_lerp(
        self,
        c_c: Tensor,
        scale_b: Tensor,
        x_parts: Sequence[Tensor],
        weight: float,
        last: RowMemory,
        table: BlockTable,
        out: RowMemory,
        noise: Noise = NONE,
    ) -> None:
        """As fused_reference.encode_lerp."""

    def encode_scaled(
        self,
        c_c: Tensor,
        scale_b: Tensor,
        x_parts: Sequence[Tensor],
        weight: float,
        last: RowMemory,
        factor_r: Tensor,
        pieces: Pieces,
        table: BlockTable,
        out: RowMemory,
    ) -> None:
        """As fused_reference.encode_scaled."""

    def serve(
        self,
        b_c: Tensor,
        scale_b: Tensor,
        rows: RowMemory,
        num_rows: int,
        table: BlockTable,
        out: RowMemory,
        noise: Noise = NONE,
    ) -> None:
        """As fused_reference.serve."""

    def flag(self, table: BlockTable, out: RowMemory) -> None:
        """Of each row of `out` that has blocks: 1 where all of its scales are finite, else 0. out: modified."""

    def decode(self, rows: RowMemory, table: BlockTable, out_c: Tensor) -> None:
        """As fused_reference.decode."""


def kernels_for(device: torch.device, dtype: torch.dtype, threads: int = 1, sums: torch.dtype | None = None) -> Kernels:
    """The fastest kernels for contiguous vectors of this device and dtype. threads: cores that one call may use.

    sums: of kept sums, where they are of another.
    """
    if device.type == "cpu" and dtype in CPU_DTYPES:
        return _on_cpu(threads)
    return _on_cuda(device, dtype) or fused_reference


def reads_narrow(device: torch.device, dtype: torch.dtype) -> bool:
    """Do kernels read gradients in bfloat16 beside vectors of this type as they are? Else they are copied anyway."""
    return _on_cuda(device, dtype) is not None


def narrow_on_cuda(x_c: Tensor, noise: Noise, out_c: Tensor) -> bool:
    """bf16.narrow by a kernel, where there is one: else nothing is done."""
    kernels = _on_cuda(x_c.device, x_c.dtype)
    if kernels is not None:
        kernels.narrow(x_c, noise, out_c)
    return kernels is not None


@cache
def cuda_launcher(device: torch.device, dtype: torch.dtype, source: str) -> Launcher | None:
    """What launches this CUDA source for such vectors; None where that is not possible, which one line of the log says.

    The only place where that is decided. The source is compiled here, which takes seconds in each process.
    """
    if device.type != "cuda" or dtype != torch.float32:
        return None
    if torch.version.cuda is None:
        _say_missing("torch is built without CUDA")
        return None
    try:
        from thinwire.comm.kernels.cuda.by_cupy import CupyLauncher, UnusableCupy
    except ImportError as error:
        _say_missing(str(error))
        return None
    try:
        return CupyLauncher(source, device)
    except UnusableCupy as error:
        _say_missing(str(error))
        return None


def int8_launcher(device: torch.device, dtype: torch.dtype) -> Launcher | None:
    """What launches the kernels of 8-bit values for such vectors; None where there are none."""
    return cuda_launcher(device, dtype, int8.source()) if device.type != "cpu" else None


def warm_up(dtype: torch.dtype, sums: torch.dtype | None = None) -> None:
    """Compile the kernels of the CPU for this dtype, or load them from numba's cache: seconds, or a part of one.

    Without it the first call of each compiles, which peers may take for a rank that is gone. The cache lies beside
    the modules where that can be written, else in the user's cache folder; NUMBA_CACHE_DIR names another.
    sums: of kept sums, where they are of another.
    """
    if dtype not in CPU_DTYPES:
        return
    kernels, like = _on_cpu(1), torch.zeros(BYTE, dtype=dtype)
    table = BlockTable.from_spans([[(0, BYTE)]], [], like)
    last, out = (RowMemory.of(torch.zeros(table.wire_bytes, dtype=torch.uint8), dtype) for _ in range(2))
    c_c, x_c, scale_b = like.to(sums or dtype, copy=True), like.clone(), like[:1].clone()
    if c_c.dtype != dtype:
        narrow(x_c, NONE, c_c)
    kernels.encode_sum(c_c, scale_b, x_c, table, out)
    kernels.encode_lerp(c_c, scale_b, [x_c], 0.5, last, table, out)
    pieces = Pieces.of(table, 0, VectorLayout.single(BYTE))
    wide_c = like.clone()  # whoever has factors keeps sums in full
    kernels.encode_scaled(wide_c, scale_b, [x_c], 0.5, last, x_c[:1] + 1, pieces, table, out)
    kernels.serve(c_c, scale_b, last, 1, table, out)
    kernels.decode(out, table, x_c)
    larger_than(x_c, scale_b, table, 0.0, 1)
    left_out_(x_c, scale_b, table, x_c)


@cache
def warm_up_int8(dtype: torch.dtype) -> None:
    """The same of the loops of 8-bit values."""
    if dtype not in CPU_DTYPES:
        return
    from thinwire.comm.kernels import int8_cpu

    x_c, left_c = torch.ones(BYTE, dtype=dtype), torch.ones(BYTE, dtype=dtype)
    scale_b, q_c = torch.zeros(1), torch.zeros(BYTE, dtype=torch.int8)
    int8_cpu.encode(x_c, scale_b, q_c, BYTE)
    int8_cpu.decode(scale_b, q_c, x_c, BYTE)
    int8_cpu.encode_left(x_c, x_c, left_c, scale_b, q_c, BYTE)
    int8_cpu.mean_left([(scale_b.clone(), q_c.clone())], x_c, left_c, scale_b, q_c, BYTE)


@cache
def _say_missing(reason: str) -> None:
    major = (torch.version.cuda or "12").split(".")[0]
    logger.warning("cuda_kernels_missing reason=%r runs=%r install=thinwire[cuda%s]", reason, "plain torch", major)


@cache
def _on_cuda(device: torch.device, dtype: torch.dtype) -> CudaKernels | None:
    if device.type == "cpu":
        return None
    from thinwire.comm.kernels.cuda.kernels import CudaKernels, source  # it imports this module's Kernels

    launcher = cuda_launcher(device, dtype, source())
    return None if launcher is None else CudaKernels(launcher)


@cache
def _on_cpu(threads: int) -> Kernels:
    # Not at the top: importing numba takes half a second, which only vectors on a CPU need.
    from thinwire.comm.kernels.cpu import CpuKernels

    return CpuKernels(threads)
