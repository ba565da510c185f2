"""1-bit Adam.  [Tang et al. 2021, arXiv 2102.02888]

    warm-up, t <= T:      g = mean_i g_i;  Adam on g, bias-corrected
    after step T:         v <- max(v / (1 - beta2^T), floor), for good
    compressed, t > T:    m <- compressed_mean_i(beta1 m + (1 - beta1) g_i);  x <- x - lr (m / (sqrt(v) + eps) + wd x)

With v fixed the update is linear in the momentum, so error feedback loses nothing: what one step leaves out a later
one sends. Deviations from the paper, with their reasons: docs/algorithms.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from thinwire.comm.kernels.reference import Scale
from thinwire.comm.layout import DEFAULT_BLOCK
from thinwire.comm.protocol import Group, Reducer
from thinwire.optim import adam_math
from thinwire.optim.adam_math import AdamHyper
from thinwire.optim.freezing import FreezingOptimizer
from thinwire.optim.hyperparameters import adam_defaults
from thinwire.optim.onebit_settings import DEEPSPEED_ADAM, OURS, OneBitSettings
from thinwire.optim.optimizer import NonFinite
from thinwire.optim.parity import Parity, chosen_settings
from thinwire.optim.schedule import StepPlan, Wire
from thinwire.optim.state import Replicated, Residual, Scratch


@dataclass(slots=True)
class OneBitAdamState:
    """Momentum, variance (frozen after warm-up), the error memory of the momentum, and one scratch vector."""

    m_N: Replicated
    v_N: Replicated
    momentum_error: Residual
    z_N: Scratch


def step(
    p_N: Tensor, g_N: Tensor, s: OneBitAdamState, groups: Sequence[AdamHyper], plan: StepPlan, reduce: Reducer
) -> None:
    """One 1-bit Adam step on this rank, in place.

    p, s: modified on success; on PeerLost or NonFiniteInput exactly as before. g: the mean gradient in warm-up, later
    this rank's own; not modified.
    """
    if plan.momentum is Wire.COMPRESSED:
        for h in groups:
            adam_math.momentum_into(s.z_N[h.span], s.m_N[h.span], g_N[h.span], h.beta1)
        reduce.compressed_(s.z_N, s.momentum_error)
        s.m_N.copy_(s.z_N)
    else:
        for h in groups:
            adam_math.momentum_(s.m_N[h.span], g_N[h.span], h.beta1)
    for h in groups:
        if plan.update_variance:
            adam_math.variance_(s.v_N[h.span], g_N[h.span], h.beta2)
        adam_math.descend_(p_N[h.span], s.m_N[h.span], s.v_N[h.span], h, plan.bias_step, s.z_N[h.span])


class OneBitAdam(FreezingOptimizer[OneBitAdamState]):
    """1-bit Adam as a torch.optim.Optimizer: Adam for `warmup` steps, then 1/32 of fp32's bytes on the wire.

    params: parameters or groups, as torch.optim takes them. betas, eps, weight_decay (decoupled): as in AdamW.
    warmup: uncompressed steps, at least 1; the step after them is the first compressed one. "auto" ends the warm-up
    when the variance has become stable (optim.stability); total_steps and lr_warmup_steps of the run sharpen it.
    group: the ranks (None: torch.distributed's default group, or this process alone).
    parity: "deepspeed" gives the numbers of DeepSpeed 0.19.6, with what it does otherwise than the paper and than we;
    `warmup` is its freeze_step - 1. settings: those differences one by one (optim.onebit_settings), in place of parity.
    bias_correction: False: no correction of m and v in warm-up, as the paper and DeepSpeed.
    block: values that share a scale, in our settings. scale: the norm that it keeps, "l2" or "l1" (docs/algorithms.md).
    max_grad_norm, non_finite: as in FlatOptimizer.
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
        warmup: int | Literal["auto"] = "auto",
        total_steps: int | None = None,
        lr_warmup_steps: int | None = None,
        group: Group | None = None,
        parity: Parity | None = None,
        max_grad_norm: float | None = None,
        bias_correction: bool = True,
        settings: OneBitSettings | None = None,
        block: int = DEFAULT_BLOCK,
        scale: Scale = "l2",
        non_finite: NonFinite = "raise",
    ) -> None:
        super().__init__(
            params,
            adam_defaults(lr, betas, eps, weight_decay),
            warmup=warmup,
            total_steps=total_steps,
            lr_warmup_steps=lr_warmup_steps,
            settings=chosen_settings(parity, settings, bias_correction, ours=OURS, deepspeed=DEEPSPEED_ADAM),
            group=group,
            block=block,
            scale=scale,
            max_grad_norm=max_grad_norm,
            non_finite=non_finite,
        )

    def make_state(self) -> OneBitAdamState:
        """Empty vectors and error memory."""
        p_N = self.space.p_N
        return OneBitAdamState(
            m_N=torch.zeros_like(p_N),
            v_N=torch.zeros_like(p_N),
            momentum_error=self.reduce.new_slot(),
            z_N=torch.zeros_like(p_N),
        )

    def advance(self, plan: StepPlan, groups: Sequence[AdamHyper]) -> None:
        """One step of the algorithm."""
        if plan.gradient is Wire.FULL:
            self.mean_gradient_()
        step(self.space.p_N, self.space.g_N, self.vectors, groups, plan, self.reduce)
