"""1-bit Adam.  [Tang et al. 2021, arXiv 2102.02888]

    warm-up, t <= T:      g = mean_i g_i;  Adam on g, bias-corrected
    after step T:         v <- max(v / (1 - beta2^T), floor), for good
    compressed, t > T:    m <- compressed_mean_i(beta1 m + (1 - beta1) g_i);  x <- x - lr (m / (sqrt(v) + eps) + wd x)

With v fixed the update is linear in the momentum, so error feedback loses nothing: what one step leaves out a later
one sends. Deviations from the paper, with their reasons: docs/algorithms.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from thinwire.comm.exchange.kept_sums import KeptSums
from thinwire.comm.protocol import BucketedReducer, Reducer
from thinwire.optim import adam_math
from thinwire.optim.engine.exchanges import CompressedSum, Exchange, FusedMomentum, Runs
from thinwire.optim.engine.hyperparameters import AdamHyper, adam_defaults
from thinwire.optim.engine.momentum import Divisor, Momentum, next_momentum_
from thinwire.optim.engine.schedule import StepPlan, Wire
from thinwire.optim.engine.state import Replicated, Residual, Scratch
from thinwire.optim.onebit_settings import DEEPSPEED_ADAM
from thinwire.optim.variance.freezing import FreezingOptimizer, OneBitOptions


@dataclass(slots=True)
class OneBitAdamState:
    """Momentum, variance (frozen after warm-up), and the error memory of the momentum.

    z: scratch; in the compressed phase, where the exchange goes by bucket, the divisor is in it.

    An element in fp32 takes 8 bytes as parameter and gradient, 12 as m, v and z, and 4 + 4 / ranks of error memory, in
    both phases; rows of signs half a byte more. With overlap 4 more from backward to zero_grad(): the gradient that
    backward made, which compressed steps read there. And 4 more during the first compressed step and the one after a
    load or state_dict(), which form what they send from float m; in the other compressed steps m is neither read nor
    written.
    """

    momentum: Momentum
    v_N: Replicated
    momentum_error: Residual
    divisor: Divisor
    z_N: Scratch

    @property
    def m_N(self) -> Replicated:
        """The momentum of all ranks, decoded where it is in received rows."""
        return self.momentum.floats()


def step(
    p_N: Tensor, g_N: Tensor, s: OneBitAdamState, groups: Sequence[AdamHyper], plan: StepPlan, reduce: Reducer
) -> None:
    """One 1-bit Adam step on this rank, in place; a compressed one where vectors are exchanged as a whole.

    p, s: modified on success; on PeerLost or NonFiniteInput exactly as before. g: the mean gradient in warm-up, later
    this rank's own; not modified.
    """
    if plan.momentum is Wire.COMPRESSED:
        for h in groups:
            adam_math.momentum_into(s.z_N[h.span], s.m_N[h.span], g_N[h.span], h.beta1)
        reduce.compressed_(s.z_N, s.momentum_error)
        s.m_N.copy_(s.z_N)
    for h in groups:
        p, g, m, v, z = (x[h.span] for x in (p_N, g_N, s.m_N, s.v_N, s.z_N))
        if plan.momentum is Wire.COMPRESSED:
            adam_math.descend_(p, m, v, h, plan.bias_step, z)
        else:
            adam_math.step_(p, g, m, v, h, plan.bias_step, z)


def receive(p_N: Tensor, s: OneBitAdamState, groups: Sequence[AdamHyper], reduce: BucketedReducer) -> None:
    """The second half of a compressed step by bucket: m is what was received, and x descends along it, in one pass.

    p, s: modified. reduce: with an exchange that is finished, and then committed.
    """
    divisor_N = s.divisor.of(s.v_N, groups)
    for h in groups:
        reduce.descend_(p_N, divisor_N, h.lr, h.lr * h.weight_decay, h.span.start, h.span.stop)
    reduce.commit()
    s.momentum.received()


class OneBitAdam(FreezingOptimizer[OneBitAdamState]):
    """1-bit Adam as a torch.optim.Optimizer: Adam for `warmup` steps, then 1/32 of fp32's bytes on the wire.

    params: parameters or groups, as torch.optim takes them. betas, eps, weight_decay (decoupled): as in AdamW.
    warmup: uncompressed steps, at least 1; the step after them is the first compressed one. "auto" ends the warm-up
    when the variance has become stable (variance/when_to_freeze.py); total_steps and lr_warmup_steps of the run sharpen
    it.
    group: the ranks (None: torch.distributed's default group, or this process alone).
    parity: "deepspeed" gives the numbers of DeepSpeed 0.19.6, with what it does otherwise than the paper and than we;
    `warmup` is its freeze_step - 1. settings: those differences one by one (optim.onebit_settings), in place of parity.
    bias_correction: False: no correction of m and v in warm-up, as the paper and DeepSpeed.
    block: values that share a scale, in our settings. scale: the norm that it keeps, "l2" or "l1" (docs/algorithms.md).
    max_grad_norm, non_finite, overlap, bucket_elements: as in CheckedOptions (optim.engine.options).
    The constructor is collective: it sends rank 0's parameters to all. Raises: ValueError; PeerLost, WireMismatch.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **options: Unpack[OneBitOptions],
    ) -> None:
        defaults = adam_defaults(lr, betas, eps, weight_decay)
        super().__init__(params, defaults, deepspeed=DEEPSPEED_ADAM, **options)

    def make_state(self) -> OneBitAdamState:
        """Empty vectors and error memory."""
        p_N, slot, z_N = self.space.p_N, self.reduce.new_slot(), torch.zeros_like(self.space.p_N)
        return OneBitAdamState(
            momentum=Momentum(p_N, self.bucketed, slot if isinstance(slot, KeptSums) else None),
            v_N=torch.zeros_like(p_N),
            momentum_error=slot,
            divisor=Divisor(self.space.layout, z_N),
            z_N=z_N,
        )

    def begin_exchange(self, plan: StepPlan) -> Exchange:
        """The mean gradient in warm-up; then the momentum, from the rows of the last one where there are such."""
        s, g_N, reduce = self.vectors, self.space.g_N, self.bucketed
        if plan.momentum is not Wire.COMPRESSED:
            return super().begin_exchange(plan)
        assert reduce is not None
        assert isinstance(s.momentum_error, KeptSums)
        beta1_K = [self.group_at(start)["betas"][0] for start, _ in reduce.buckets.spans]
        if s.momentum.in_rows:
            return FusedMomentum(reduce, s.momentum_error, g_N, beta1_K)
        m_N, z_N = s.momentum.floats(), torch.empty_like(g_N)

        def form(k: int, at: slice, runs: Runs) -> None:
            next_momentum_(z_N[at], m_N[at], g_N[at], beta1_K[k])

        return CompressedSum(reduce, s.momentum_error, z_N, form)

    def advance(self, plan: StepPlan, groups: Sequence[AdamHyper]) -> None:
        """One step of the algorithm."""
        if plan.momentum is Wire.COMPRESSED and self.bucketed is not None:
            self.overlap.complete(lambda: self.begin_exchange(plan))
            receive(self.space.p_N, self.vectors, groups, self.bucketed)
            return
        if plan.gradient is Wire.FULL:
            self.mean_gradient_()
        step(self.space.p_N, self.space.g_N, self.vectors, groups, plan, self.reduce)
