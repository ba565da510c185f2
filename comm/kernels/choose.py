"""Which kernels a vector gets: numba's on the CPU, CUDA's on a GPU where CuPy is, plain torch elsewhere."""

from __future__ import annotations

import logging
from functools import cache

import torch
from torch import Tensor

from thinwire.comm.kernels.added import Lerp, MeanOfRows, ScaledLerp, Vector
from thinwire.comm.kernels.bf16 import NONE, Noise, rounded
from thinwire.comm.kernels.blocks import BlockTable, Pieces, RowMemory
from thinwire.comm.kernels.cuda import int8
from thinwire.comm.kernels.cuda.kernels import CudaKernels, source
from thinwire.comm.kernels.cuda.launch import Launcher
from thinwire.comm.kernels.fused_reference import PLAIN, Kernels
from thinwire.comm.kernels.kept import larger_than, left_out_
from thinwire.comm.layout import BYTE, VectorLayout

logger = logging.getLogger(__name__)
CPU_DTYPES = (torch.float32, torch.float64)
PIECE = 1 << 20
"""Elements that are narrowed at a time in plain torch, for which there is scratch."""


def kernels_for(device: torch.device, dtype: torch.dtype, threads: int = 1) -> Kernels:
    """The fastest kernels for contiguous vectors of this device and dtype. threads: cores that one call may use."""
    if device.type == "cpu" and dtype in CPU_DTYPES:
        return _on_cpu(threads)
    return _on_cuda(device, dtype) or PLAIN


def reads_narrow(device: torch.device, dtype: torch.dtype) -> bool:
    """Do kernels read gradients in bfloat16 beside vectors of this type as they are? Else they are copied anyway."""
    return _on_cuda(device, dtype) is not None


def narrow(x_c: Tensor, noise: Noise, out_c: Tensor) -> None:
    """out <- bf16.rounded(x): bfloat16[c] <- float32[c], contiguous, c a multiple of 8. out: modified."""
    if x_c.device.type == "cpu":
        _narrow_on_cpu(x_c, noise, out_c)
    elif (kernels := _on_cuda(x_c.device, x_c.dtype)) is not None:
        kernels.narrow(x_c, noise, out_c)
    else:
        for at in range(0, x_c.numel(), PIECE):
            part = x_c[at : at + PIECE]
            out_c[at : at + PIECE].copy_(rounded(part, noise.at(noise.start + at)))


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
    kernels, like = _on_cpu(1), torch.zeros(BYTE, dtype=dtype, device="cpu")
    table = BlockTable.from_spans([[(0, BYTE)]], [], like)
    last, out = (RowMemory.of(torch.zeros(table.wire_bytes, dtype=torch.uint8, device="cpu"), dtype) for _ in range(2))
    c_c, x_c, scale_b = like.to(sums or dtype, copy=True), like.clone(), like[:1].clone()
    if c_c.dtype != dtype:
        narrow(x_c, NONE, c_c)
    lerp = [x_c], 0.5, last
    kernels.encode(c_c, scale_b, Vector(x_c), table, out)
    kernels.encode(c_c, scale_b, Lerp(*lerp), table, out)
    kernels.encode(c_c, scale_b, MeanOfRows(last, 1), table, out)
    pieces = Pieces.of(table, 0, VectorLayout.single(BYTE))
    wide_c = like.clone()  # with factors sums are kept in full
    kernels.encode(wide_c, scale_b, ScaledLerp(*lerp, x_c[:1] + 1, pieces), table, out)
    kernels.decode(out, table, x_c)
    larger_than(x_c, scale_b, table, 0.0, 1)
    left_out_(x_c, scale_b, table, x_c)


@cache
def warm_up_int8(dtype: torch.dtype) -> None:
    """The same of the loops of 8-bit values."""
    if dtype not in CPU_DTYPES:
        return
    from thinwire.comm.kernels import int8_cpu

    x_c, left_c = torch.ones(BYTE, dtype=dtype, device="cpu"), torch.ones(BYTE, dtype=dtype, device="cpu")
    scale_b, q_c = torch.zeros(1, dtype=torch.float32, device="cpu"), torch.zeros(BYTE, dtype=torch.int8, device="cpu")
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
    launcher = cuda_launcher(device, dtype, source())
    return None if launcher is None else CudaKernels(launcher)


@cache
def _on_cpu(threads: int) -> Kernels:
    # Not at the top: importing numba takes half a second, which only vectors on a CPU need.
    from thinwire.comm.kernels.cpu import CpuKernels

    return CpuKernels(threads)


def _narrow_on_cpu(x_c: Tensor, noise: Noise, out_c: Tensor) -> None:
    from thinwire.comm.kernels import cpu  # not at the top: as above

    if x_c.dtype != torch.float32 or x_c.shape != out_c.shape or x_c.numel() % BYTE or not x_c.is_contiguous():
        raise ValueError(
            f"{x_c.dtype}{list(x_c.shape)} into {out_c.dtype}{list(out_c.shape)}: must be a contiguous vector of "
            "torch.float32, a multiple of 8 long, into one of torch.bfloat16 of the same length"
        )
    cpu.narrow(x_c.numpy(), noise, out_c.view(torch.uint16).numpy())
