"""The loops of `loops` on slices of torch's vectors, on as many threads as torch uses; the kernels of `cuda` on a GPU.

Slices are float[s] of the flat vectors: contiguous, s and where they begin multiples of 8. What is written
gets a new version, as by an operation of torch: who keeps what follows from a vector looks at that.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from thinwire.comm.kernels.arrays import blocks_of, rows_of, sums_of, values_of
from thinwire.comm.kernels.blocks import BlockTable, RowMemory
from thinwire.comm.kernels.choose import CPU_DTYPES, cuda_launcher
from thinwire.comm.kernels.cuda.launch import THREADS, Argument, Launcher
from thinwire.comm.kernels.cuda.tables import NARROW, records_of
from thinwire.comm.kernels.fused_reference import decoded, root
from thinwire.comm.kernels.threads import MIN_BLOCKS, Threads
from thinwire.comm.layout import BYTE
from thinwire.optim.engine.hyperparameters import AdamHyper

LEAST = 1 << 13
"""Eights of elements that a thread must get to be worth waking: 64 Ki, tens of microseconds."""
SPAN = 8 * THREADS
"""Elements of a vector that one block of threads does."""
ALIGNMENT = 16
"""Of what is read four values at a time, in bytes."""


def fits(vector_s: Tensor) -> bool:
    """Is there a loop for vectors like this one? Else the chain of torch operations computes the same."""
    return vector_s.device.type == "cpu" and vector_s.dtype in CPU_DTYPES


def in_one_pass(vector_s: Tensor) -> bool:
    """The same of the updates here, which have kernels for GPUs too."""
    return fits(vector_s) or _on_cuda(vector_s) is not None


def adam_(p_s: Tensor, g_s: Tensor, m_s: Tensor, v_s: Tensor, h: AdamHyper, bias_step: int | None) -> None:
    """adam_math.step_ of one slice. p, m, v: modified. Source: Loshchilov and Hutter 2019, Alg. 2."""
    correction1, correction2 = h.corrections(bias_step)
    numbers = 1 - h.beta1, h.beta2, 1 - h.beta2, correction2**0.5, h.eps, 1 - h.lr * h.weight_decay, h.lr / correction1
    _run("adam", (p_s, g_s, m_s, v_s), numbers)
    increment_version((p_s, m_s, v_s))


def mix_and_descend_(p_s: Tensor, g_s: Tensor, m_s: Tensor, v_s: Tensor, h: AdamHyper, weight: float) -> None:
    """m <- m + weight (g - m); p <- p - lr (m / (sqrt v + eps) + weight_decay p), of one slice on a CPU.

    p, m: modified. Source: Tang et al. 2021, Alg. 1.
    """
    _run("mix", (p_s, g_s, m_s, v_s), (weight, h.eps, h.lr, 1 - h.lr * h.weight_decay, 1.0))
    increment_version((p_s, m_s))


def descend_(p_c: Tensor, v_c: Tensor, rows: RowMemory, lr: float, decay: float, eps: float, table: BlockTable) -> None:
    """p <- p (1 - decay) - lr (m / (sqrt v + eps)), m being what the rows say; 0 where dead.

    In one pass where there is a loop or a kernel, elsewhere as a chain of torch operations: equal to the last bit, so
    that replicas stay equal. p: float[c], modified. v: float[c], or bfloat16[c] beside float32. decay: lr x weight
    decay. table: where in the rows the blocks of these elements are. Source: Tang et al. 2021, Alg. 1, l. 13.
    """
    if (cuda := _on_cuda(p_c)) is not None:
        cuda.descend(p_c, v_c, rows, (eps, lr, 1 - decay), table)
    elif fits(p_c):
        p, loop = values_of(p_c, table), _loops().descend
        numbers = map(p.dtype.type, (eps, lr, 1 - decay, 1))
        given = p, sums_of(v_c, table), rows_of(rows, table), *numbers, blocks_of(table)
        over(table.num_blocks, MIN_BLOCKS, loop, *given)
    else:
        descend_in_torch_(p_c, v_c, rows, lr, decay, eps, table)
        return
    increment_version(p_c)


def descend_in_torch_(
    p_c: Tensor, v_c: Tensor, rows: RowMemory, lr: float, decay: float, eps: float, table: BlockTable
) -> None:
    """descend_ as a chain of torch operations, on any device and in any float dtype: the definition."""
    step_c = decoded(rows, table).mul_(root(v_c.to(p_c.dtype)).add_(eps).reciprocal_()).mul_(lr)
    if decay:
        p_c.mul_(1 - decay)
    p_c.sub_(step_c)
    p_c[table.dead] = 0


def first_local_(
    p_s: Tensor,
    g_s: Tensor,
    m_s: Tensor,
    u_s: Tensor,
    begun_s: Tensor,
    v_s: Tensor,
    h: AdamHyper,
    keep: float,
    lost: Tensor,
) -> None:
    """zero_one_round.local_step of one slice, the first of a round. p, m, u, begun: modified; u is not read.

    lost: a bool of no dimension; on a GPU g counts as zero where it holds, on a CPU g is zero then.
    On a CPU begun may be u: then it is not there afterwards.
    """
    _run("first_local", (p_s, g_s, m_s, u_s, begun_s, v_s), (1 - h.beta1, keep, h.lr, h.eps), lost)
    increment_version((p_s, m_s, u_s, begun_s))


def local_(
    p_s: Tensor, g_s: Tensor, m_s: Tensor, u_s: Tensor, v_s: Tensor, h: AdamHyper, keep: float, lost: Tensor
) -> None:
    """zero_one_round.local_step of one slice. p, m, u: modified. lost: as in first_local_."""
    _run("local", (p_s, g_s, m_s, u_s, v_s), (1 - h.beta1, keep, h.lr, h.eps), lost)
    increment_version((p_s, m_s, u_s))


def first_proposal_(z_s: Tensor, g_s: Tensor, m_s: Tensor, h: AdamHyper) -> None:
    """zero_one_round.propose_ of one slice, where the round has no step yet. z: modified."""
    _run("first_proposal", (z_s, g_s, m_s), (1 - h.beta1, h.lr))
    increment_version(z_s)


def propose_(z_s: Tensor, g_s: Tensor, m_s: Tensor, u_s: Tensor, h: AdamHyper, keep: float) -> None:
    """zero_one_round.propose_ of one slice. z: modified."""
    _run("propose", (z_s, g_s, m_s, u_s), (1 - h.beta1, keep, h.lr))
    increment_version(z_s)


Receiving = tuple[float, float, float, float]
"""The unit of what was sent, S, the longest step, K."""


def receive_(
    p_s: Tensor,
    start_s: Tensor,
    z_s: Tensor,
    v_s: Tensor,
    m_s: Tensor,
    numbers: Receiving,
    eps: float,
) -> None:
    """zero_one_round.Receipt of one slice of floats. p, m: modified. start may be p."""
    _run("receive", (p_s, start_s, z_s, v_s, m_s), (*numbers, eps))
    increment_version((p_s, m_s))


def receive_own_(
    p_s: Tensor, g_s: Tensor, v_s: Tensor, m_s: Tensor, h: AdamHyper, unit: float, numbers: Receiving
) -> None:
    """receive_ of what first_proposal_ gives over unit, on a CPU. p, m: modified."""
    _run("receive_own", (p_s, g_s, v_s, m_s), (1 - h.beta1, h.lr / unit, *numbers, h.eps))
    increment_version((p_s, m_s))


def receive_own_round_(
    p_s: Tensor, g_s: Tensor, v_s: Tensor, m_s: Tensor, u_s: Tensor, h: AdamHyper, unit: float, numbers: Receiving
) -> None:
    """receive_ of what propose_ gives over unit, on a CPU, in the pass that forms it. p, m: modified.

    numbers: as there, but the last is what this step's decay leaves of x, for p is where the steps before have led.
    """
    given = 1 - h.beta1, h.lr / unit, numbers[-1] / unit
    _run("receive_own_round", (p_s, g_s, v_s, m_s, u_s), (*given, *numbers, h.eps))
    increment_version((p_s, m_s))


def receive_rows_(
    p_c: Tensor,
    start_c: Tensor,
    v_c: Tensor,
    m_c: Tensor,
    rows: RowMemory,
    numbers: Receiving,
    eps: float,
    table: BlockTable,
) -> None:
    """receive_ of what the rows say, bit for bit; 0 where dead. table: where in the rows the blocks of c are."""
    if (cuda := _on_cuda(p_c)) is not None:
        cuda.over_rows("receive_rows", (p_c, start_c, v_c, m_c), rows, (*numbers, eps), table)
        increment_version((p_c, m_c))
        return
    p, loop = values_of(p_c, table), _loops().receive_rows
    vectors = p, *(values_of(x, table) for x in (start_c, v_c, m_c))
    given = *vectors, rows_of(rows, table), *map(p.dtype.type, (*numbers, eps)), blocks_of(table)
    over(table.num_blocks, MIN_BLOCKS, loop, *given)
    increment_version((p_c, m_c))


def over(count: int, least: int, loop: Callable[..., None], *given: Any) -> None:
    """loop(first, stop, *given) over [0, count), on as many threads as torch uses, each with at least `least`."""
    _threads(torch.get_num_threads()).split(count, least, lambda first, stop: loop(first, stop, *given))


@cache
def _loops() -> Any:
    # Not at the top: importing numba takes half a second, which only vectors on a CPU need.
    from thinwire.optim.kernels import loops

    return loops


def launcher_for(like: Tensor, text: str) -> Launcher | None:
    """What launches the kernels of this source for vectors like this one; None where they are not on a GPU."""
    return None if like.device.type == "cpu" else cuda_launcher(like.device, like.dtype, text)


def _on_cuda(like: Tensor) -> CudaUpdates | None:
    return None if like.device.type == "cpu" else _cuda_of(like.device, like.dtype)


@cache
def _cuda_of(device: torch.device, dtype: torch.dtype) -> CudaUpdates | None:
    launcher = cuda_launcher(device, dtype, source())
    return None if launcher is None else CudaUpdates(launcher)


@cache
def _threads(most: int) -> Threads:
    return Threads(most)


def _run(name: str, slices: tuple[Tensor, ...], numbers: tuple[float, ...], *told: Tensor) -> None:
    """The loop, or the kernel, of this name over all eights of the slices, which have one length and type.

    told: what a kernel alone looks at.
    """
    first = slices[0]
    for x in slices:
        if x.shape != first.shape or x.dtype != first.dtype or not x.is_contiguous() or len(x) % BYTE:
            raise ValueError(
                f"slices of shapes {[list(v.shape) for v in slices]} and types {[v.dtype for v in slices]} must be "
                f"alike, contiguous, and whole multiples of {BYTE} elements"
            )
    if (cuda := _on_cuda(first)) is not None:
        cuda.run(name, slices, numbers, *told)
        return
    number, loop = first.numpy().dtype.type, getattr(_loops(), name)
    over(first.numel() // BYTE, LEAST, loop, *(x.numpy() for x in slices), *map(number, numbers))


@cache
def source() -> str:
    """updates.cu."""
    return files("thinwire.optim.kernels.cuda").joinpath("updates.cu").read_text(encoding="utf-8")


class CudaUpdates:
    """Updates of contiguous float32 slices where this launcher launches."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    def run(self, name: str, slices: tuple[Tensor, ...], numbers: tuple[float, ...], *told: Tensor) -> None:
        """The kernel of this name over all elements of the slices, which have one length. Raises: ValueError."""
        for x in slices:
            if x.data_ptr() % ALIGNMENT:
                raise ValueError(f"a slice at address {x.data_ptr()} must begin at a multiple of {ALIGNMENT}")
        for one in told:
            if one.dtype != torch.bool or one.dim() or one.device != slices[0].device:
                raise ValueError(
                    f"{one.dtype}{list(one.shape)} on {one.device}: must be a bool without dimensions on "
                    f"{slices[0].device}"
                )
        numel = slices[0].numel()
        if numel:
            arguments: tuple[Argument, ...] = (*slices, *map(np.float32, numbers), *told, np.int64(numel))
            self._launcher.launch(name, -(-numel // SPAN), 0, arguments)

    def over_rows(
        self, name: str, vectors: tuple[Tensor, ...], rows: RowMemory, numbers: tuple[float, ...], table: BlockTable
    ) -> None:
        """The kernel of this name, along what rows say of the table's blocks. Raises: ValueError."""
        for x in vectors:
            _require(x, table, table.live.dtype)
        self._over_rows(name, vectors, rows, numbers, table)

    def descend(self, p_c: Tensor, v_c: Tensor, rows: RowMemory, numbers: tuple[float, ...], table: BlockTable) -> None:
        """As over_rows; v may be bfloat16."""
        _require(p_c, table, table.live.dtype)
        _require(v_c, table, NARROW if v_c.dtype == NARROW else table.live.dtype)
        self._over_rows("descend_narrow" if v_c.dtype == NARROW else "descend", (p_c, v_c), rows, numbers, table)

    def _over_rows(
        self, name: str, vectors: tuple[Tensor, ...], rows: RowMemory, numbers: tuple[float, ...], table: BlockTable
    ) -> None:
        if rows.bytes_B.numel() < table.wire_bytes:
            raise ValueError(f"wire memory of {rows.bytes_B.numel()} bytes must have at least {table.wire_bytes}")
        if table.num_blocks:
            records, given = records_of(table), map(np.float32, numbers)
            wire: tuple[Argument, ...] = (rows.values_V, rows.bytes_B)
            arguments: tuple[Argument, ...] = (*vectors, *wire, *given, records.blocks, records.dead)
            self._launcher.launch(name, table.num_blocks, 0, arguments)


def _require(x: Tensor, table: BlockTable, dtype: torch.dtype) -> None:
    fits = x.shape == (table.numel,) and x.dtype == dtype and x.is_contiguous()
    if not fits or x.data_ptr() % ALIGNMENT:
        raise ValueError(
            f"a vector of {x.dtype}, shape {tuple(x.shape)} at address {x.data_ptr()} must be contiguous {dtype} of "
            f"shape ({table.numel},), at a multiple of {ALIGNMENT}"
        )
