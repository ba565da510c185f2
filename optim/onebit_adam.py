"""1-bit Adam.  [Tang et al. 2021, arXiv 2102.02888]

    warm-up, t <= T:      g = mean_i g_i;  Adam on g, bias-corrected
    after step T:         v <- max(v / (1 - beta2^T), floor), for good
    compressed, t > T:    m <- compressed_mean_i(beta1 m + (1 - beta1) g_i);  x <- x - lr (m / (sqrt(v) + eps) + wd x)

With v fixed the update is linear in the momentum, so error feedback loses nothing: what one step leaves out a later
one sends. Deviations from the paper, with their reasons: docs/algorithms.md.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from thinwire.comm.layout import DEFAULT_BLOCK
from thinwire.comm.protocol import Group, Reducer
from thinwire.optim import adam_math
from thinwire.optim.adam_math import AdamHyper
from thinwire.optim.optimizer import FlatOptimizer, adam_defaults
from thinwire.optim.schedule import StepPlan, Wire, onebit_adam_plan
from thinwire.optim.stability import VarianceStability, Verdict
from thinwire.optim.state import Replicated, Residual, Scratch
from thinwire.optim.variance_floor import floor_variance_

logger = logging.getLogger(__name__)


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

    p, s: modified on success; on PeerLost or NonFiniteInput exactly as before. g: the local gradient; undefined after.
    """
    if plan.gradient is Wire.FULL:
        reduce.full_(g_N)
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


class OneBitAdam(FlatOptimizer[OneBitAdamState]):
    """1-bit Adam as a torch.optim.Optimizer: Adam for `warmup` steps, then 1/32 of fp32's bytes on the wire.

    params: parameters or groups, as torch.optim takes them. betas, eps, weight_decay (decoupled): as in AdamW.
    warmup: uncompressed steps, at least 1; the step after them is the first compressed one. "auto" ends the warm-up
    when the variance has become stable (optim.stability); total_steps and lr_warmup_steps of the run sharpen it.
    group: the ranks (None: torch.distributed's default group, or this process alone).
    block: values that share a scale.
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
        block: int = DEFAULT_BLOCK,
    ) -> None:
        self.warmup = _checked_warmup(warmup, total_steps)
        self.stability: VarianceStability | None = None
        super().__init__(params, adam_defaults(lr, betas, eps, weight_decay), group=group, block=block)
        self.evidence["floored_elements"] = 0
        if warmup == "auto":
            beta2 = max(group["betas"][1] for group in self.param_groups)
            self.stability = VarianceStability(beta2, total_steps, lr_warmup_steps)

    def make_state(self) -> OneBitAdamState:
        """Empty vectors and error memory."""
        p_N = self.space.p_N
        return OneBitAdamState(
            m_N=torch.zeros_like(p_N),
            v_N=torch.zeros_like(p_N),
            momentum_error=self.reduce.new_slot(),
            z_N=torch.zeros_like(p_N),
        )

    def plan(self, step: int) -> StepPlan:
        """The plan of step `step`, counted from 1."""
        return onebit_adam_plan(step, None if self.warmup == "auto" else self.warmup, self.frozen_at)

    def update(self, plan: StepPlan, groups: Sequence[AdamHyper]) -> None:
        """One step of the algorithm; after the last warm-up step the variance is corrected, floored and kept."""
        step(self.space.p_N, self.space.g_N, self.vectors, groups, plan, self.reduce)
        now = self.num_steps + 1
        if plan.freeze_variance or self._is_stable(plan, groups, now):
            self._freeze(groups, now)

    def _is_stable(self, plan: StepPlan, groups: Sequence[AdamHyper], now: int) -> bool:
        """Whether the automatic rule ends the warm-up after this step. Reads one number from the device."""
        if self.stability is None or not plan.update_variance:
            return False
        norm = sum(self.vectors.v_N[h.span].sum() / (1 - h.beta2**now) for h in groups)
        verdict = self.stability.observe(now, float(norm), [h.lr for h in groups])
        if verdict is None:
            return False
        self.evidence["warmup_ended_by"] = str(verdict)
        ratio = self.stability.evidence[-1][1] if self.stability.evidence else None
        level = logging.WARNING if verdict is Verdict.CAP else logging.INFO
        logger.log(level, "warmup_ended step=%d by=%s ratio=%s window=%d", now, verdict, ratio, self.stability.window)
        return True

    def _freeze(self, groups: Sequence[AdamHyper], step: int) -> None:
        """Keep the variance of `step`, corrected and floored, for good."""
        v_N, layout = self.vectors.v_N, self.space.layout
        for h in groups:
            adam_math.unbias_variance_(v_N[h.span], h.beta2, step)
        self.evidence["floored_elements"] = floor_variance_(v_N, layout.live, layout.blocks(self.block))
        self.frozen_at = step

    def prepare_to_save(self) -> None:
        """Put the evidence of the automatic rule among the saved values."""
        if self.stability is not None:
            self.saved["stability"] = asdict(self.stability)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As FlatOptimizer.load_state_dict; the automatic rule goes on from its saved evidence."""
        super().load_state_dict(state_dict)
        if self.stability is not None and "stability" in self.saved:
            self.stability = VarianceStability(**self.saved["stability"])

    def stats(self) -> dict[str, Any]:
        """As FlatOptimizer.stats; with the automatic rule also its ratios as [step, ratio] and why it ended warm-up."""
        ratios = [] if self.stability is None else [list(pair) for pair in self.stability.evidence]
        return {**super().stats(), **({"variance_ratios": ratios} if ratios else {})}


def _checked_warmup(warmup: int | str, total_steps: int | None) -> int | Literal["auto"]:
    if warmup == "auto":
        return "auto"
    if isinstance(warmup, bool) or not isinstance(warmup, int) or warmup < 1:
        raise ValueError(f'warmup = {warmup!r}: the number of uncompressed steps, at least 1, or "auto"')
    if total_steps is not None and warmup >= total_steps:
        raise ValueError(f"warmup = {warmup}: must be less than total_steps = {total_steps}, or nothing is compressed")
    return warmup
