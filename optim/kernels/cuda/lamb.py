"""1-bit LAMB along a received momentum as launches of lamb.cu, whoever launches them: three for all tensors of a run.

The same calls as of the loops on a CPU (optim/kernels/lamb.py). What the first pass finds of each element is not kept
for the second: it would be written and read, and p and v are read again anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from math import isfinite
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from thinwire.comm.kernels.blocks import BlockTable, RowMemory, on_device
from thinwire.comm.kernels.cuda.launch import THREADS, Argument, Launcher, Structure
from thinwire.comm.kernels.cuda.tables import records_of
from thinwire.comm.layout import BYTE, Span
from thinwire.optim.engine.hyperparameters import AdamHyper
from thinwire.optim.kernels.heard import Bounds, Heard

TILE = 1 << 12
"""Elements whose sums are formed by themselves, as on a CPU."""
KINDS = 3
SHARED_FLOATS = 2 * KINDS * (4 * THREADS + BYTE)
"""Of measure: two slabs of squares, of each kind."""
SHARED_FOUND = (KINDS + 1) * (THREADS + BYTE)
"""Of rates_of, in floats."""
NUMBERS: Structure = np.dtype(
    [*((name, "f4") for name in ("beta1", "weight1", "beta2", "weight2", "eps", "decay")), ("sums", "u4")]
)
BOUNDS: Structure = np.dtype(
    [
        ("least_factor", "f4"),
        ("most_factor", "f4"),
        ("slower", "f4"),
        ("faster", "f4"),
        ("least_coeff", "f4"),
        ("most_coeff", "f4"),
        ("longest", "f4"),
        ("lr", "f4"),
        ("bounded", "u4"),
        ("weighs", "u4"),
        ("follows", "u4"),
        ("unused", "u4"),
    ]
)
RECORD: Structure = np.dtype([("at", "i8"), ("size", "u4"), ("tensor", "u4")])


@cache
def source() -> str:
    """lamb.cu."""
    return files(__package__).joinpath("lamb.cu").read_text(encoding="utf-8")


class CudaTiles:
    """Runs of at most TILE elements of the flat vectors, each in one tensor, on the device of `like`.

    live: the elements of adjoining tensors. records: a structure of each tile, as bytes. first: int64[tensors + 1],
    number of each one's first tile. found, rates: scratch of the kernels, of each tile and of each tensor.
    """

    def __init__(self, live: Sequence[Span], like: Tensor) -> None:
        spans = [
            (at, min(TILE, stop - at), t) for t, (start, stop) in enumerate(live) for at in range(start, stop, TILE)
        ]
        records = np.array(spans, RECORD)
        self._starts = torch.from_numpy(records["at"].copy())
        first = np.searchsorted(records["tensor"], np.arange(len(live) + 1))
        self.count, self.num_tensors = len(spans), len(live)
        self.records = on_device(torch.from_numpy(records.view(np.uint8)), like.device)
        self.first = on_device(torch.from_numpy(first.astype(np.int64)), like.device)
        self.found, self.rates = like.new_zeros(4 * len(spans)), like.new_zeros(len(live))
        self._blocks: WeakKeyDictionary[BlockTable, Tensor] = WeakKeyDictionary()

    def block_of(self, table: BlockTable) -> Tensor:
        """Of each tile, the number of the block that it begins in: int32[tiles]. table: of the whole vector."""
        found = self._blocks.get(table)
        if found is None:
            number = torch.searchsorted(table.on_host.starts, self._starts, right=True).sub_(1)
            found = self._blocks[table] = on_device(number.to(torch.int32), self.records.device)
        return found


class CudaLamb:
    """One compressed step of 1-bit LAMB on a GPU. Arguments as of optim.kernels.lamb.Descent."""

    def __init__(
        self,
        launcher: Launcher,
        p_N: Tensor,
        v_N: Tensor,
        fresh_v_N: Tensor,
        coeff_T: Tensor,
        factor_T: Tensor,
        now: Heard,
        before: Heard,
        bounds: Bounds,
    ) -> None:
        for x in (p_N, v_N, fresh_v_N, coeff_T, factor_T):
            if x.dtype != torch.float32 or not x.is_contiguous() or x.data_ptr() % 4:
                raise ValueError(f"{x.dtype}{list(x.shape)} with strides {x.stride()} must be contiguous torch.float32")
        if any(x.data_ptr() % 16 for x in (p_N, v_N, fresh_v_N)):
            raise ValueError("vectors must begin at multiples of 16 bytes")
        self._launcher, self._bounds = launcher, bounds
        self._p_N, self._v_N, self._fresh_v_N, self._coeff_T, self._factor_T = p_N, v_N, fresh_v_N, coeff_T, factor_T
        self._now, self._before = now, before

    def descend_(self, tiles: CudaTiles, tensors: slice, h: AdamHyper) -> None:
        """The tensors whose tiles these are. tensors: which they are among all."""
        if not tiles.count:
            return
        scaling_t, scaling_before_t = self._now.factor_T[tensors], self._before.factor_T[tensors]
        sums = self._bounds.follows
        beta2 = 1.0 if sums else h.beta2
        given = h.beta1, 1 - h.beta1, beta2, 1 - h.beta2, h.eps, h.weight_decay, sums
        vectors, scalings = (self._p_N, self._v_N, self._fresh_v_N), (scaling_t, scaling_before_t)
        tail: tuple[Argument, ...] = (np.array([given], NUMBERS), tiles.found)
        said, said_before = self._now.in_rows, self._before.in_rows
        if said is not None and said_before is not None:
            (rows, table), (rows_before, _) = said, said_before
            both = *_wire(rows, table), *_wire(rows_before, table), records_of(table).blocks
            arguments = tiles.records, tiles.block_of(table), *vectors, *scalings, *both, *tail
            self._launch("measure_rows", tiles.count, arguments, SHARED_FLOATS)
        else:
            floats = self._now.floats(), self._before.floats()
            self._launch(
                "measure_floats", tiles.count, (tiles.records, *vectors, *scalings, *floats, *tail), SHARED_FLOATS
            )
        rates = tiles.first, tiles.found, np.uint32(tiles.count), self._coeff_T[tensors], self._factor_T[tensors]
        self._launch("rates_of", tiles.num_tensors, (*rates, self._bounds_of(h), tiles.rates), SHARED_FOUND)
        last = np.float32(h.eps), np.float32(h.weight_decay), tiles.rates
        moved = self._p_N, self._v_N, scaling_t
        if said is not None:
            rows, table = said
            along = *moved, *_wire(rows, table), records_of(table).blocks
            self._launch("move_rows", tiles.count, (tiles.records, tiles.block_of(table), *along, *last))
        else:
            self._launch("move_floats", tiles.count, (tiles.records, *moved, self._now.floats(), *last))

    def done(self) -> None:
        """What was written has a new version."""
        increment_version((self._p_N, self._fresh_v_N, self._factor_T))

    def _bounds_of(self, h: AdamHyper) -> Argument:
        b = self._bounds
        of_r = b.least_factor, b.most_factor, b.slower, b.faster
        of_steps = b.least_coeff, b.most_coeff, b.longest, h.lr
        flags = isfinite(b.longest), h.weight_decay != 0, b.follows, 0
        return np.array([(*of_r, *of_steps, *flags)], BOUNDS)

    def _launch(self, kernel: str, blocks: int, arguments: tuple[Argument, ...], shared_floats: int = 0) -> None:
        self._launcher.launch(kernel, blocks, 4 * shared_floats, arguments)


def _wire(rows: RowMemory, table: BlockTable) -> tuple[Tensor, Tensor]:
    if rows.bytes_B.numel() < table.wire_bytes or rows.values_V.dtype != torch.float32:
        raise ValueError(
            f"wire memory of {rows.bytes_B.numel()} bytes and {rows.values_V.dtype} must have at least "
            f"{table.wire_bytes} and be of torch.float32"
        )
    return rows.values_V, rows.bytes_B
