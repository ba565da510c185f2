"""1-bit LAMB along a received momentum, on slices of torch's vectors: the loops of lamb_loops, on torch's threads.

A momentum is read in the form in which its reducer holds it. As rows of signs it is never written as floats. What has
no loop is left to the chain of torch operations in optim.onebit_lamb, which says what all of this computes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from thinwire.comm.kernels.arrays import blocks_of, rows_of
from thinwire.comm.kernels.blocks import BlockTable, RowMemory
from thinwire.comm.layout import Span
from thinwire.optim.engine.hyperparameters import AdamHyper
from thinwire.optim.engine.momentum import OverFactors
from thinwire.optim.kernels import updates

TILE = 1 << 12
"""Elements whose sums are formed by themselves: the result does not depend on the number of threads."""
LEAST_TILES = 16
"""Tiles that a thread must get to be worth waking."""


@dataclass(frozen=True, slots=True, eq=False)
class Tiles:
    """Runs of at most TILE elements of the flat vectors, each in one tensor. tensor_k: its number among those given."""

    starts_k: Tensor
    stops_k: Tensor
    tensor_k: Tensor
    found_4k: Tensor
    """Scratch."""
    _blocks: WeakKeyDictionary[BlockTable, Tensor] = field(default_factory=WeakKeyDictionary)

    @classmethod
    def of(cls, live: tuple[Span, ...], like: Tensor) -> Tiles:
        """Of tensors with these elements."""
        spans = [
            (at, min(at + TILE, stop), t) for t, (start, stop) in enumerate(live) for at in range(start, stop, TILE)
        ]
        starts_k, stops_k, tensor_k = torch.tensor(spans, dtype=torch.int64).view(-1, 3).unbind(1)
        return cls(starts_k.contiguous(), stops_k.contiguous(), tensor_k.contiguous(), like.new_zeros((4, len(spans))))

    def block_of(self, table: BlockTable) -> Tensor:
        """Of each tile, the number of the block that it begins in: int64[k]. table: of the whole vector."""
        found = self._blocks.get(table)
        if found is None:
            found = self._blocks[table] = torch.searchsorted(table.starts, self.starts_k, right=True).sub_(1)
        return found

    def largest_t(self, row: int, num_tensors: int) -> Tensor:
        """Each tensor's largest of what was found, at least 0."""
        return self.found_4k.new_zeros(num_tensors).scatter_reduce_(0, self.tensor_k, self.found_4k[row], "amax")

    def norms_t(self, row: int, num_tensors: int) -> Tensor:
        """Each tensor's norm, of the sums of squares that were found."""
        return self.found_4k.new_zeros(num_tensors).index_add_(0, self.tensor_k, self.found_4k[row]).sqrt_()


class Heard:
    """A momentum of all ranks, in rows of signs or as floats; over its factor of each tensor it is m.

    said: what was received, or m as float[N], whose factors are 1. A Reader, of the whole of it.
    """

    def __init__(self, said: OverFactors | Tensor, like_T: Tensor) -> None:
        self._said = said
        self._rows: tuple[RowMemory, BlockTable] | None = None
        self._values_N: Tensor | None = None
        if isinstance(said, Tensor):
            self.factor_T, self._values_N = torch.ones_like(like_T), said
        else:
            self.factor_T = said.factor_T
            said.result.read(self)

    def rows(self, at: slice, rows: RowMemory, table: BlockTable) -> None:
        """It is in rows."""
        self._rows = rows, table

    def values(self, at: slice, values: Tensor) -> None:
        """It is in floats."""
        self._values_N = values

    @property
    def in_rows(self) -> tuple[RowMemory, BlockTable] | None:
        """The rows, and where in them the blocks of the vector are; None where it is in floats."""
        return self._rows

    def floats(self, like_N: Tensor) -> Tensor:
        """Factors times m, float[N]: decoded once where it is in rows."""
        if self._values_N is None:
            assert isinstance(self._said, OverFactors)
            self._values_N = torch.empty_like(like_N)
            self._said.result.decode_(self._values_N)
        return self._values_N

    def part(self, at: slice, like_N: Tensor) -> Tensor:
        """These elements of m: not to be modified where it is in floats that are m."""
        if isinstance(self._said, Tensor):
            return self._said[at]
        found = like_N.new_empty(at.stop - at.start)
        self._said.decode_(found, at.start, at.stop)
        return found


def measure_(
    tiles: Tiles, tensors: slice, now: Heard, before: Heard, p_N: Tensor, v_N: Tensor, fresh_v_N: Tensor, h: AdamHyper
) -> None:
    """The fresh variance, and what LAMB's factors need, into `tiles`. fresh_v: modified.

    tensors: those that the tiles are of, among all.
    """
    number = p_N.numpy().dtype.type
    numbers = *map(number, (h.beta1, 1 - h.beta1, h.beta2, 1 - h.beta2, h.eps, h.weight_decay)), tiles.found_4k.numpy()
    factors = now.factor_T[tensors].numpy(), before.factor_T[tensors].numpy()
    if now.in_rows is not None and before.in_rows is not None:
        (rows, table), (rows_before, _) = now.in_rows, before.in_rows
        at = *_places(tiles), tiles.block_of(table).numpy(), p_N.numpy(), v_N.numpy(), fresh_v_N.numpy(), *factors
        said = rows_of(rows, table), rows_of(rows_before, table), blocks_of(table)
        updates.over(len(tiles.starts_k), LEAST_TILES, _loops().lamb_measure_rows, *at, *said, *numbers)
    else:
        vectors = p_N, now.floats(p_N), before.floats(p_N), v_N, fresh_v_N
        given = *_places(tiles), *(x.numpy() for x in vectors), *factors, *numbers
        updates.over(len(tiles.starts_k), LEAST_TILES, _loops().lamb_measure, *given)
    increment_version((fresh_v_N, tiles.found_4k))


def move_(tiles: Tiles, tensors: slice, now: Heard, p_N: Tensor, v_N: Tensor, rate_t: Tensor, h: AdamHyper) -> None:
    """p <- p - rate_l (m / (sqrt(v) + eps) + weight_decay p). p: modified. tensors: as in measure_."""
    number = p_N.numpy().dtype.type
    numbers, factor_t = (number(h.eps), number(h.weight_decay), rate_t.numpy()), now.factor_T[tensors].numpy()
    if now.in_rows is not None:
        rows, table = now.in_rows
        at = *_places(tiles), tiles.block_of(table).numpy(), p_N.numpy(), v_N.numpy(), factor_t
        said = rows_of(rows, table), blocks_of(table)
        updates.over(len(tiles.starts_k), LEAST_TILES, _loops().lamb_move_rows, *at, *said, *numbers)
    else:
        vectors = p_N, now.floats(p_N), v_N
        given = *_places(tiles), *(x.numpy() for x in vectors), factor_t, *numbers
        updates.over(len(tiles.starts_k), LEAST_TILES, _loops().lamb_move, *given)
    increment_version(p_N)


def _places(tiles: Tiles) -> tuple[Any, Any, Any]:
    return tiles.starts_k.numpy(), tiles.stops_k.numpy(), tiles.tensor_k.numpy()


@cache
def _loops() -> Any:
    # Not at the top: importing numba takes half a second, which only vectors on a CPU need.
    from thinwire.optim.kernels import lamb_loops

    return lamb_loops
