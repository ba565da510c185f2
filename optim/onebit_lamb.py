"""1-bit LAMB.  [Li et al. 2021, arXiv 2104.06069]

    warm-up, t <= T:     LAMB on g = mean_i g_i;  c_avg,l <- coeff_beta c_avg,l + (1 - coeff_beta) c_l
    after step T:        v frozen (corrected and floored), v_fresh = v, c_avg frozen, k_l = mean_l(rms m_l) / rms m_l
    compressed, t > T:   m_prev = m;  k m <- compressed_mean_i(k (beta1 m + (1 - beta1) g_i))
                         g_hat = (m - beta1 m_prev) / (1 - beta1);  v_fresh <- beta2 v_fresh + (1 - beta2) g_hat^2
                         u_0 = m / (sqrt(v) + eps),  u = u_0 + wd x
                         r_l = max over elements of (sqrt(v) + eps) / (sqrt(v_fresh) + eps), tempered and clipped
                         x_l <- x_l - lr min(c_avg,l r_l, 4 c_l) u_l,  c_l = clip(||x_l|| / ||u_l||) as in warm-up

The trust ratio needs norms that compression distorts, so its average is frozen with v, and r_l corrects it for how
far the variance has moved since. Its present value only bounds it: where gradients outgrow the frozen v, so does u.
Where v is brought up to date (optim.variance.refresh), so is the trust ratio (optim.lamb_math.lengthened), in place of
c_avg r_l:

    at the freeze, and   |u_0|^2 as it is, or would be, of the mean of exact momenta
    at each refresh
    compressed           x_l <- x_l - lr q_l c_l u_l,  q_l how many times longer one bit has made u_l;  r_l is 1

There v_fresh has no use, and its place is that of the sum of all gradients since the last refresh, which v takes in
where most gradients are zero (optim.lamb_math).

k_l brings the layers to one size before they share scales. Deviations from the paper, with their reasons:
docs/algorithms.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from thinwire.comm.kernels.blocks import on_device
from thinwire.comm.protocol import FullWire
from thinwire.contract.hyperparameters import BETAS, EPS, LR, WEIGHT_DECAY
from thinwire.optim import adam_math, lamb_math
from thinwire.optim.engine.ages import Age
from thinwire.optim.engine.hyperparameters import AdamHyper, adam_defaults
from thinwire.optim.engine.momentum import Momentum, OverFactors
from thinwire.optim.engine.schedule import Phase, StepPlan, Wire
from thinwire.optim.engine.state import Replicated, Residual
from thinwire.optim.kernels.lamb import Bounds, Heard, descent_of, fits
from thinwire.optim.lamb_math import BOUNDS, LambBounds, TensorSegments, tensor_segments
from thinwire.optim.variance.freezing import FreezingOptimizer, OneBitOptions
from thinwire.optim.variance.rare import zeros_of
from thinwire.optim.variance.when_to_freeze import LAMB_WARMUP_PART

LONGEST_STEP = 4.0
"""The factor of a tensor's step is at most this times its trust ratio of now, so that a frozen v that has become too
small cannot make steps of any length."""
SQUARES = "squares"
"""Among the saved values where factor_T is |u_0|^2 of exact momenta."""
HALF = 0.5
"""The part of the mean gradient that must be zero, so that nothing is compressed. In 8 bits small values are too."""
SUMMED_FROM = "summed_from"
"""Among the saved values: the step after which A counts; absent where R at that step is not known."""


@dataclass(slots=True)
class OneBitLambState:
    """As 1-bit Adam's, and what LAMB keeps: the fresh variance, and three numbers for each of T tensors."""

    momentum: Momentum
    """Exchanged times k, so that where it is in received rows it is what they say over k."""
    v_N: Replicated
    fresh_v_N: Replicated
    """Infinite where v was floored: such an element has no part in the maximum r_l. A of optim.lamb_math where the
    trust ratio is followed."""
    coeff_T: Replicated
    """c_avg: the average trust ratio of the warm-up."""
    scaling_T: Replicated
    """k_l, from the freeze on."""
    factor_T: Replicated
    """r_l of the last step. Where the trust ratio is followed |u_0|^2 of exact momenta, exactly 1 until it is known."""
    momentum_error: Residual

    @property
    def m_N(self) -> Replicated:
        """The momentum of all ranks, decoded where it is in received rows."""
        return self.momentum.floats()

    def holder(self, name: str) -> Momentum:
        """What holds a vector that is not a field: m."""
        return self.momentum


