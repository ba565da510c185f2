"""What a compressed step of 1-bit LAMB is given, on a CPU and on a GPU: a momentum as it was received, and bounds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.comm.kernels.blocks import BlockTable, RowMemory
from thinwire.optim.engine.momentum import OverFactors


class Heard:
    """A momentum of all ranks, in rows of signs or as floats; over its factor of each tensor it is m.

    said: what was received, or m as float[N], whose factors are 1. like: float[N] of the same kind; num_tensors: that
    have a factor. A Reader, of the whole of it.
    """

    def __init__(self, said: OverFactors | Tensor, like_N: Tensor, num_tensors: int) -> None:
        self._said, self._like_N = said, like_N
        self._rows: tuple[RowMemory, BlockTable] | None = None
        self._values_N: Tensor | None = None
        if isinstance(said, Tensor):
            self.factor_T, self._values_N = like_N.new_ones(num_tensors), said
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

    def floats(self) -> Tensor:
        """Factors times m, float[N]: decoded once where it is in rows."""
        if self._values_N is None:
            assert isinstance(self._said, OverFactors)
            self._values_N = torch.empty_like(self._like_N)
            self._said.result.decode_(self._values_N)
        return self._values_N

    def part(self, at: slice) -> Tensor:
        """These elements of m. Not to be modified."""
        if isinstance(self._said, Tensor):
            return self._said[at]
        found = self._like_N.new_empty(at.stop - at.start)
        self._said.decode_(found, at.start, at.stop)
        return found


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of r, of its change in a step, of the trust ratio, and by which multiple of that a step is bounded (inf: none).

    follows: factors are |u_0|^2 of exact momenta, in place of r, and stay; fresh_v is A of optim.variance.sums.
    """

    least_factor: float
    most_factor: float
    slower: float
    faster: float
    least_coeff: float
    most_coeff: float
    longest: float
    follows: bool = False
