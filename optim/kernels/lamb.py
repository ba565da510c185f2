"""1-bit LAMB along a received momentum, on slices of torch's vectors: the loops of lamb_loops, on torch's threads.
On a GPU the kernels of cuda/lamb.cu, which compute the same, bit for bit.

A momentum is read in the form in which its reducer holds it. As rows of signs it is never written as floats. What has
no loop is left to the chain of torch operations in optim.onebit_lamb, which says what all of this computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
from torch import Tensor
from torch.autograd.graph import increment_version

from thinwire.comm.kernels.arrays import blocks_of, rows_of
from thinwire.comm.kernels.blocks import BlockTable
from thinwire.comm.layout import BYTE, Span, round_up
from thinwire.optim.engine.hyperparameters import AdamHyper
from thinwire.optim.kernels import updates
from thinwire.optim.kernels.cuda.lamb import TILE, CudaLamb, CudaTiles, source
from thinwire.optim.kernels.heard import Bounds, Heard

if TYPE_CHECKING:  # it brings numba, which only who compiles needs
    from thinwire.comm.kernels.compiled import Array

LEAST_TILES = 16
"""Tiles that a thread must get to be worth waking."""
ROOM = 1 << 20
"""Elements whose update is kept from the pass that measures it to the one that moves along it, within a step."""


class Tiles:
    """Runs of at most TILE elements of the flat vectors, each in one tensor: sums are formed of each by itself, so that
    the result does not depend on the number of threads.

    live: the elements of adjoining tensors. like: of the vectors. places: of each tile its start, its stop and the
    number of its tensor among these. start, numel: from the first tensor's start to the last one's stop, in whole
    bytes of signs. found, sums, rates: scratch of the loops, of each tile and of each tensor.
    """

    def __init__(self, live: Sequence[Span], like: Tensor) -> None:
        spans = [
            (at, min(at + TILE, stop), t) for t, (start, stop) in enumerate(live) for at in range(start, stop, TILE)
        ]
        starts, stops, tensors = np.array(spans, np.int64).reshape(-1, 3).T.copy()
        self.places, self.count = (starts, stops, tensors), len(spans)
        self.start, self.numel = live[0][0], round_up(live[-1][1], BYTE) - live[0][0]
        dtype = like.numpy().dtype
        self.found, self.sums = np.zeros((4, len(spans)), dtype), np.zeros((4, len(live)), dtype)
        self.rates = np.zeros(len(live), dtype)
        self._blocks: WeakKeyDictionary[BlockTable, Array] = WeakKeyDictionary()

    def block_of(self, table: BlockTable) -> Array:
        """Of each tile, the number of the block that it begins in. table: of the whole vector."""
        found = self._blocks.get(table)
        if found is None:
            found = self._blocks[table] = np.searchsorted(table.starts.numpy(), self.places[0], side="right") - 1
        return found


class Descent:
    """One compressed step of 1-bit LAMB on a CPU, part after part: optim.onebit_lamb says what it does.

    p, fresh_v: float[N], modified. v: float[N]. coeff: c_avg, factor: r, modified; of each tensor. now: the momentum as
    it was received; before: that of the step before. room: elements whose update may be kept from one pass to the next.
    """

    def __init__(
        self,
        p_N: Tensor,
        v_N: Tensor,
        fresh_v_N: Tensor,
        coeff_T: Tensor,
        factor_T: Tensor,
        now: Heard,
        before: Heard,
        bounds: Bounds,
        room: int = ROOM,
    ) -> None:
        self._written, self._bounds = (p_N, fresh_v_N, factor_T), bounds
        self._p, self._v, self._fresh_v = p_N.numpy(), v_N.numpy(), fresh_v_N.numpy()
        self._coeff, self._factor = coeff_T.numpy(), factor_T.numpy()
        self._scaling, self._scaling_before = now.factor_T.numpy(), before.factor_T.numpy()
        self._now, self._before = now, before
        self._u = np.empty(min(room, self._p.size), self._p.dtype)

    def descend_(self, tiles: Tiles, tensors: slice, h: AdamHyper) -> None:
        """The tensors whose tiles these are. tensors: which they are among all."""
        u = self._u[: tiles.numel] if tiles.numel <= self._u.size else self._u[:0]
        self._measure_(tiles, tensors, h, u)
        self._find_rates(tiles, tensors, h)
        self._move_(tiles, tensors, h, u)

    def done(self) -> None:
        """What was written has a new version."""
        increment_version(self._written)

    def _measure_(self, tiles: Tiles, tensors: slice, h: AdamHyper, u: Array) -> None:
        scalings = self._scaling[tensors], self._scaling_before[tensors]
        numbers = self._numbers(h.beta1, 1 - h.beta1, h.beta2, 1 - h.beta2, h.eps, h.weight_decay)
        last = *numbers, self._bounds.follows, tiles.found, u, tiles.start
        if (said := self._now.in_rows) is not None and (said_before := self._before.in_rows) is not None:
            (rows, table), (rows_before, _) = said, said_before
            at = *tiles.places, tiles.block_of(table), self._p, self._v, self._fresh_v, *scalings
            received = rows_of(rows, table), rows_of(rows_before, table), blocks_of(table)
            updates.over(tiles.count, LEAST_TILES, _loops().lamb_measure_rows, *at, *received, *last)
        else:
            z, before = self._now.floats().numpy(), self._before.floats().numpy()
            given = *tiles.places, self._p, z, before, self._v, self._fresh_v, *scalings
            updates.over(tiles.count, LEAST_TILES, _loops().lamb_measure, *given, *last)

    def _find_rates(self, tiles: Tiles, tensors: slice, h: AdamHyper) -> None:
        b = self._bounds
        of_tensors = self._coeff[tensors], self._factor[tensors]
        of_r = self._numbers(b.least_factor, b.most_factor, b.slower, b.faster)
        of_steps = self._numbers(b.least_coeff, b.most_coeff, b.longest, h.lr)
        weighs = h.weight_decay != 0
        _loops().lamb_rates(
            tiles.places[2], tiles.found, *of_tensors, *of_r, *of_steps, weighs, b.follows, tiles.sums, tiles.rates
        )

    def _move_(self, tiles: Tiles, tensors: slice, h: AdamHyper, u: Array) -> None:
        numbers, scaling = self._numbers(h.eps, h.weight_decay), self._scaling[tensors]
        if u.size:
            places = tiles.places
            updates.over(
                tiles.count, LEAST_TILES, _loops().lamb_move_along, *places, self._p, u, tiles.start, tiles.rates
            )
        elif (said := self._now.in_rows) is not None:
            rows, table = said
            at = *tiles.places, tiles.block_of(table), self._p, self._v, scaling, rows_of(rows, table)
            last = blocks_of(table), *numbers, tiles.rates
            updates.over(tiles.count, LEAST_TILES, _loops().lamb_move_rows, *at, *last)
        else:
            given = *tiles.places, self._p, self._now.floats().numpy(), self._v, scaling
            updates.over(tiles.count, LEAST_TILES, _loops().lamb_move, *given, *numbers, tiles.rates)

    def _numbers(self, *numbers: float) -> tuple[Any, ...]:
        return tuple(map(self._p.dtype.type, numbers))


def fits(vector_N: Tensor) -> bool:
    """Are there loops, or kernels, for vectors like this one? Else the chain of torch operations computes the same."""
    return updates.fits(vector_N) or updates.launcher_for(vector_N, source()) is not None


def tiles_of(live: Sequence[Span], like: Tensor) -> Tiles | CudaTiles | None:
    """The tiles of these tensors; None where nothing fits."""
    if updates.fits(like):
        return Tiles(live, like)
    return CudaTiles(live, like) if fits(like) else None


def descent_of(
    vectors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor], now: Heard, before: Heard, bounds: Bounds
) -> Descent | CudaLamb:
    """What descends, on the device of the vectors, which are as of Descent and fit."""
    launcher = updates.launcher_for(vectors[0], source())
    return (
        Descent(*vectors, now, before, bounds)
        if launcher is None
        else CudaLamb(launcher, *vectors, now, before, bounds)
    )


@cache
def _loops() -> Any:
    # Not at the top: importing numba takes half a second, which only vectors on a CPU need.
    from thinwire.optim.kernels import lamb_loops

    return lamb_loops
