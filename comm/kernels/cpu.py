"""The fused kernels for vectors on the CPU: the loops of cpu_loops on views of torch's memory, and on several threads.

fused_reference says what each computes. The blocks of a call are split over the threads; a block is the work of one,
so the result does not depend on their number. Nothing is allocated by torch, and scratch only by a thread's first call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from thinwire.comm.kernels import cpu_loops
from thinwire.comm.kernels.blocks import BlockTable
from thinwire.comm.kernels.compiled import Array
from thinwire.comm.kernels.cpu_loops import Blocks, Rows
from thinwire.comm.kernels.fused_reference import require_cover, require_same
from thinwire.comm.kernels.threads import Threads
from thinwire.comm.kernels.vectors import BYTE, WORD

MIN_BLOCKS = 16
"""What a thread must get to be worth waking: 64 Ki values, tens of microseconds."""

_of_thread = threading.local()
_known_blocks: WeakKeyDictionary[BlockTable, Blocks] = WeakKeyDictionary()
_known_bounds: WeakKeyDictionary[BlockTable, dict[int, int]] = WeakKeyDictionary()


class CpuKernels:
    """Kernels for contiguous vectors of float32 or float64. threads: cores that one call may use."""

    def __init__(self, threads: int = 1) -> None:
        self._threads = Threads(threads)

    def encode_sum(
        self, c_c: Tensor, scale_b: Tensor, x_c: Tensor, table: BlockTable, out_scale_b: Tensor, out_bits_B: Tensor
    ) -> None:
        """As fused_reference.encode_sum."""
        tail = _blocks(table), _scales(out_scale_b, table), _bits(out_bits_B, table)
        given = _values(c_c, table), _scales(scale_b, table), _values(x_c, table), *tail
        self._split(table, lambda first, stop: cpu_loops.encode_sum(first, stop, *given, _scratch(table, given[0])))

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
        require_same(m_table, table)
        c = _values(c_c, table)
        momentum = _momentum(g_parts, beta1, m_scale_b, m_bits_B, table, c_c.dtype)
        given = (
            c,
            _scales(scale_b, table),
            *momentum,
            _blocks(table),
            _scales(out_scale_b, table),
            _bits(out_bits_B, table),
        )
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
        b, rows = _values(b_c, table), _rows(in_scale_nb, in_bits_nB, table)
        given = b, _scales(scale_b, table), rows, _blocks(table), _scales(out_scale_b, table), _bits(out_bits_B, table)
        self._split(table, lambda first, stop: cpu_loops.serve(first, stop, *given, _scratch(table, b)))

    def decode(self, scale_b: Tensor, bits_B: Tensor, table: BlockTable, out_c: Tensor) -> None:
        """As fused_reference.decode."""
        given = _scales(scale_b, table), _bits(bits_B, table), _blocks(table), _values(out_c, table)
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
        p = _values(p_c, table)
        rates = p.dtype.type(lr), p.dtype.type(1 - decay)
        given = p, _values(divisor_c, table), _scales(scale_b, table), _bits(bits_B, table), *rates, _blocks(table)
        self._split(table, lambda first, stop: cpu_loops.descend(first, stop, *given))

    def undo_sum(self, c_c: Tensor, scale_b: Tensor, x_c: Tensor, written_scale_b: Tensor, table: BlockTable) -> None:
        """As fused_reference.undo_sum."""
        given = (
            _values(c_c, table),
            _scales(scale_b, table),
            _values(x_c, table),
            _scales(written_scale_b, table),
            _blocks(table),
        )
        self._split(table, lambda first, stop: cpu_loops.undo_sum(first, stop, *given))

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
        c = _values(c_c, table)
        momentum = _momentum(g_parts, beta1, m_scale_b, m_bits_B, table, c_c.dtype)
        given = c, _scales(scale_b, table), *momentum, _scales(written_scale_b, table), _blocks(table)
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
        b, rows = _values(b_c, table), _rows(in_scale_nb, in_bits_nB, table)
        given = b, _scales(scale_b, table), rows, _scales(written_scale_b, table), _blocks(table)
        self._split(table, lambda first, stop: cpu_loops.undo_serve(first, stop, *given, _scratch(table, b)))

    def all_finite(self, scale_b: Tensor) -> bool:
        """As fused_reference.all_finite, on the host: nothing waits for a device here."""
        return bool(cpu_loops.all_finite(_array(scale_b, scale_b.numel())))

    def _split(self, table: BlockTable, loop: Callable[[int, int], None]) -> None:
        """Run the loop over all blocks: a share a thread, one of them this thread's."""
        self._threads.split(table.num_blocks, MIN_BLOCKS, loop)


