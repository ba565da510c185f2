"""The outer step of LocalSteps: what all ranks do with the mean of what their parameters have moved by."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.comm.kernels.blocks import BlockTable, RowMemory
from thinwire.comm.kernels.fused_reference import decoded
from thinwire.contract.hyperparameters import OUTER, OUTER_LR, OUTER_MOMENTUM


@dataclass(frozen=True, slots=True)
class OuterSGD:
    """The rule of the outer step. lr 1 and momentum 0: the mean of the ranks' parameters, as in CFedAvg.

    Raises: ValueError for what is out of range.
    """

    lr: float = OUTER_LR.default
    momentum: float = OUTER_MOMENTUM.default
    nesterov: bool = True

    def __post_init__(self) -> None:
        for number, value in zip(OUTER, (self.lr, self.momentum), strict=True):
            number.check(value)


MEAN = OuterSGD()
"""To the mean of the ranks' parameters: what the outer step is by default."""


@dataclass(frozen=True, slots=True, eq=False)
class Outward:
    """The outer step, as D is read. A Reader. p, outer: modified."""

    p_N: Tensor
    start_N: Tensor
    outer_N: Tensor
    rule: OuterSGD

    def rows(self, at: slice, rows: RowMemory, table: BlockTable) -> None:
        """D as rows of signs."""
        moved = decoded(rows, table)
        moved[table.dead] = 0
        self.values(at, moved)

    def values(self, at: slice, values: Tensor) -> None:
        """D as floats, 0 where dead."""
        b, mu = self.outer_N[at], self.rule.momentum
        b.mul_(mu).add_(values)
        step = values + b * mu if self.rule.nesterov else b
        torch.sub(self.start_N[at], step * self.rule.lr, out=self.p_N[at])