def warm_up(
    p_N: Tensor,
    g_N: Tensor,
    s: OneBitLambState,
    groups: Sequence[tuple[AdamHyper, Sequence[TensorSegments]]],
    bounds: LambBounds,
    plan: StepPlan,
    *,
    follow: bool,
    seen_N: Tensor | None = None,
) -> None:
    """LAMB on g, the mean gradient, in place; in warm-up c_avg goes on. p, s: modified. seen: as in lamb_math.step_.

    follow: is the trust ratio brought up to date with v? Where a frozen variance is brought up to date c_avg stays, as
    k does: decoded momenta are longer than means, and R is in units of k.
    """
    m_N = s.momentum.written()
    squares_T = s.factor_T if plan.phase is not Phase.WARMUP and follow else None
    for h, parts in groups:
        coeff_t = lamb_math.step_(p_N, g_N, m_N, s.v_N, h, parts, bounds, plan.bias_of(h.seen), squares_T, seen_N)
        if plan.phase is not Phase.WARMUP:
            continue
        average_t = s.coeff_T[parts[0].tensors.start : parts[-1].tensors.stop]
        average_t.lerp_(coeff_t, 1 - bounds.coeff_beta)


@dataclass(frozen=True, slots=True)
class _Found:
    """Of each tensor of a part, float[t]: the largest ratio of roots, the norms of u_0, of u and of x."""

    ratio_t: Tensor
    direction_t: Tensor
    update_t: Tensor
    size_t: Tensor


def descend_(
    p_N: Tensor,
    s: OneBitLambState,
    now: OverFactors,
    before: OverFactors | Tensor,
    groups: Sequence[tuple[AdamHyper, Sequence[TensorSegments]]],
    bounds: LambBounds,
    *,
    follow: bool,
) -> None:
    """The compressed step on this rank after its communication, in place. p, s: modified, but for the momentum.

    follow: as in warm_up. now: the momentum that all ranks have received. before: that of the step before.
    """
    count = len(s.scaling_T)
    heard, heard_before = Heard(now, p_N, count), Heard(before, p_N, count)
    if not fits(p_N) or any(part.tiles is None for _, parts in groups for part in parts):
        for h, part in ((h, part) for h, parts in groups for part in parts):
            found, u_s = _measured(p_N, s, heard.part(part.span), heard_before.part(part.span), part, h, follow=follow)
            lamb_math.move_(p_N[part.span], u_s, _factors(s, found, part, h, bounds, follow=follow), h.lr, part)
        return
    limits = Bounds(
        bounds.factor_min,
        bounds.factor_max,
        1 - bounds.factor_threshold,
        1 + bounds.factor_threshold,
        bounds.min_coeff,
        bounds.max_coeff,
        LONGEST_STEP,
        follow,
    )
    vectors = p_N, s.v_N, s.fresh_v_N, s.coeff_T, s.factor_T
    descent: Any = descent_of(vectors, heard, heard_before, limits)
    for h, part in ((h, part) for h, parts in groups for part in parts):
        descent.descend_(part.tiles, part.tensors, h)  # tiles of its own kind
    descent.done()