def _values(vector_c: Tensor, table: BlockTable) -> Array:
    return _array(vector_c, table.numel)


def _scales(scale_b: Tensor, table: BlockTable) -> Array:
    return _array(scale_b, table.num_blocks)


def _bits(bits_B: Tensor, table: BlockTable) -> Array:
    return _array(_whole_bytes(bits_B), table.numel // BYTE)


def _array(vector: Tensor, length: int) -> Array:
    """A view. The loops check no bounds and want numbers side by side, so both are checked here."""
    if vector.shape != (length,) or not vector.is_contiguous():
        raise ValueError(
            f"a vector of shape {tuple(vector.shape)} with strides {vector.stride()} must be contiguous and of shape "
            f"({length},), as the table of its blocks says"
        )
    return vector.numpy()


def _momentum(
    g_parts: Sequence[Tensor], beta1: float, m_scale_b: Tensor, m_bits_B: Tensor, table: BlockTable, dtype: torch.dtype
) -> tuple[Array, Any, Array, Array]:
    """What the loops form the new momentum of: the gradient's blocks, its weight, the row of the last momentum."""
    m_scales = _scales(m_scale_b, table)
    return _addresses(g_parts, table, dtype), m_scales.dtype.type(1 - beta1), m_scales, _bits(m_bits_B, table)


def _addresses(parts: Sequence[Tensor], table: BlockTable, dtype: torch.dtype) -> Array:
    """Of each block, where in memory its values begin. The caller holds the parts while a loop reads them."""
    require_cover(parts, table)
    number_at, offsets = _bounds(table), _blocks(table).starts[:-1] * dtype.itemsize
    begin = first = 0
    for part in parts:
        if part.dtype != dtype or part.dim() != 1 or not part.is_contiguous():
            raise ValueError(
                f"a part of {part.dtype}{list(part.shape)} with strides {part.stride()} must be a contiguous vector of "
                f"{dtype}"
            )
        end = begin + part.numel()
        stop = number_at.get(end)
        if stop is None:
            raise ValueError(f"a part that ends at {end} must end where a block does")
        offsets[first:stop] += part.data_ptr() - begin * dtype.itemsize
        begin, first = end, stop
    return offsets


def _bounds(table: BlockTable) -> dict[int, int]:
    """Number of the block that begins at a position."""
    found = _known_bounds.get(table)
    if found is None:
        found = _known_bounds.setdefault(table, {at: number for number, at in enumerate(table.starts.tolist())})
    return found


def _whole_bytes(bits: Tensor) -> Tensor:
    if bits.dtype != torch.uint8:
        raise ValueError(f"bits of {bits.dtype} must be torch.uint8")
    return bits


def _blocks(table: BlockTable) -> Blocks:
    found = _known_blocks.get(table)
    if found is None:
        arrays = Blocks(table.starts.numpy(), table.live.numpy(), table.dead.numpy(), table.dead_starts.numpy())
        found = _known_blocks.setdefault(table, arrays)
    return found


def _rows(in_scale_nb: Tensor, in_bits_nB: Tensor, table: BlockTable) -> Rows:
    """Scales and bits of the received rows as one vector each, with the distance from row to row."""
    num_rows = in_bits_nB.shape[0]
    scales = _strided(in_scale_nb, num_rows, table.num_blocks)
    return Rows(*scales, *_strided(_whole_bytes(in_bits_nB), num_rows, table.numel // BYTE), num_rows)


def _strided(rows: Tensor, num_rows: int, length: int) -> tuple[Array, int]:
    if rows.shape != (num_rows, length) or (length > 1 and rows.stride(1) != 1):
        raise ValueError(
            f"rows of shape {tuple(rows.shape)} with strides {rows.stride()} must each be contiguous and of shape "
            f"({num_rows}, {length}), as the table of their blocks says"
        )
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
