"""The variance of 0/1 Adam as it is used: corrected by the number of its updates, floored; its root divides steps.

    d = sqrt(v_used) + eps     or    sqrt(v_used + eps);    v_used = floor(v / (1 - beta2^updates))

On flat vectors, in place; `updates` are those made so far. Which of it is done is a ZeroOneSettings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.comm.layout import Span
from thinwire.optim import adam_math
from thinwire.optim.engine.hyperparameters import AdamHyper
from thinwire.optim.variance.floor import floor_variance_
from thinwire.optim.zero_one_settings import Fresh, ZeroOneSettings


@dataclass(frozen=True, slots=True)
class StaleVariance:
    """How v is used. tensors, blocks: what an element's floor is taken from, as in floor_variance_."""

    settings: ZeroOneSettings
    tensors: Sequence[Span]
    blocks: Sequence[Span]

    def is_early(self, updates: int) -> bool:
        """Is the next update of v used in its own step?"""
        # differs from Alg. 1: the first v is used at once, before it there is none
        first = self.settings.fresh is Fresh.AT_FIRST and updates == 0
        return first or self.settings.fresh is Fresh.ALWAYS

    def counts(self, v_N: Tensor, updates: int) -> bool:
        """Does an update that gave v count? Ours does not while v is zero everywhere, and gives no scale."""
        return self.settings.fresh is not Fresh.AT_FIRST or updates > 0 or bool(v_N.any())

    def use_(self, v_N: Tensor, groups: Sequence[AdamHyper], updates: int) -> int:
        """v <- v_used. Returns how many elements the floor raised, for which it waits for the device."""
        if self.settings.bias_correction:
            for h in groups:
                adam_math.unbias_variance_(v_N[h.span], h.beta2, updates)
        return int(floor_variance_(v_N, self.tensors, self.blocks).sum()) if self.settings.floor else 0

    def root_(self, v_N: Tensor, groups: Sequence[AdamHyper]) -> None:
        """v <- d, of a v that is as it is used."""
        if self.settings.eps_outside:
            v_N.sqrt_()
        for h in groups:
            v_N[h.span].add_(h.eps)
        if not self.settings.eps_outside:
            v_N.sqrt_()

    def divisor_(
        self, out_N: Tensor, v_N: Tensor, groups: Sequence[AdamHyper], updates: int, coming_N: Tensor | None = None
    ) -> int:
        """out <- d before the freeze, of v or of v after an update by the mean gradient `coming`.

        Returns how many elements the floor raised. While there is no v that gives a scale d is infinite, so that
        nothing moves; with Fresh.NEVER it is of v = 0.
        """
        out_N.copy_(v_N)
        if coming_N is not None:
            for h in groups:
                adam_math.variance_(out_N[h.span], coming_N[h.span], h.beta2)
            updates += self.counts(out_N, updates)
        if updates == 0 and self.settings.fresh is Fresh.AT_FIRST:
            out_N.fill_(torch.inf)
            return 0
        raised = self.use_(out_N, groups, updates) if updates else 0
        self.root_(out_N, groups)
        return raised
