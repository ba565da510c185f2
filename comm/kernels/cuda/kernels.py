"""The fused kernels on a GPU: launches of exchange.cu, through any launcher.

fused_reference says what each computes. Each call is one launch for all blocks of its table; with the mean of rows it
is one more, for the flags of the rows that it wrote. Those of rows that are sent are left to flag(): nobody reads them
where all is finite. Nothing waits for the device, and nothing is allocated after a table's first call. A table whose
largest block does not fit into the memory that threads share is encoded in plain torch, which computes the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache
from importlib.resources import files
from operator import attrgetter
from typing import NamedTuple
from weakref import ref

import numpy as np
import torch
from torch import Tensor

from thinwire.comm.kernels.added import Added, Advanced, Lerp, MeanOfRows, ScaledLerp, Vector
from thinwire.comm.kernels.bf16 import NONE, WORD, Noise
from thinwire.comm.kernels.blocks import BlockTable, Pieces, RowMemory
from thinwire.comm.kernels.cuda.launch import THREADS, Argument, Launcher
from thinwire.comm.kernels.cuda.tables import (
    ADVANCED,
    ADVANCED_FORM,
    CUT,
    CUT_FORM,
    NARROW,
    NOISE,
    NOISE_FORM,
    records_of,
    runs_of,
    structure,
)
from thinwire.comm.kernels.fused_reference import Kernels, require_cover, require_factors, require_rows
from thinwire.comm.layout import BYTE, round_up

logger = logging.getLogger(__name__)
DTYPE = torch.float32
MOST_SHARED_BYTES = 48 << 10
"""That a block may have on every GPU without being asked for."""
TOLD, MEANS = 4, 256
"""Floats of shared memory in front of the new sums of a block; and in front of that where rows are averaged."""
PADDED = 128
"""What new sums are filled up to a multiple of."""
FEW = 8
"""Rows whose mean is looked up. More are added one by one, by a kernel of its own."""
ALIGNMENT = 16
"""Of vectors, in bytes: four values are read at once. Gradients may lie anywhere."""


@cache
def source() -> str:
    """exchange.cu."""
    return files(__package__).joinpath("exchange.cu").read_text(encoding="utf-8")


class CudaKernels(Kernels):
    """Kernels for contiguous float32 vectors where this launcher launches; kept sums may be bfloat16."""

    advances = True

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    def encode(
        self, c_c: Tensor, scale_b: Tensor, z: Added, table: BlockTable, out: RowMemory, noise: Noise = NONE
    ) -> None:
        """As Kernels.encode. With factors or Advanced c is float32. Parts may be bfloat16, each by itself."""
        ready = records_of(table).ready if noise is NONE else ()
        for one in ready:
            if one.is_of(c_c, scale_b, z, out):
                if not one.starts:
                    one.starts[:] = [
                        self._launcher.prepared(*x) for x in self._launches(c_c, scale_b, z, table, out, noise)
                    ]
                for start in one.starts:
                    start()
                return
        if _shared_bytes(table, MEANS if isinstance(z, MeanOfRows) else 0) > MOST_SHARED_BYTES:
            _say_large(table.largest)
            super().encode(c_c, scale_b, z, table, out, noise)
            return
        for launch in self._launches(c_c, scale_b, z, table, out, noise):
            self._launcher.launch(*launch)
        if noise is NONE and table.num_blocks and _may_come_again(z):
            records_of(table).ready[:] = [
                _Ready(ref(c_c), c_c.data_ptr(), scale_b, z, out, []),
                *ready[: MOST_READY - 1],
            ]

    def _launches(
        self,
        c_c: Tensor,
        scale_b: Tensor,
        z: Added,
        table: BlockTable,
        out: RowMemory,
        noise: Noise,
    ) -> list[_Launch]:
        """What encode() starts. Raises: ValueError for what does not fit."""
        shared_bytes = _shared_bytes(table, MEANS if isinstance(z, MeanOfRows) else 0)
        kept, written = _checked(c_c, scale_b, table, out)
        tail: tuple[Argument, ...]
        reads: tuple[Tensor, ...]
        match z:
            case Vector(x_c):
                x_c = _vector(x_c, table, alignment=1)
                return _whole(_named("encode_sum", c_c), table, (*kept, x_c, *written, _drawn(noise)), shared_bytes)
            case Lerp(x_parts, weight, last):
                given = np.float32(weight), *_wire(last, table)
                name, tail = _named("encode_lerp", c_c), (*given, *written, _drawn(noise))
                return _of_parts(name, kept, x_parts, table, tail, shared_bytes)
            case Advanced(x_parts, m_c, u_c, _, _, _, lost):
                _vector(c_c, table)  # there is no kernel for sums in bfloat16
                name = "encode_first_advanced" if u_c is None else "encode_advanced"
                reads = (m_c, lost) if u_c is None else (m_c, lost, u_c)
                return _of_parts(name, kept, x_parts, table, (_advanced(z, table), *written), shared_bytes, reads)
            case ScaledLerp(x_parts, weight, last, factor_r, pieces):
                _vector(c_c, table)  # there is no kernel for sums in bfloat16
                tail = np.float32(weight), *_wire(last, table), _cut(factor_r, pieces, table), *written
                reads = pieces.starts, pieces.first, pieces.run, factor_r
                return _of_parts("encode_scaled", kept, x_parts, table, tail, shared_bytes, reads)
            case MeanOfRows(rows, num_rows):
                kernel = _named("serve" if num_rows <= FEW else "serve_more", c_c)
                collected = _collected(rows, num_rows, table)
                arguments = *kept, *collected, *written, _drawn(noise)
                return [*_whole(kernel, table, arguments, shared_bytes), *_flags(table, out)]

    def flag(self, table: BlockTable, out: RowMemory) -> None:
        """As Kernels.flag."""
        for launch in _flags(table, out):
            self._launcher.launch(*launch)

    def decode(self, rows: RowMemory, table: BlockTable, out_c: Tensor) -> None:
        """As Kernels.decode."""
        for launch in _whole("decode", table, (*_wire(rows, table), *_blocks(table), _vector(out_c, table))):
            self._launcher.launch(*launch)

    def narrow(self, x_c: Tensor, noise: Noise, out_c: Tensor) -> None:
        """As choose.narrow. Raises: ValueError where they are no multiple of 8 long, or not aligned."""
        fits = x_c.dtype == DTYPE and out_c.dtype == NARROW and x_c.shape == out_c.shape and not len(x_c) % BYTE
        if not fits or x_c.data_ptr() % ALIGNMENT or out_c.data_ptr() % ALIGNMENT:
            raise ValueError(
                f"{x_c.dtype}{list(x_c.shape)} into {out_c.dtype}{list(out_c.shape)}: must be a vector of {DTYPE}, a "
                f"multiple of {BYTE} long, into one of {NARROW}, both at multiples of {ALIGNMENT} bytes"
            )
        if numel := len(x_c):
            blocks = -(-numel // (4 * THREADS))
            self._launcher.launch("narrow_all", blocks, 0, (x_c, out_c, np.int64(numel), _drawn(noise)))


_Launch = tuple[str, int, int, tuple[Argument, ...], tuple[Tensor, ...]]
"""What Launcher.launch takes."""
MOST_READY = 4
"""Of a table: results take turns, and so do rows that are kept."""


class _Ready(NamedTuple):
    """Launches of an encode whose arguments have been looked at, and packed where the same came again.

    Sums are large, and not to stay for it; at: where they lay, for `c.data` may be given other memory.
    """

    c: ref[Tensor]
    at: int
    scale_b: Tensor
    z: Added
    out: RowMemory
    starts: list[Callable[[], None]]

    def is_of(self, c_c: Tensor, scale_b: Tensor, z: Added, out: RowMemory) -> bool:
        """Are these what it was packed from? The same objects, with the same numbers."""
        known = self.z
        if self.out is not out or self.c() is not c_c or self.scale_b is not scale_b or type(z) is not type(known):
            return False
        if self.at != c_c.data_ptr():
            return False
        return all(a is b or (isinstance(a, int | float) and a == b) for a, b in zip(z, known, strict=True))


def _may_come_again(z: Added) -> bool:
    """May what it reads be kept by the caller from step to step, so that the same objects come again?"""
    return isinstance(z, MeanOfRows) or (not isinstance(z, Vector) and isinstance(z.x_parts, tuple))


def _of_parts(
    kernel: str,
    kept: tuple[Argument, ...],
    x_parts: Sequence[Tensor],
    table: BlockTable,
    tail: tuple[Argument, ...],
    shared_bytes: int,
    reads: tuple[Tensor, ...] = (),
) -> list[_Launch]:
    """reads: what the tail has addresses of."""
    require_cover(x_parts, table)
    if not _are_parts(x_parts, table):
        for part in x_parts:
            _require_part(part, table)
    return [
        (kernel, run.blocks, shared_bytes, (*kept, run.parts, np.uint32(run.first), *tail), (*x_parts, *reads))
        for run in runs_of(x_parts, table)
        if run.blocks
    ]


def _whole(kernel: str, table: BlockTable, arguments: tuple[Argument, ...], shared_bytes: int = 0) -> list[_Launch]:
    return [(kernel, table.num_blocks, shared_bytes, arguments, ())] if table.num_blocks else []


def _flags(table: BlockTable, out: RowMemory) -> list[_Launch]:
    if not table.num_blocks:
        return []
    arguments = table.row_starts, table.flag_at, records_of(table).blocks, *_wire(out, table)
    return [("flag_rows", table.flag_at.numel(), 0, arguments, ())]


LARGEST = (MOST_SHARED_BYTES // DTYPE.itemsize - TOLD - MEANS) // PADDED * PADDED
"""Elements of a block that every kernel has room for."""


@cache
def _say_large(largest: int) -> None:
    reason = "a block must fit into shared memory"
    logger.warning("blocks_in_plain_torch largest=%d most=%d reason=%r", largest, LARGEST, reason)


def _shared_bytes(table: BlockTable, before: int = 0) -> int:
    """For the new sums of a block. before: floats in front of them."""
    return DTYPE.itemsize * (before + TOLD + round_up(table.largest, PADDED))


def _named(kernel: str, c_c: Tensor) -> str:
    return f"{kernel}_narrow" if c_c.dtype == NARROW else kernel


def _sums(c_c: Tensor, table: BlockTable) -> Tensor:
    return _require(c_c, table.numel, ALIGNMENT, NARROW if c_c.dtype == NARROW else DTYPE)


def _drawn(noise: Noise) -> Argument:
    return _UNDRAWN if noise is NONE else structure(NOISE, NOISE_FORM, noise.key, noise.start & WORD)


_UNDRAWN = structure(NOISE, NOISE_FORM, NONE.key, NONE.start & WORD)


def _cut(factor_r: Tensor, pieces: Pieces, table: BlockTable) -> Argument:
    require_factors(factor_r, pieces, table)
    at = pieces.starts, pieces.first, pieces.run, factor_r
    return structure(CUT, CUT_FORM, *(x.data_ptr() for x in at))


def _advanced(z: Advanced, table: BlockTable) -> Argument:
    at = (0 if x_c is None else _vector(x_c, table).data_ptr() for x_c in (z.m_c, z.u_c))
    if z.lost.dtype != torch.bool or z.lost.dim() or z.lost.device != table.starts.device:
        raise ValueError(
            f"lost is {z.lost.dtype}{list(z.lost.shape)} on {z.lost.device}: must be a bool without dimensions on "
            f"{table.starts.device}"
        )
    return structure(ADVANCED, ADVANCED_FORM, *at, z.lost.data_ptr(), z.weight, z.rate, z.keep, 0.0)


def _checked(
    c_c: Tensor, scale_b: Tensor, table: BlockTable, out: RowMemory
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The arguments that are the same in each exchange: looked at when they are others than in a table's last call."""
    known = records_of(table).checked
    if not known or known[0]() is not c_c or known[1] is not scale_b or known[2] is not out:
        kept, written = (_sums(c_c, table), _scales(scale_b, table)), (*_blocks(table), *_written(out, table))
        # Sums are large, and not to stay for this: an address is read when it is passed.
        known[:] = ref(c_c), scale_b, out, written
        return kept, written
    return (c_c, scale_b), known[3]


