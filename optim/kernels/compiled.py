"""Compile all loops of this folder and of comm/kernels for one type, or load them from numba's cache."""

from __future__ import annotations

import torch

from thinwire.comm.kernels.blocks import BlockTable, RowMemory
from thinwire.comm.kernels.choose import CPU_DTYPES, warm_up
from thinwire.optim.engine.hyperparameters import AdamHyper
from thinwire.optim.kernels import updates
from thinwire.optim.kernels.updates import Tiles


def compile_all(dtype: torch.dtype, variance: torch.dtype | None = None) -> None:
    """For a rank that others will wait for: seconds where nothing is cached, else a part of one.

    variance: of a frozen variance, where it is of another type.
    """
    if dtype not in CPU_DTYPES:
        return
    warm_up(dtype)
    x = [torch.ones(8, dtype=dtype) for _ in range(6)]
    hyper = AdamHyper(slice(0, 8), 1e-3, 0.9, 0.999, 1e-8, 0.0)
    updates.adam_(x[0], x[1], x[2], x[3], hyper, None)
    table = BlockTable.from_spans([[(0, 8)]], [], x[0])
    rows = RowMemory.of(torch.zeros(table.wire_bytes, dtype=torch.uint8), dtype)
    updates.descend_(x[0], x[1], rows, 1e-3, 0.0, 1e-8, table)
    if variance not in (None, dtype):
        updates.descend_(x[0], x[1].to(variance), rows, 1e-3, 0.0, 1e-8, table)
    updates.local_(x[0], x[1], x[2], x[3], x[4], hyper, 1.0)
    updates.propose_(x[0], x[1], x[2], x[3], hyper, 1.0)
    updates.receive_(x[0], x[1], x[2], x[3], x[4], x[5], 1.0, 1.0, 1.0)
    updates.scaled_momentum_(x[0], x[1], x[2], 0.9, x[3][:1])
    tiles = Tiles.of(((0, 8),), x[0])
    updates.lamb_measure_(tiles, x[0], x[1], x[2], x[3], x[4], x[5][:1], hyper)
    updates.lamb_move_(tiles, x[0], x[1], x[2], x[5][:1], hyper)
