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
from thinwire.comm.kernels.added import Added, Lerp, MeanOfRows, ScaledLerp, Vector
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
from thinwire.comm.kernels.blocks import BlockTable, RowMemory
from thinwire.comm.kernels.compiled import Array
from thinwire.comm.kernels.fused_reference import Kernels
from thinwire.comm.kernels.threads import MIN_BLOCKS, Threads
from thinwire.comm.kernels.vectors import WORD

_of_thread = threading.local()
_LOOPS: dict[type[Added], Callable[..., None]] = {
    Vector: cpu_loops.encode_sum,
    Lerp: cpu_loops.encode_lerp,
    ScaledLerp: cpu_loops.encode_scaled,
    MeanOfRows: cpu_loops.serve,
}


class CpuKernels(Kernels):
    """Kernels for contiguous vectors of float32 or float64, kept sums of bfloat16 beside float32 too.

    threads: cores that one call may use.
    """

    def __init__(self, threads: int = 1) -> None:
        self._threads = Threads(threads)

    def encode(
        self, c_c: Tensor, scale_b: Tensor, z: Added, table: BlockTable, out: RowMemory, noise: Noise = NONE
    ) -> None:
        """As Kernels.encode, and the flags of all rows that it wrote."""
        c, scale, loop = sums_of(c_c, table), scales_of(scale_b, table), _LOOPS[type(z)]
        parts: Sequence[Tensor] = ()  # held here: loops read them by address
        given: tuple[Any, ...]
        match z:
            case Vector(x_c):
                given = (values_of(x_c, table),)
            case Lerp(x_parts, weight, last):
                parts = _widened(x_parts, scale_b)
                given = addresses_of(parts, table), scale.dtype.type(weight), rows_of(last, table)
            case ScaledLerp(x_parts, weight, last, factor_r, pieces):
                parts, cut = _widened(x_parts, scale_b), cut_of(factor_r, pieces, table)
                given = addresses_of(parts, table), scale.dtype.type(weight), rows_of(last, table), cut
            case MeanOfRows(rows, num_rows):
                given = (collected_of(rows, num_rows, table),)
        blocks, written = blocks_of(table), written_rows_of(out, table)
        tail = blocks, written, noise
        self._split(table, lambda first, stop: loop(first, stop, c, scale, *given, *tail, _scratch(table, scale)))
        cpu_loops.write_flags(blocks, written)

    def flag(self, table: BlockTable, out: RowMemory) -> None:
        """As Kernels.flag."""
        cpu_loops.write_flags(blocks_of(table), written_rows_of(out, table))

    def decode(self, rows: RowMemory, table: BlockTable, out_c: Tensor) -> None:
        """As Kernels.decode."""
        given = rows_of(rows, table), blocks_of(table), values_of(out_c, table)
        self._split(table, lambda first, stop: cpu_loops.decode(first, stop, *given))

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
