"""The uncompressed baselines, on the same shell: the same buffers, exchange and bookkeeping, nothing compressed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.comm.protocol import Group
from thinwire.optim import adam_math
from thinwire.optim.adam_math import AdamHyper
from thinwire.optim.optimizer import FlatOptimizer, adam_defaults
from thinwire.optim.schedule import StepPlan, dense_plan
from thinwire.optim.state import Replicated, Scratch


@dataclass(slots=True)
class AdamState:
    """Momentum, variance and one scratch vector."""

    m_N: Replicated
    v_N: Replicated
    scratch_N: Scratch


class Adam(FlatOptimizer[AdamState]):
    """Adam with decoupled weight decay on the mean gradient: torch.optim.AdamW under data parallelism.

    Arguments as in torch.optim.AdamW; group: the ranks (None: the default group, or this process alone).
    The constructor is collective: it sends rank 0's parameters to all. Raises: ValueError; PeerLost, WireMismatch.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        group: Group | None = None,
    ) -> None:
        super().__init__(params, adam_defaults(lr, betas, eps, weight_decay), group=group)

    def make_state(self) -> AdamState:
        """Empty vectors."""
        p_N = self.space.p_N
        return AdamState(torch.zeros_like(p_N), torch.zeros_like(p_N), torch.zeros_like(p_N))

    def plan(self, step: int) -> StepPlan:
        """Every step is dense."""
        return dense_plan(step)

    def update(self, plan: StepPlan, groups: Sequence[AdamHyper]) -> None:
        """Average the gradients, then Adam."""
        s, space = self.vectors, self.space
        self.reduce.full_(space.g_N)
        for h in groups:
            adam_math.momentum_(s.m_N[h.span], space.g_N[h.span], h.beta1)
            adam_math.variance_(s.v_N[h.span], space.g_N[h.span], h.beta2)
            adam_math.descend_(space.p_N[h.span], s.m_N[h.span], s.v_N[h.span], h, plan.bias_step, s.scratch_N[h.span])