def _measured(
    p_N: Tensor,
    s: OneBitLambState,
    m_s: Tensor,
    before_s: Tensor,
    part: TensorSegments,
    h: AdamHyper,
    *,
    follow: bool,
) -> tuple[_Found, Tensor]:
    """v_fresh <- beta2 v_fresh + (1 - beta2) g_hat^2, g_hat the gradient that m and m before imply; and u.

    Where the trust ratio is followed A <- A + m - beta1 m_before in its place, and the ratios have no use: they are 0.

    s: v_fresh is modified. As a chain of torch operations: the definition.
    """
    p_s, v_s, fresh_v_s = p_N[part.span], s.v_N[part.span], s.fresh_v_N[part.span]
    given_s = torch.sub(m_s, before_s, alpha=h.beta1)
    if follow:
        fresh_v_s.add_(given_s)
        ratio_t = given_s.new_zeros(len(part.live))
    else:
        adam_math.variance_(fresh_v_s, given_s.div_(1 - h.beta1), h.beta2)
        ratio_t = part.maxima(v_s.sqrt().add_(h.eps).div_(fresh_v_s.sqrt().add_(h.eps)))
    u_s = lamb_math.adam_direction(m_s, v_s, h, None)
    direction_t = part.norms(u_s)
    u_s.add_(p_s, alpha=h.weight_decay)
    return _Found(ratio_t, direction_t, part.norms(u_s), part.norms(p_s)), u_s


def _factors(
    s: OneBitLambState,
    found: _Found,
    part: TensorSegments,
    h: AdamHyper,
    bounds: LambBounds,
    *,
    follow: bool,
) -> Tensor:
    """min(c_avg r, 4 c) of each tensor, float[t], new; where the trust ratio is followed and |u_0|^2 known q c.

    s: r is modified.
    """
    # u comes from the decoded m, which is the same on every rank, and so is its trust ratio.
    trust_t = lamb_math.clipped_ratios(found.size_t, found.update_t, bounds)
    average_t, factor_t = s.coeff_T[part.tensors], s.factor_T[part.tensors]
    if follow:
        followed_t = lamb_math.lengthened(factor_t, found.direction_t, found.update_t) * trust_t
        bounded_t = torch.minimum(average_t, LONGEST_STEP * trust_t)
        return torch.where(lamb_math.are_known(factor_t), followed_t, bounded_t)
    _move_ratio_(factor_t, found, h, bounds)
    return torch.minimum(average_t * factor_t, LONGEST_STEP * trust_t)


def _move_ratio_(before_t: Tensor, found: _Found, h: AdamHyper, bounds: LambBounds) -> None:
    """r_l <- that of this step, tempered and clipped."""
    # 0: every element was floored
    factor_t = torch.where(found.ratio_t > 0, found.ratio_t, torch.ones_like(found.ratio_t))
    if h.weight_decay:
        # the decay's part of the update does not depend on v, so it is not rescaled
        weight_t = (found.direction_t / found.update_t).nan_to_num_(1.0).clamp_(max=1.0)
        factor_t = factor_t * weight_t + (1 - weight_t)
    factor_t.clamp_(bounds.factor_min, bounds.factor_max)
    threshold = bounds.factor_threshold
    before_t.copy_(torch.clamp(factor_t, before_t * (1 - threshold), before_t * (1 + threshold)))


