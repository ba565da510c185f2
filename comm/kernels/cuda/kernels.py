"""The fused kernels on a GPU: choose.Kernels as launches of exchange.cu, whoever launches them.

fused_reference says what each computes. Each call is one launch for all blocks of its table, and one more for the
flags of the rows that it wrote. Nothing waits for the device, and nothing is allocated after a table's first call. A
table whose largest block does not fit into the memory that threads share is encoded in plain torch, which computes the
same.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from importlib.resources import files

import numpy as np
import torch
from torch import Tensor

from thinwire.comm.kernels import fused_reference
from thinwire.comm.kernels.bf16 import NONE, Noise
from thinwire.comm.kernels.blocks import BlockTable, Pieces, RowMemory
from thinwire.comm.kernels.choose import Kernels
from thinwire.comm.kernels.cuda.launch import Argument, Launcher
from thinwire.comm.kernels.cuda.tables import NARROW, records_of, runs_of
from thinwire.comm.kernels.fused_reference import LANES, require_cover, require_rows

logger = logging.getLogger(__name__)
DTYPE = torch.float32
MOST_SHARED_BYTES = 48 << 10
"""That a block may have on every GPU without being asked for."""
TOLD = 4
"""Floats of shared memory in front of the new sums of a block."""
ALIGNMENT = 16
"""Of vectors, in bytes: four values are read at once. Gradients may lie anywhere."""


@cache
def source() -> str:
    """exchange.cu."""
    return files(__package__).joinpath("exchange.cu").read_text(encoding="utf-8")


class CudaKernels:
    """Kernels for contiguous float32 vectors where this launcher launches.

    Kept sums are float32 too, of which nothing is rounded, whatever noise is given; others raise a ValueError.
    """

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    def encode_sum(
        self, c_c: Tensor, scale_b: Tensor, x_c: Tensor, table: BlockTable, out: RowMemory, noise: Noise = NONE
    ) -> None:
        """As fused_reference.encode_sum."""
        if (plain := _plain(table)) is not None:
            return plain.encode_sum(c_c, scale_b, x_c, table, out)
        given = _vector(c_c, table), _scales(scale_b, table), _vector(x_c, table, alignment=1)
        self._run("encode_sum", table, (*given, *_blocks(table), *_written(out, table)), encodes=True)
        return self._flag(table, out)

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
        """As fused_reference.encode_lerp. Parts may be bfloat16, each by itself."""
        if (plain := _plain(table)) is not None:
            return plain.encode_lerp(c_c, scale_b, x_parts, weight, last, table, out)
        given, tail = (_vector(c_c, table), _scales(scale_b, table)), (*_blocks(table), *_written(out, table))
        self._lerp("encode_lerp", given, x_parts, weight, last, table, tail, encodes=True)
        return self._flag(table, out)

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
        """As fused_reference.encode_scaled, and by it: there is no kernel yet."""
        fused_reference.encode_scaled(c_c, scale_b, x_parts, weight, last, factor_r, pieces, table, out)

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
        if (plain := _plain(table)) is not None:
            return plain.serve(b_c, scale_b, rows, num_rows, table, out)
        given = _vector(b_c, table), _scales(scale_b, table), *_collected(rows, num_rows, table)
        self._run("serve", table, (*given, *_blocks(table), *_written(out, table)), encodes=True)
        return self._flag(table, out)

    def decode(self, rows: RowMemory, table: BlockTable, out_c: Tensor) -> None:
        """As fused_reference.decode."""
        self._run("decode", table, (*_wire(rows, table), *_blocks(table), _vector(out_c, table)))

    def undo_sum(
        self, c_c: Tensor, scale_b: Tensor, x_c: Tensor, written: RowMemory, table: BlockTable, noise: Noise = NONE
    ) -> None:
        """As fused_reference.undo_sum."""
        given = _vector(c_c, table), _scales(scale_b, table), _vector(x_c, table, alignment=1)
        self._run("undo_sum", table, (*given, _wire(written, table)[0], *_blocks(table)))

    def undo_lerp(
        self,
        c_c: Tensor,
        scale_b: Tensor,
        x_parts: Sequence[Tensor],
        weight: float,
        last: RowMemory,
        written: RowMemory,
        table: BlockTable,
        noise: Noise = NONE,
    ) -> None:
        """As fused_reference.undo_lerp."""
        given, tail = (_vector(c_c, table), _scales(scale_b, table)), (_wire(written, table)[0], *_blocks(table))
        self._lerp("undo_lerp", given, x_parts, weight, last, table, tail)

    def undo_scaled(
        self,
        c_c: Tensor,
        scale_b: Tensor,
        x_parts: Sequence[Tensor],
        weight: float,
        last: RowMemory,
        factor_r: Tensor,
        pieces: Pieces,
        written: RowMemory,
        table: BlockTable,
    ) -> None:
        """As fused_reference.undo_scaled, and by it."""
        fused_reference.undo_scaled(c_c, scale_b, x_parts, weight, last, factor_r, pieces, written, table)

    def undo_serve(
        self,
        b_c: Tensor,
        scale_b: Tensor,
        rows: RowMemory,
        num_rows: int,
        written: RowMemory,
        table: BlockTable,
        noise: Noise = NONE,
    ) -> None:
        """As fused_reference.undo_serve."""
        given = _vector(b_c, table), _scales(scale_b, table), *_collected(rows, num_rows, table)
        self._run("undo_serve", table, (*given, _wire(written, table)[0], *_blocks(table)))

    def _lerp(
        self,
        kernel: str,
        given: tuple[Argument, ...],
        x_parts: Sequence[Tensor],
        weight: float,
        last: RowMemory,
        table: BlockTable,
        tail: tuple[Argument, ...],
        *,
        encodes: bool = False,
    ) -> None:
        require_cover(x_parts, table)
        for part in x_parts:
            _require_part(part, table)
        for run in runs_of(x_parts, table):
            numbers = run.parts, np.uint32(run.first), np.float32(weight)
            arguments = *given, *numbers, *_wire(last, table), *tail
            self._launch(kernel, run.blocks, table, arguments, encodes=encodes, reads=x_parts)

    def _run(self, kernel: str, table: BlockTable, arguments: tuple[Argument, ...], *, encodes: bool = False) -> None:
        self._launch(kernel, table.num_blocks, table, arguments, encodes=encodes)

    def _launch(
        self,
        kernel: str,
        blocks: int,
        table: BlockTable,
        arguments: tuple[Argument, ...],
        *,
        encodes: bool,
        reads: Sequence[Tensor] = (),
    ) -> None:
        if blocks:
            self._launcher.launch(kernel, blocks, _shared_bytes(table) if encodes else 0, arguments, reads)

    def _flag(self, table: BlockTable, out: RowMemory) -> None:
        if table.num_blocks:
            arguments = table.row_starts, table.flag_at, records_of(table).blocks, *_wire(out, table)
            self._launcher.launch("flag_rows", table.flag_at.numel(), 0, arguments)


def _plain(table: BlockTable) -> Kernels | None:
    """What else encodes the blocks of this table, where they are too large."""
    if _shared_bytes(table) <= MOST_SHARED_BYTES:
        return None
    _say_large(table.largest)
    return fused_reference


@cache
def _say_large(largest: int) -> None:
    logger.warning(
        "blocks_in_plain_torch largest=%d most=%d reason='a block must fit into shared memory'",
        largest,
        MOST_SHARED_BYTES // 4 - TOLD,
    )


def _shared_bytes(table: BlockTable) -> int:
    padded = -(-table.largest // LANES) * LANES
    return DTYPE.itemsize * (TOLD + padded)


def _vector(vector_c: Tensor, table: BlockTable, alignment: int = ALIGNMENT) -> Tensor:
    return _require(vector_c, table.numel, alignment)


def _scales(scale_b: Tensor, table: BlockTable) -> Tensor:
    return _require(scale_b, table.num_blocks, 1)


def _require(vector: Tensor, length: int, alignment: int) -> Tensor:
    fits = vector.shape == (length,) and vector.dtype == DTYPE and vector.is_contiguous()
    if not fits or vector.data_ptr() % alignment:
        raise ValueError(
            f"a vector of {vector.dtype}, shape {tuple(vector.shape)}, strides {vector.stride()} at address "
            f"{vector.data_ptr()} must be contiguous {DTYPE} of shape ({length},), at a multiple of {alignment}"
        )
    return vector


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
