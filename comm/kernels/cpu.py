"""The fused kernels for vectors on the CPU: the loops of cpu_loops on views of torch's memory, and on several threads.

fused_reference says what each computes. The blocks of a call are split over the threads; a block is the work of one,
so the result does not depend on their number. Nothing is allocated by torch, and scratch only by a thread's first call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.comm.kernels import cpu_loops
from thinwire.comm.kernels.arrays import (
    addresses_of,
    blocks_of,
    collected_of,
    cut_of,
    rows_of,
    scales_of,
    sums_of,
    values_of,
    written_rows_of,
)
from thinwire.comm.kernels.bf16 import NONE, Noise
from thinwire.comm.kernels.blocks import BlockTable, Pieces, RowMemory
from thinwire.comm.kernels.compiled import Array
from thinwire.comm.kernels.threads import MIN_BLOCKS, Threads
from thinwire.comm.kernels.vectors import WORD

_of_thread = threading.local()


class CpuKernels:
    """Kernels for contiguous vectors of float32 or float64, kept sums of bfloat16 beside float32 too.

    threads: cores that one call may use.
    """

    def __init__(self, threads: int = 1) -> None:
        self._threads = Threads(threads)

    def encode_sum(
        self, c_c: Tensor, scale_b: Tensor, x_c: Tensor, table: BlockTable, out: RowMemory, noise: Noise = NONE
    ) -> None:
        """As fused_reference.encode_sum."""
        given = sums_of(c_c, table), scales_of(scale_b, table), values_of(x_c, table)
        self._encode(cpu_loops.encode_sum, given, table, out, noise)

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
        c, scale, x_parts = sums_of(c_c, table), scales_of(scale_b, table), _widened(x_parts, scale_b)
        given = c, scale, addresses_of(x_parts, table), scale.dtype.type(weight), rows_of(last, table)
        self._encode(cpu_loops.encode_lerp, given, table, out, noise)

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
        c, scale, cut = values_of(c_c, table), scales_of(scale_b, table), cut_of(factor_r, pieces, table)
        x_parts = _widened(x_parts, c_c)
        given = c, scale, addresses_of(x_parts, table), c.dtype.type(weight), rows_of(last, table), cut
        self._encode(cpu_loops.encode_scaled, given, table, out)

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
        given = sums_of(b_c, table), scales_of(scale_b, table), collected_of(rows, num_rows, table)
        self._encode(cpu_loops.serve, given, table, out, noise)

    def flag(self, table: BlockTable, out: RowMemory) -> None:
        """As fused_reference.flag."""
        cpu_loops.write_flags(blocks_of(table), written_rows_of(out, table))

    def decode(self, rows: RowMemory, table: BlockTable, out_c: Tensor) -> None:
        """As fused_reference.decode."""
        given = rows_of(rows, table), blocks_of(table), values_of(out_c, table)
        self._split(table, lambda first, stop: cpu_loops.decode(first, stop, *given))

    def _encode(
        self, loop: Callable[..., None], given: tuple[Any, ...], table: BlockTable, out: RowMemory, *noise: Noise
    ) -> None:
        """The loop with what it is given, the second of which are scales; then the flags of the rows that it wrote."""
        blocks, rows = blocks_of(table), written_rows_of(out, table)
        tail = blocks, rows, *noise
        self._split(table, lambda first, stop: loop(first, stop, *given, *tail, _scratch(table, given[1])))
        cpu_loops.write_flags(blocks, rows)

    def _split(self, table: BlockTable, loop: Callable[[int, int], None]) -> None:
        """Run the loop over all blocks: a share a thread, one of them this thread's."""
        self._threads.split(table.num_blocks, MIN_BLOCKS, loop)


def _widened(x_parts: Sequence[Tensor], like: Tensor) -> Sequence[Tensor]:
    """Parts in bfloat16 as copies in the vector's dtype; the rest as it is."""
    if all(part.dtype != torch.bfloat16 for part in x_parts):
        return x_parts
    return [part.to(like.dtype) if part.dtype == torch.bfloat16 else part for part in x_parts]


def _scratch(table: BlockTable, like: Array) -> Array:
    """Of this thread, kept for its next call: room for the new sums of a block."""
    kept: dict[np.dtype[Any], Array] = _of_thread.__dict__.setdefault("kept", {})
    found = kept.get(like.dtype)
    if found is None or found.size < table.largest + WORD:
        found = kept[like.dtype] = np.zeros(table.largest + WORD, like.dtype)
    return found