class OneBitLamb(FreezingOptimizer[OneBitLambState]):
    """1-bit LAMB as a torch.optim.Optimizer: LAMB until the variance is frozen, then 1/32 of fp32's bytes on the wire.

    params, lr, betas, eps, weight_decay, warmup, total_steps, lr_warmup_steps, refresh, group, model, overlap,
    max_grad_norm, non_finite, full_exchange, topology: as in OneBitAdam.
    bounds: of the trust ratio and of the variance ratio (LambBounds), with names and defaults as in DeepSpeed.
    The constructor is collective: it sends rank 0's parameters to all. Raises: ValueError; PeerLost, WireMismatch.
    """

    fresh: ClassVar[Mapping[str, float]] = {"scaling_T": 1.0, "factor_T": 1.0}
    exchanged_times = "scaling_T"
    warmup_part = LAMB_WARMUP_PART

    def __init__(
        self,
        params: ParamsT,
        lr: float = LR.default,
        betas: tuple[float, float] = BETAS,
        eps: float = EPS.default,
        weight_decay: float = WEIGHT_DECAY.default,
        *,
        bounds: LambBounds = BOUNDS,
        **options: Unpack[OneBitOptions],
    ) -> None:
        self.bounds = bounds
        super().__init__(params, adam_defaults(lr, betas, eps, weight_decay), **options)

    def make_state(self) -> OneBitLambState:
        """Empty vectors and error memory; k and r are 1 until they are known."""
        p_N, memory = self.space.p_N, self.reduce.new_memory()
        per_tensor = torch.zeros(len(self.space.tensors), dtype=p_N.dtype, device=p_N.device)
        return OneBitLambState(
            momentum=Momentum(self.new_vector(), self.reduce, memory),
            v_N=self.new_vector(),
            fresh_v_N=self.new_vector(),
            coeff_T=per_tensor,
            scaling_T=torch.ones_like(per_tensor),
            factor_T=torch.ones_like(per_tensor),
            momentum_error=memory,
        )

    def set_ages(self, ages: Sequence[Age]) -> None:
        """As FlatOptimizer.set_ages, with the tensors of each run."""
        super().set_ages(ages)
        self.segments = tensor_segments(self.space, self.runs)

    def advance(self, plan: StepPlan, groups: Sequence[AdamHyper]) -> None:
        """One step of the algorithm."""
        s, space = self.vectors, self.space
        pairs = list(zip(groups, self.segments, strict=True))
        if plan.gradient is Wire.FULL:
            self.mean_gradient_()
            follow = self.refreshes
            seen_N = self._take_sum(groups) if follow and plan.phase is Phase.COMPRESSED else None
            warm_up(space.p_N, space.g_N, s, pairs, self.bounds, plan, follow=follow, seen_N=seen_N)
            return
        self.exchange_(plan)
        before = s.momentum.last or s.momentum.floats()  # there until the next exchange, after the commit too
        now = OverFactors(self.reduce.result, s.scaling_T, space.layout)
        self.reduce.commit()
        s.momentum.received(s.scaling_T)
        # The trust ratio is followed by what refreshes find, and so only where there are any.
        descend_(space.p_N, s, now, before, pairs, self.bounds, follow=self.refreshes)

    def _take_sum(self, groups: Sequence[AdamHyper]) -> Tensor | None:
        """In a refresh: the root of what v is to take in, where that is not g^2; and A (optim.lamb_math).

        Collective where most of g is zero. Raises: PeerLost, NonFiniteInput, and then nothing has changed.
        """
        s, g_N, live = self.vectors, self.space.g_N, self.space.layout.live
        zeros_t, residual_N = zeros_of(g_N, live), None
        if lamb_math.are_most_zero(zeros_t, self.space):
            wire: FullWire = "int8" if self.topology == "flat" else "bf16"
            residual_N = s.momentum_error.share(self.group.size).mul_(self.group.size)
            self.reduce.full_(residual_N, wire)  # R, bit-identical on every rank
            self.as_momentum_(residual_N)
        for h in groups:
            s.fresh_v_N[h.span].add_(g_N[h.span], alpha=1 - h.beta1)
        if residual_N is None:
            return None
        sum_N = s.fresh_v_N + residual_N
        for h in groups:
            sum_N[h.span].div_(1 - h.beta1)
        torch.neg(residual_N, out=s.fresh_v_N)
        since, now = self.saved.get(SUMMED_FROM), self.num_steps + 1
        self.saved[SUMMED_FROM] = now
        return None if since is None else lamb_math.root_mean_square(sum_N, g_N, now - since, zeros_t, live)

    def on_freeze(self, floored_N: Tensor, seen: Sequence[int | None]) -> None:
        """Keep the coefficients, corrected for their start at 0, and find k. What was floored once has no part in r."""
        s = self.vectors
        self._begin_fresh(floored_N)
        s.factor_T.fill_(1)
        self.saved.pop(SQUARES, None)
        if self.refreshes:
            self.saved[SQUARES] = True
            for h, of_run in zip(self.hypers(self.num_steps + 1), self.segments, strict=True):
                for part in of_run:
                    u_s = lamb_math.adam_direction(s.m_N[part.span], s.v_N[part.span], h, None)
                    s.factor_T[part.tensors] = part.norms(u_s).square_()
        parts = [1.0 if t is None else 1 - self.bounds.coeff_beta**t for t in seen]
        s.coeff_T.div_(on_device(torch.tensor(parts, dtype=s.coeff_T.dtype, device="cpu"), s.coeff_T.device))
        sizes_T = torch.empty_like(s.scaling_T)
        for part in self._parts():
            sizes_T[part.tensors] = part.rms(s.m_N[part.span])
        moving_T = sizes_T > 0  # a layer that never had a gradient has no size to be brought to: its k stays 1
        s.scaling_T.fill_(1)
        if bool(moving_T.any()):
            s.scaling_T.copy_(torch.where(moving_T, sizes_T[moving_T].mean() / sizes_T, 1.0))

    def holds_off(self) -> str | None:
        """As FreezingOptimizer.holds_off: where 8 bits are sent and most of the gradient is zero.

        LAMB divides by the norm of all of u, so that every row has to bear what a kept v does to rare ones.
        """
        if self.full_exchange != "int8":
            return None
        zeros_t = zeros_of(self.space.g_N, self.space.layout.live)
        if not lamb_math.are_most_zero(zeros_t, self.space, HALF):
            return None
        return "more than half of the gradient is zero: a variance of rare rows that is kept would lengthen all steps"

    def _begin_fresh(self, floored_N: Tensor) -> None:
        s = self.vectors
        self.saved.pop(SUMMED_FROM, None)
        if not self.refreshes:
            s.fresh_v_N.copy_(torch.where(floored_N | s.fresh_v_N.isinf(), torch.inf, s.v_N))
            return
        s.fresh_v_N.zero_()
        if self.full_exchange != "int8":  # with 8 bits R is not zero then, and not known
            self.saved[SUMMED_FROM] = self.num_steps + 1

    def resumed(self) -> None:
        """As FreezingOptimizer.resumed. Of a run whose sums nobody will read v_fresh begins anew."""
        super().resumed()
        if self.frozen_at is not None and self.refreshes != (SQUARES in self.saved):
            self.vectors.factor_T.fill_(1)  # it was r, or q, of an older version; or is to be r
            self.saved.pop(SQUARES, None)
            if self.refreshes:
                self.saved[SQUARES] = True
        if not self.refreshes and self.saved.pop(SUMMED_FROM, None) is not None:
            self.vectors.fresh_v_N.copy_(self.vectors.v_N)

    def keep(self, seen: Mapping[int, int]) -> Tensor:
        """As WarmupOptimizer.keep, with the average coefficient and k of these tensors as on_freeze would have them."""
        s = self.vectors
        m_N = s.momentum.written() if seen else s.m_N  # what was received is in units of the k of now
        sizes_T = torch.cat([part.rms(m_N[part.span]) for part in self._parts()])
        others_T = (sizes_T * s.scaling_T)[[i for i in range(len(sizes_T)) if i not in seen and sizes_T[i] > 0]]
        for i, t in seen.items():
            s.coeff_T[i] /= 1 - self.bounds.coeff_beta**t
            s.factor_T[i] = 1
            s.scaling_T[i] = others_T.mean() / sizes_T[i] if len(others_T) and sizes_T[i] > 0 else 1.0
        raised_N = super().keep(seen)
        for tensor in (self.space.tensors[i] for i in seen):
            at = slice(tensor.start, tensor.stop)
            s.fresh_v_N[at] = 0 if self.refreshes else torch.where(raised_N[at], torch.inf, s.v_N[at])
        return raised_N

    def _parts(self) -> list[TensorSegments]:
        return [part for parts in self.segments for part in parts]

    def stats(self) -> dict[str, Any]:
        """As OneBitAdam.stats, with the spread of trust coefficients and variance factors over the tensors."""
        spread_of = {}
        for name, values in (("lamb_coeff", self.vectors.coeff_T), ("lamb_factor", self.vectors.factor_T)):
            spread_of.update({f"{name}_{kind}": float(f(values)) for kind, f in _SPREAD})
        return {**super().stats(), **spread_of}


_SPREAD = (("min", torch.min), ("median", torch.median), ("max", torch.max))
