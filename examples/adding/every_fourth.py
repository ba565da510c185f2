"""A policy of one's own: send every fourth step. What the other three give waits in the error memory meanwhile.

So nothing is lost over a change of ranks or a save: what waits is a part of R, as what a codec leaves out is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch.optim.optimizer import ParamsT

from thinwire.optim.engine.exchanges import Exchange, whole_sum
from thinwire.optim.engine.hyperparameters import adam_defaults
from thinwire.optim.engine.optimizer import FlatOptimizer
from thinwire.optim.engine.options import Options
from thinwire.optim.engine.schedule import Phase, StepPlan, Wire
from thinwire.optim.engine.state import Residual


@dataclass(slots=True)
class Waiting:
    """What has not been sent."""

    gradient_sum_error: Residual


class EveryFourth(FlatOptimizer[Waiting]):
    """x <- x - lr (compressed mean of the sum of four gradients), every fourth step; between them nothing moves."""

    every = 4

    def __init__(self, params: ParamsT, lr: float = 1e-3, **options: Unpack[Options]) -> None:
        super().__init__(params, adam_defaults(lr, (0.9, 0.999), 1e-8, 0.0), **options)

    def make_state(self) -> Waiting:
        """Empty error memory."""
        return Waiting(self.reduce.new_memory())

    def plan(self, step: int) -> StepPlan:
        """Gradients stay local; every fourth step something crosses."""
        crosses = Wire.COMPRESSED if step % self.every == 0 else Wire.LOCAL
        return StepPlan(Phase.COMPRESSED, Wire.LOCAL, crosses, update_variance=False, bias_step=None)

    def waits_for(self, plan: StepPlan) -> str | None:
        """As FlatOptimizer.waits_for."""
        return super().waits_for(plan) or ("nothing is sent" if plan.momentum is Wire.LOCAL else None)

    def begin_exchange(self, plan: StepPlan) -> Exchange:
        """Of this step's gradient; with what waits it is the sum of four."""
        return whole_sum(self.reduce, self.vectors.gradient_sum_error, self.space.g_N)

    def update(self, plan: StepPlan, groups: Sequence[Any]) -> None:
        """Keep the gradient, or send, and move."""
        space = self.space
        if plan.momentum is Wire.LOCAL:
            self.vectors.gradient_sum_error.add_(space.g_N)
            return
        self.exchange_(plan)
        mean_N = torch.empty_like(space.p_N)
        self.reduce.result.decode_(mean_N)
        for h in groups:
            space.p_N[h.span].sub_(mean_N[h.span], alpha=h.lr)
        self.reduce.commit()
