"""Updates of slices of torch's vectors as launches of updates.cu, whoever launches them."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

import numpy as np
import torch
from torch import Tensor

from thinwire.comm.kernels.blocks import BlockTable, RowMemory
from thinwire.comm.kernels.cuda.launch import THREADS, Argument, Launcher
from thinwire.comm.kernels.cuda.tables import NARROW, records_of

SPAN = 8 * THREADS
"""Elements of a vector that one block of threads does."""
ALIGNMENT = 16
"""Of what is read four values at a time, in bytes."""


@cache
def source() -> str:
    """updates.cu."""
    return files(__package__).joinpath("updates.cu").read_text(encoding="utf-8")


class CudaUpdates:
    """Updates of contiguous float32 slices where this launcher launches."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    def run(self, name: str, slices: tuple[Tensor, ...], numbers: tuple[float, ...]) -> None:
        """The kernel of this name over all elements of the slices, which have one length. Raises: ValueError."""
        for x in slices:
            if x.data_ptr() % ALIGNMENT:
                raise ValueError(f"a slice at address {x.data_ptr()} must begin at a multiple of {ALIGNMENT}")
        numel = slices[0].numel()
        if numel:
            arguments: tuple[Argument, ...] = (*slices, *map(np.float32, numbers), np.int64(numel))
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
