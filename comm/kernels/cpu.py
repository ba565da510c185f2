"""The fused kernels for vectors on the CPU: the loops of cpu_loops on views of torch's memory, and on several threads.

fused_reference says what each computes. The blocks of a call are split over the threads; a block is the work of one,
so the result does not depend on their number. Nothing is allocated by torch, and scratch only by a thread's first call.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from torch import Tensor

from thinwire.comm.kernels import cpu_loops
from thinwire.comm.kernels.blocks import BlockTable
from thinwire.comm.kernels.cpu_loops import Array, Blocks, Rows
from thinwire.comm.kernels.fused_reference import require_same
from thinwire.comm.kernels.vectors import WORD

MIN_BLOCKS = 16
"""What a thread must get to be worth waking: 64 Ki values, tens of microseconds."""

_of_thread = threading.local()
_known_blocks: WeakKeyDictionary[BlockTable, Blocks] = WeakKeyDictionary()


class CpuKernels:
    """Kernels for contiguous vectors of float32 or float64. threads: cores that one call may use."""

    def __init__(self, threads: int = 1) -> None:
        if threads < 1:
            raise ValueError(f"threads = {threads}: must be at least 1")
        self._threads = threads
        self._pool: tuple[int, ThreadPoolExecutor] | None = None

    def encode_sum(
        self, c_c: Tensor, scale_b: Tensor, x_c: Tensor, table: BlockTable, out_scale_b: Tensor, out_bits_B: Tensor
    ) -> None:
        """As fused_reference.encode_sum."""
        tail = _blocks(table), _array(out_scale_b), _array(out_bits_B)
        given = _array(c_c), _array(scale_b), _array(x_c), *tail
        self._split(table, lambda first, stop: cpu_loops.encode_sum(first, stop, *given, _scratch(table, given[0])))

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
        require_same(m_table, table)
        c = _array(c_c)
        momentum = _array(g_c), c.dtype.type(1 - beta1), _array(m_scale_b), _array(m_bits_B)
        given = c, _array(scale_b), *momentum, _blocks(table), _array(out_scale_b), _array(out_bits_B)
        self._split(table, lambda first, stop: cpu_loops.encode_momentum(first, stop, *given, _scratch(table, c)))

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
        b, rows = _array(b_c), _rows(in_scale_nb, in_bits_nB)
        given = b, _array(scale_b), rows, _blocks(table), _array(out_scale_b), _array(out_bits_B)
        self._split(table, lambda first, stop: cpu_loops.serve(first, stop, *given, _scratch(table, b)))

    def decode(self, scale_b: Tensor, bits_B: Tensor, table: BlockTable, out_c: Tensor) -> None:
        """As fused_reference.decode."""
        given = _array(scale_b), _array(bits_B), _blocks(table), _array(out_c)
        self._split(table, lambda first, stop: cpu_loops.decode(first, stop, *given))

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
        p = _array(p_c)
        rates = p.dtype.type(lr), p.dtype.type(1 - decay)
        given = p, _array(divisor_c), _array(scale_b), _array(bits_B), *rates, _blocks(table)
        self._split(table, lambda first, stop: cpu_loops.descend(first, stop, *given))

    def undo_sum(self, c_c: Tensor, scale_b: Tensor, x_c: Tensor, written_scale_b: Tensor, table: BlockTable) -> None:
        """As fused_reference.undo_sum."""
        given = _array(c_c), _array(scale_b), _array(x_c), _array(written_scale_b), _blocks(table)
        self._split(table, lambda first, stop: cpu_loops.undo_sum(first, stop, *given))

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
        c = _array(c_c)
        momentum = _array(g_c), c.dtype.type(1 - beta1), _array(m_scale_b), _array(m_bits_B)
        given = c, _array(scale_b), *momentum, _array(written_scale_b), _blocks(table)
        self._split(table, lambda first, stop: cpu_loops.undo_momentum(first, stop, *given))

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
        b, rows = _array(b_c), _rows(in_scale_nb, in_bits_nB)
        given = b, _array(scale_b), rows, _array(written_scale_b), _blocks(table)
        self._split(table, lambda first, stop: cpu_loops.undo_serve(first, stop, *given, _scratch(table, b)))

    def all_finite(self, scale_b: Tensor) -> bool:
        """As fused_reference.all_finite, on the host: nothing waits for a device here."""
        return bool(cpu_loops.all_finite(_array(scale_b)))

    def _split(self, table: BlockTable, loop: Callable[[int, int], None]) -> None:
        """Run the loop over all blocks: a share a thread, one of them this thread's."""
        num_blocks = table.num_blocks
        parts = min(self._threads, -(-num_blocks // MIN_BLOCKS))
        if parts <= 1:
            loop(0, num_blocks)
            return
        bounds = [num_blocks * part // parts for part in range(parts + 1)]
        others = [self._executor().submit(loop, bounds[i], bounds[i + 1]) for i in range(1, parts)]
        try:
            loop(0, bounds[1])
        finally:
            for other in others:
                other.result()

    def _executor(self) -> ThreadPoolExecutor:
        # A forked child has the object but not its threads, and would wait for them for ever.
        if self._pool is None or self._pool[0] != os.getpid():
            self._pool = os.getpid(), ThreadPoolExecutor(self._threads - 1, thread_name_prefix="thinwire-kernels")
        return self._pool[1]


def _array(vector: Tensor) -> Array:
    """A view. numba compiles for contiguous vectors only, so that a stride is an error here and not a slow variant."""
    if not vector.is_contiguous():
        raise ValueError(f"a vector of {tuple(vector.shape)} with strides {vector.stride()} must be contiguous")
    return vector.numpy()


def _blocks(table: BlockTable) -> Blocks:
    found = _known_blocks.get(table)
    if found is None:
        arrays = Blocks(table.starts.numpy(), table.live.numpy(), table.dead.numpy(), table.dead_starts.numpy())
        found = _known_blocks.setdefault(table, arrays)
    return found


def _rows(in_scale_nb: Tensor, in_bits_nB: Tensor) -> Rows:
    return Rows(*_strided(in_scale_nb), *_strided(in_bits_nB), in_bits_nB.shape[0])


def _strided(rows: Tensor) -> tuple[Array, int]:
    num_rows, length = rows.shape
    if length > 1 and rows.stride(1) != 1:
        raise ValueError(f"rows with strides {rows.stride()} must each be contiguous")
    stride = rows.stride(0)
    span = (num_rows - 1) * stride + length if num_rows and length else 0
    return rows.as_strided((span,), (1,)).numpy(), stride


def _scratch(table: BlockTable, like: Array) -> Array:
    """Of this thread, kept for its next call: room for the new sums of a block."""
    kept: dict[np.dtype[Any], Array] = _of_thread.__dict__.setdefault("kept", {})
    found = kept.get(like.dtype)
    if found is None or found.size < table.largest + WORD:
        found = kept[like.dtype] = np.zeros(table.largest + WORD, like.dtype)
    return found
