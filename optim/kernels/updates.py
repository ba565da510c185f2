"""The loops of `loops` on slices of torch's vectors, on as many threads as torch uses.

Slices are float[s] of the flat vectors: contiguous, on the CPU, s and where they begin multiples of 8. What is written
gets a new version, as by an operation of torch: who keeps what follows from a vector looks at that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from thinwire.comm.kernels.arrays import blocks_of, rows_of, sums_of, values_of
from thinwire.comm.kernels.blocks import BlockTable, RowMemory
from thinwire.comm.kernels.choose import CPU_DTYPES
from thinwire.comm.kernels.threads import MIN_BLOCKS, Threads
from thinwire.comm.layout import BYTE, Span
from thinwire.optim.engine.hyperparameters import AdamHyper

LEAST = 1 << 13
"""Eights of elements that a thread must get to be worth waking: 64 Ki, tens of microseconds."""
TILE = 1 << 12
"""Elements whose sums are formed by themselves: the result does not depend on the number of threads."""
LEAST_TILES = 16


def fits(vector_s: Tensor) -> bool:
    """Is there a loop for vectors like this one? Else the chain of torch operations computes the same."""
    return vector_s.device.type == "cpu" and vector_s.dtype in CPU_DTYPES


def adam_(p_s: Tensor, g_s: Tensor, m_s: Tensor, v_s: Tensor, h: AdamHyper, bias_step: int | None) -> None:
    """adam_math.step_ of one slice. p, m, v: modified. Source: Loshchilov and Hutter 2019, Alg. 2."""
    correction1 = 1.0 if bias_step is None else 1 - h.beta1**bias_step
    correction2 = 1.0 if bias_step is None else 1 - h.beta2**bias_step
    numbers = 1 - h.beta1, h.beta2, 1 - h.beta2, correction2**0.5, h.eps, 1 - h.lr * h.weight_decay, h.lr / correction1
    _run(_loops().adam, (p_s, g_s, m_s, v_s), numbers)
    increment_version((p_s, m_s, v_s))


def descend_(p_c: Tensor, v_c: Tensor, rows: RowMemory, lr: float, decay: float, eps: float, table: BlockTable) -> None:
    """As descend.in_torch_, bit for bit. p: modified."""
    p, loop = values_of(p_c, table), _loops().descend
    eps, rate, keep, one = map(p.dtype.type, (eps, lr, 1 - decay, 1))
    given = p, sums_of(v_c, table), rows_of(rows, table), eps, rate, keep, one, blocks_of(table)
    threads = _threads(torch.get_num_threads())
    threads.split(table.num_blocks, MIN_BLOCKS, lambda first, stop: loop(first, stop, *given))
    increment_version(p_c)


def local_(p_s: Tensor, g_s: Tensor, m_s: Tensor, u_s: Tensor, divisor_s: Tensor, h: AdamHyper, keep: float) -> None:
    """zero_one_adam.local_step of one slice. p, m, u: modified."""
    _run(_loops().local, (p_s, g_s, m_s, u_s, divisor_s), (1 - h.beta1, keep, h.lr))
    increment_version((p_s, m_s, u_s))


def propose_(z_s: Tensor, g_s: Tensor, m_s: Tensor, u_s: Tensor, h: AdamHyper, keep: float) -> None:
    """zero_one_adam.propose_ of one slice. z: modified."""
    _run(_loops().propose, (z_s, g_s, m_s, u_s), (1 - h.beta1, keep, h.lr))
    increment_version(z_s)


def receive_(
    p_s: Tensor,
    start_s: Tensor,
    z_s: Tensor,
    divisor_s: Tensor,
    m_s: Tensor,
    u_s: Tensor,
    weight: float,
    longest: float,
    kept: float,
) -> None:
    """zero_one_adam.receive_ of one slice. p, m, u: modified. start may be p."""
    _run(_loops().receive, (p_s, start_s, z_s, divisor_s, m_s, u_s), (weight, longest, kept))
    increment_version((p_s, m_s, u_s))


def scaled_momentum_(z_s: Tensor, g_s: Tensor, m_s: Tensor, beta1: float, scaling_1: Tensor) -> None:
    """z <- k (beta1 m + (1 - beta1) g). z: modified. scaling: float[1]."""
    _run(_loops().scaled_momentum, (z_s, g_s, m_s), (1 - beta1,), (scaling_1,))
    increment_version(z_s)


@dataclass(frozen=True, slots=True, eq=False)
class Tiles:
    """Runs of at most TILE elements of the flat vectors, each in one tensor. tensor_k: its number among those given."""

    starts_k: Tensor
    stops_k: Tensor
    tensor_k: Tensor
    found_4k: Tensor
    """Scratch."""

    @classmethod
    def of(cls, live: tuple[Span, ...], like: Tensor) -> Tiles:
        """Of tensors with these elements."""
        spans = [
            (at, min(at + TILE, stop), t) for t, (start, stop) in enumerate(live) for at in range(start, stop, TILE)
        ]
        starts_k, stops_k, tensor_k = torch.tensor(spans, dtype=torch.int64).unbind(1)
        return cls(starts_k.contiguous(), stops_k.contiguous(), tensor_k.contiguous(), like.new_zeros((4, len(spans))))

    def largest_t(self, row: int, num_tensors: int) -> Tensor:
        """Each tensor's largest of what was found, at least 0."""
        return self.found_4k.new_zeros(num_tensors).scatter_reduce_(0, self.tensor_k, self.found_4k[row], "amax")

    def norms_t(self, row: int, num_tensors: int) -> Tensor:
        """Each tensor's norm, of the sums of squares that were found."""
        return self.found_4k.new_zeros(num_tensors).index_add_(0, self.tensor_k, self.found_4k[row]).sqrt_()


