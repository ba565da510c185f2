"""The outer step of LocalSteps: what all ranks do with the mean of what their parameters have moved by."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

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

    def values(self, at: slice, values: Tensor) -> None:
        """D as floats, 0 where dead."""
        b, mu, lr = self.outer_N[at], self.rule.momentum, self.rule.lr
        if mu:
            b.mul_(mu).add_(values)
        else:
            b.copy_(values)
        step = values + b * mu if self.rule.nesterov and mu else b
        torch.sub(self.start_N[at], step if lr == 1 else step * lr, out=self.p_N[at])