def _vector(vector_c: Tensor, table: BlockTable, alignment: int = ALIGNMENT) -> Tensor:
    return _require(vector_c, table.numel, alignment)


def _scales(scale_b: Tensor, table: BlockTable) -> Tensor:
    return _require(scale_b, table.num_blocks, 1)


def _require(vector: Tensor, length: int, alignment: int, dtype: torch.dtype = DTYPE) -> Tensor:
    fits = vector.shape == (length,) and vector.dtype == dtype and vector.is_contiguous()
    if not fits or vector.data_ptr() % alignment:
        raise ValueError(
            f"a vector of {vector.dtype}, shape {tuple(vector.shape)}, strides {vector.stride()} at address "
            f"{vector.data_ptr()} must be contiguous {dtype} of shape ({length},), at a multiple of {alignment}"
        )
    return vector


def _are_parts(parts: Sequence[Tensor], table: BlockTable) -> bool:
    """Does _require_part() pass each of them? Asked of all at once: a bucket has as many as it has tensors."""
    alike = {*map(_DTYPE, parts)} <= {DTYPE, NARROW} and {*map(Tensor.dim, parts)} <= {1}
    return alike and all(map(Tensor.is_contiguous, parts)) and {*map(_DEVICE, parts)} <= {table.starts.device}