def lamb_measure_(
    tiles: Tiles,
    p_N: Tensor,
    z_N: Tensor,
    m_N: Tensor,
    v_N: Tensor,
    fresh_v_N: Tensor,
    scaling_t: Tensor,
    h: AdamHyper,
) -> None:
    """m <- z / k, the fresh variance, and what LAMB's factors need, into `tiles`. m, fresh_v: modified."""
    vectors = tiles.starts_k, tiles.stops_k, tiles.tensor_k, p_N, z_N, m_N, v_N, fresh_v_N, scaling_t
    numbers = h.beta1, 1 - h.beta1, h.beta2, 1 - h.beta2, h.eps, h.weight_decay
    _split(_loops().lamb_measure, len(tiles.starts_k), LEAST_TILES, vectors, numbers, (tiles.found_4k,), p_N)
    increment_version((m_N, fresh_v_N, tiles.found_4k))


def lamb_move_(tiles: Tiles, p_N: Tensor, m_N: Tensor, v_N: Tensor, rate_t: Tensor, h: AdamHyper) -> None:
    """p <- p - rate_l (m / (sqrt(v) + eps) + weight_decay p). p: modified."""
    vectors = tiles.starts_k, tiles.stops_k, tiles.tensor_k, p_N, m_N, v_N
    _split(_loops().lamb_move, len(tiles.starts_k), LEAST_TILES, vectors, (h.eps, h.weight_decay), (rate_t,), p_N)
    increment_version(p_N)


@cache
def _loops() -> Any:
    # Not at the top: importing numba takes half a second, which only vectors on a CPU need.
    from thinwire.optim.kernels import loops

    return loops


@cache
def _threads(most: int) -> Threads:
    return Threads(most)


def _run(
    loop: Callable[..., None], slices: tuple[Tensor, ...], numbers: tuple[float, ...], last: tuple[Tensor, ...] = ()
) -> None:
    """Over all eights of the slices, which have one length and type."""
    first = slices[0]
    for x in slices:
        if x.shape != first.shape or x.dtype != first.dtype or not x.is_contiguous() or len(x) % BYTE:
            raise ValueError(
                f"slices of shapes {[list(v.shape) for v in slices]} and types {[v.dtype for v in slices]} must be "
                f"alike, contiguous, and whole multiples of {BYTE} elements"
            )
    _split(loop, first.numel() // BYTE, LEAST, slices, numbers, last, first)


def _split(
    loop: Callable[..., None],
    count: int,
    least: int,
    vectors: tuple[Tensor, ...],
    numbers: tuple[float, ...],
    last: tuple[Tensor, ...],
    like: Tensor,
) -> None:
    number = like.numpy().dtype.type
    given = *(x.numpy() for x in vectors), *map(number, numbers), *(x.numpy() for x in last)
    _threads(torch.get_num_threads()).split(count, least, lambda start, stop: loop(start, stop, *given))
