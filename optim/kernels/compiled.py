"""Compile all loops of this folder and of comm/kernels for one type, or load them from numba's cache."""

from __future__ import annotations

import numpy as np
import torch

from thinwire.comm.kernels.blocks import BlockTable, RowMemory
from thinwire.comm.kernels.choose import CPU_DTYPES, warm_up
from thinwire.comm.layout import VectorLayout
from thinwire.comm.protocol import Reader, RowReader
from thinwire.optim.engine.hyperparameters import AdamHyper
from thinwire.optim.engine.momentum import OverFactors
from thinwire.optim.kernels import loops, updates
from thinwire.optim.kernels.lamb import Bounds, Descent, Heard, Step, Tiles


def compile_all(dtype: torch.dtype, variance: torch.dtype | None = None) -> None:
    """For a rank that others will wait for: seconds where nothing is cached, else a part of one.

    variance: of a frozen variance, where it is of another type.
    """
    if dtype not in CPU_DTYPES:
        return
    warm_up(dtype)
    x = [torch.ones(8, dtype=dtype, device="cpu") for _ in range(6)]
    hyper = AdamHyper(slice(0, 8), 1e-3, 0.9, 0.999, 1e-8, 0.0)
    updates.adam_(x[0], x[1], x[2], x[3], hyper, None)
    updates.mix_and_descend_(x[0], x[1], x[2], x[3], hyper, 0.1)
    table = BlockTable.from_spans([[(0, 8)]], [], x[0])
    rows = RowMemory.of(torch.zeros(table.wire_bytes, dtype=torch.uint8, device="cpu"), dtype)
    updates.descend_(x[0], x[1], rows, 1e-3, 0.0, 1e-8, table)
    if variance not in (None, dtype):
        updates.descend_(x[0], x[1].to(variance), rows, 1e-3, 0.0, 1e-8, table)
    cuts, found = np.array([0, 8]), (np.zeros(1), np.zeros(1))
    loops.floor_sums(x[0].numpy(), cuts, *found)
    loops.raise_to_floor(x[0].numpy(), cuts, x[1][:1].numpy(), np.zeros(8, np.bool_))
    eps, numbers, lost = 1e-8, (1.0, 1.0, 1.0, 1.0), torch.zeros((), dtype=torch.bool, device="cpu")
    updates.first_local_(x[0], x[1], x[2], x[3], x[4], x[5], hyper, 1.0, lost)
    updates.local_(x[0], x[1], x[2], x[3], x[4], hyper, 1.0, lost)
    updates.first_proposal_(x[0], x[1], x[2], hyper)
    updates.propose_(x[0], x[1], x[2], x[3], hyper, 1.0)
    updates.receive_(x[0], x[1], x[2], x[3], x[4], numbers, eps)
    updates.receive_own_(x[0], x[1], x[2], x[3], hyper, 1.0, numbers)
    updates.receive_own_round_(x[0], x[1], x[2], x[3], x[4], hyper, 1.0, numbers)
    updates.receive_rows_(x[0], x[1], x[2], x[3], rows, numbers, eps, table)
    received = Rows(rows, table)
    one_T, bounds = torch.ones(1, dtype=dtype, device="cpu"), Bounds(0.5, 4.0, 0.9, 1.1, 0.01, 10.0, 4.0)
    for room in (0, 8):
        step = Step(x[0], x[1], x[2], x[3], hyper, None, (0.01, 10.0), room=room)
        step.descend_(Tiles([(0, 8)], x[0]))
        for said in (x[1], OverFactors(received, one_T, VectorLayout.single(8))):
            heard = Heard(said, x[0], 1)
            descent = Descent(x[0], x[2], x[3], one_T, one_T, heard, heard, bounds, room=room)
            descent.descend_(Tiles([(0, 8)], x[0]), slice(0, 1), hyper)


class Rows:
    """Rows of zeros, as a Result."""

    def __init__(self, rows: RowMemory, table: BlockTable) -> None:
        self._rows, self._table = rows, table

    def decode_(self, out_N: torch.Tensor, start: int = 0, stop: int | None = None) -> None:
        """out <- 0."""
        out_N.zero_()

    def read(self, reader: Reader, start: int = 0, stop: int | None = None) -> None:
        """Hand all of them to the reader."""
        assert isinstance(reader, RowReader)
        reader.rows(slice(0, self._table.numel), self._rows, self._table)