_DTYPE, _DEVICE = attrgetter("dtype"), attrgetter("device")


def _require_part(part: Tensor, table: BlockTable) -> None:
    if part.dtype not in (DTYPE, NARROW) or part.dim() != 1 or not part.is_contiguous():
        raise ValueError(
            f"a part of {part.dtype}{list(part.shape)} with strides {part.stride()} must be a contiguous vector of "
            f"{DTYPE} or {NARROW}"
        )
    if part.device != table.starts.device:
        raise ValueError(f"a part on {part.device} must be on {table.starts.device}, as the blocks are")


def _blocks(table: BlockTable) -> tuple[Tensor, Tensor]:
    records = records_of(table)
    return records.blocks, records.dead


def _wire(wire: RowMemory, table: BlockTable) -> tuple[Tensor, Tensor]:
    """As floats and as bytes."""
    if wire.bytes_B.numel() < table.wire_bytes or wire.values_V.dtype != DTYPE:
        raise ValueError(
            f"wire memory of {wire.bytes_B.numel()} bytes and {wire.values_V.dtype} must have at least "
            f"{table.wire_bytes} and be of {DTYPE}, as the table of its blocks says"
        )
    return wire.values_V, wire.bytes_B


def _written(wire: RowMemory, table: BlockTable) -> tuple[Tensor, Tensor]:
    if not table.row_bytes:
        raise ValueError("a table without rows is for reading only: pass the one of a bucket or a chunk")
    return _wire(wire, table)


def _collected(rows: RowMemory, num_rows: int, table: BlockTable) -> tuple[Argument, ...]:
    require_rows(rows, num_rows, table)
    return rows.values_V, rows.bytes_B, np.uint32(num_rows), np.uint32(table.row_bytes)
