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
k_l brings the layers to one size before they share scales. Deviations from the paper, with their reasons:
docs/algorithms.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from thinwire.comm.layout import BYTE, round_up
from thinwire.optim import adam_math, lamb_math
from thinwire.optim.engine.ages import Age
from thinwire.optim.engine.exchanges import CompressedSum, Exchange, LeftGradients, LeftInPlace
from thinwire.optim.engine.hyperparameters import AdamHyper, adam_defaults
from thinwire.optim.engine.schedule import Phase, StepPlan, Wire
from thinwire.optim.engine.state import Replicated, Residual, Scratch
from thinwire.optim.kernels import updates
from thinwire.optim.lamb_math import BOUNDS, LambHyper, TensorSegments, tensor_segments
from thinwire.optim.onebit_settings import DEEPSPEED_LAMB, OneBitSettings
from thinwire.optim.variance.freezing import FreezingOptimizer, OneBitOptions


@dataclass(slots=True)
class OneBitLambState:
    """As 1-bit Adam's, and what LAMB keeps: the fresh variance, and three numbers for each of T tensors."""

    m_N: Replicated
    v_N: Replicated
    fresh_v_N: Replicated
    """Infinite where v was floored: such an element has no part in the maximum r_l."""
    coeff_T: Replicated
    """c_avg: the average trust ratio of the warm-up."""
    scaling_T: Replicated
    """k_l, from the freeze on."""
    factor_T: Replicated
    """r_l of the last step."""
    momentum_error: Residual
    z_N: Scratch


def step(
    p_N: Tensor,
    g_N: Tensor,
    s: OneBitLambState,
    groups: Sequence[tuple[AdamHyper, TensorSegments]],
    bounds: LambHyper,
    settings: OneBitSettings,
    plan: StepPlan,
) -> None:
    """One 1-bit LAMB step on this rank after its communication, in place.

    p, s: modified. g: the mean gradient in warm-up, not modified. s.z: in the compressed phase k m, as all ranks have
    received it.
    """
    if plan.momentum is Wire.COMPRESSED:
        for h, segments in groups:
            _descend_compressed_(p_N, s, h, segments, bounds, settings)
        return
    for h, segments in groups:
        adam_math.momentum_(s.m_N[h.span], g_N[h.span], h.beta1)
        adam_math.variance_(s.v_N[h.span], g_N[h.span], h.beta2)
        coeff_t = lamb_math.descend_(p_N, s.m_N, s.v_N, s.z_N, h, segments, bounds, plan.bias_of(h.seen))
        if plan.phase is not Phase.WARMUP:
            continue  # c_avg stays, as k does: decoded momenta are longer than means, and R is in units of k
        average_t = s.coeff_T[segments.tensors]
        moved_t = torch.lerp(average_t, coeff_t, 1 - bounds.coeff_beta)
        average_t.copy_(torch.where(coeff_t == 1, average_t, moved_t) if settings.skip_unit_coefficients else moved_t)


def propose_(
    g_N: Tensor, s: OneBitLambState, tensors: Iterable[TensorPart], beta1: float, runs: LeftGradients = ()
) -> None:
    """z <- k (beta1 m + (1 - beta1) g) in parts of tensors. z: modified. runs: read in place of g."""
    for tensor, offset, part in tensors:
        z, g, m = s.z_N[part], g_N[part], s.m_N[part]
        if runs and (own := runs[tensor]) is not None:
            g = own[offset : offset + z.numel()]
        if updates.fits(z):
            updates.scaled_momentum_(z, g, m, beta1, s.scaling_T[tensor : tensor + 1])
        else:
            adam_math.momentum_into(z, m, g, beta1)
            z.mul_(s.scaling_T[tensor])


TensorPart = tuple[int, int, slice]
"""A tensor's number, where in it the part begins, and the elements of the flat vectors."""


@dataclass(frozen=True, slots=True)
class _Found:
    """Of each tensor of a group, float[t]: the largest ratio of roots, the norms of u_0, of u and of x."""

    ratio_t: Tensor
    direction_t: Tensor
    update_t: Tensor
    size_t: Tensor


def _receive_(p_N: Tensor, s: OneBitLambState, h: AdamHyper, segments: TensorSegments) -> _Found:
    """m <- z / k, v_fresh <- beta2 v_fresh + (1 - beta2) g_hat^2, g_hat the gradient that two received momenta imply.

    s: m, v_fresh and z are modified; where it is a chain, u is in z then.
    """
    scaling_t = s.scaling_T[segments.tensors]
    if segments.tiles is not None:
        tiles, count = segments.tiles, len(segments.live)
        updates.lamb_measure_(tiles, p_N, s.z_N, s.m_N, s.v_N, s.fresh_v_N, scaling_t, h)
        return _Found(tiles.largest_t(0, count), *(tiles.norms_t(row, count) for row in (1, 2, 3)))
    m_s, fresh_v_s, u_s = s.m_N[h.span], s.fresh_v_N[h.span], s.z_N[h.span]
    u_s.div_(segments.expand(scaling_t))
    g_hat_s = torch.sub(u_s, m_s, alpha=h.beta1).div_(1 - h.beta1)
    adam_math.variance_(fresh_v_s, g_hat_s, h.beta2)
    m_s.copy_(u_s)
    torch.div(s.v_N[h.span].sqrt().add_(h.eps), fresh_v_s.sqrt().add_(h.eps), out=u_s)
    ratio_t = segments.maxima(s.z_N)
    u_s.copy_(lamb_math.adam_direction(m_s, s.v_N[h.span], h, None))
    direction_t = segments.norms(s.z_N)
    u_s.add_(p_N[h.span], alpha=h.weight_decay)
    return _Found(ratio_t, direction_t, segments.norms(s.z_N), segments.norms(p_N))


def _descend_compressed_(
    p_N: Tensor,
    s: OneBitLambState,
    h: AdamHyper,
    segments: TensorSegments,
    bounds: LambHyper,
    settings: OneBitSettings,
) -> None:
    found = _receive_(p_N, s, h, segments)
    # 0: every element was floored
    factor_t = torch.where(found.ratio_t > 0, found.ratio_t, torch.ones_like(found.ratio_t))
    if h.weight_decay and settings.weigh_ratio:
        # the decay's part of the update does not depend on v, so it is not rescaled
        part = (found.direction_t / found.update_t).nan_to_num_(1.0).clamp_(max=1.0)
        factor_t = factor_t * part + (1 - part)
    factor_t.clamp_(bounds.factor_min, bounds.factor_max)
    before_t = s.factor_T[segments.tensors]
    threshold = bounds.factor_threshold
    before_t.copy_(torch.clamp(factor_t, before_t * (1 - threshold), before_t * (1 + threshold)))
    step_t = s.coeff_T[segments.tensors] * before_t
    if isfinite(settings.longest_step):
        # u comes from the decoded m, which is the same on every rank, and so is its trust ratio.
        trust_t = lamb_math.clipped_ratios(found.size_t, found.update_t, bounds)
        step_t = torch.minimum(step_t, settings.longest_step * trust_t)
    if segments.tiles is not None:
        updates.lamb_move_(segments.tiles, p_N, s.m_N, s.v_N, step_t.mul_(h.lr), h)
    else:
        lamb_math.move_(p_N[h.span], s.z_N[h.span], step_t, h.lr, segments)


class OneBitLamb(FreezingOptimizer[OneBitLambState]):
    """1-bit LAMB as a torch.optim.Optimizer: LAMB until the variance is frozen, then 1/32 of fp32's bytes on the wire.

    params, lr, betas, eps, weight_decay, warmup, total_steps, lr_warmup_steps, group, parity, max_grad_norm,
    bias_correction, settings, block, scale, non_finite, overlap, bucket_elements, saves, model, full_exchange,
    error_memory: as in OneBitAdam. variance: None.
    max_coeff, min_coeff: bounds of the trust ratio; coeff_beta: its average; factor_max, factor_min, factor_threshold:
    bounds of the variance ratio and of its change in a step. Names and defaults as in DeepSpeed.
    The constructor is collective: it sends rank 0's parameters to all. Raises: ValueError; PeerLost, WireMismatch.
    """

    fresh: ClassVar[Mapping[str, float]] = {"scaling_T": 1.0, "factor_T": 1.0}
    narrows = ("error_memory",)

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        max_coeff: float = BOUNDS.max_coeff,
        min_coeff: float = BOUNDS.min_coeff,
        coeff_beta: float = BOUNDS.coeff_beta,
        factor_max: float = BOUNDS.factor_max,
        factor_min: float = BOUNDS.factor_min,
        factor_threshold: float = BOUNDS.factor_threshold,
        **options: Unpack[OneBitOptions],
    ) -> None:
        self.bounds = LambHyper(max_coeff, min_coeff, coeff_beta, factor_max, factor_min, factor_threshold)
        defaults = adam_defaults(lr, betas, eps, weight_decay)
        super().__init__(params, defaults, deepspeed=DEEPSPEED_LAMB, **options)

    def make_state(self) -> OneBitLambState:
        """Empty vectors and error memory; k and r are 1 until they are known."""
        p_N = self.space.p_N
        per_tensor = torch.zeros(len(self.space.tensors), dtype=p_N.dtype, device=p_N.device)
        return OneBitLambState(
            m_N=self.new_vector(),
            v_N=self.new_vector(),
            fresh_v_N=self.new_vector(),
            coeff_T=per_tensor,
            scaling_T=torch.ones_like(per_tensor),
            factor_T=torch.ones_like(per_tensor),
            momentum_error=self.reduce.new_memory(),
            z_N=torch.zeros_like(p_N),
        )

    def set_ages(self, ages: Sequence[Age]) -> None:
        """As FlatOptimizer.set_ages, with the tensors of each run."""
        super().set_ages(ages)
        self.segments = tensor_segments(self.space, self.runs)

    def advance(self, plan: StepPlan, groups: Sequence[AdamHyper]) -> None:
        """One step of the algorithm."""
        s, space = self.vectors, self.space
        if plan.gradient is Wire.FULL:
            self.mean_gradient_()
        else:
            self.exchange_(plan)
            self.reduce.result.decode_(s.z_N)
            self.reduce.commit()
        pairs = list(zip(groups, self.segments, strict=True))
        step(space.p_N, space.g_N, s, pairs, self.bounds, self.settings, plan)

    def begin_exchange(self, plan: StepPlan) -> Exchange:
        """The mean gradient in warm-up, then k times the momentum."""
        s, g_N, reduce = self.vectors, self.space.g_N, self.reduce
        if plan.momentum is not Wire.COMPRESSED:
            return super().begin_exchange(plan)

        def form(at: slice, runs: LeftGradients) -> None:
            for part, group in self.groups_in(at):
                propose_(g_N, s, self._tensors_in(part), group["betas"][0], runs)

        # Without the loops a gradient is read several times: better in one place.
        where = LeftInPlace(reduce.buckets.layout, g_N) if updates.fits(g_N) else None
        return CompressedSum(reduce, s.momentum_error, s.z_N, form, where)

    def _tensors_in(self, at: slice) -> list[TensorPart]:
        """The parts of tensors in a slice of the flat vectors, each with the dead elements behind it."""
        tensors = enumerate(self.space.tensors)
        parts = [(i, t, max(t.start, at.start), min(round_up(t.stop, BYTE), at.stop)) for i, t in tensors]
        return [(i, start - t.start, slice(start, stop)) for i, t, start, stop in parts if start < stop]

    def on_freeze(self, floored_N: Tensor, seen: Sequence[int | None]) -> None:
        """Keep the coefficients, corrected for their start at 0, and find k. What was floored once has no part in r."""
        s = self.vectors
        s.fresh_v_N.copy_(torch.where(floored_N | s.fresh_v_N.isinf(), torch.inf, s.v_N))
        s.factor_T.fill_(1)
        if self.settings.bias_correction:
            parts = [1.0 if t is None else 1 - self.bounds.coeff_beta**t for t in seen]
            s.coeff_T.div_(torch.tensor(parts, dtype=s.coeff_T.dtype, device=s.coeff_T.device))
        sizes_T = torch.empty_like(s.scaling_T)
        for segments in self.segments:
            sizes_T[segments.tensors] = segments.rms(s.m_N)
        moving_T = sizes_T > 0  # a layer that never had a gradient has no size to be brought to: its k stays 1
        s.scaling_T.fill_(1)
        if bool(moving_T.any()):
            s.scaling_T.copy_(torch.where(moving_T, sizes_T[moving_T].mean() / sizes_T, 1.0))

    def on_refresh(self, floored_N: Tensor) -> None:
        """r compares with the v of now. What was floored once has no part in it."""
        s = self.vectors
        s.fresh_v_N.copy_(torch.where(floored_N | s.fresh_v_N.isinf(), torch.inf, s.v_N))
        s.factor_T.fill_(1)

    def keep(self, seen: Mapping[int, int]) -> Tensor:
        """As WarmupOptimizer.keep, with the average coefficient and k of these tensors as on_freeze would have them."""
        s = self.vectors
        sizes_T = torch.cat([segments.rms(s.m_N) for segments in self.segments])
        others_T = (sizes_T * s.scaling_T)[[i for i in range(len(sizes_T)) if i not in seen and sizes_T[i] > 0]]
        for i, t in seen.items():
            if self.settings.bias_correction:
                s.coeff_T[i] /= 1 - self.bounds.coeff_beta**t
            s.factor_T[i] = 1
            s.scaling_T[i] = others_T.mean() / sizes_T[i] if len(others_T) and sizes_T[i] > 0 else 1.0
        raised_N = super().keep(seen)
        for tensor in (self.space.tensors[i] for i in seen):
            at = slice(tensor.start, tensor.stop)
            s.fresh_v_N[at] = torch.where(raised_N[at], torch.inf, s.v_N[at])
        return raised_N

    def as_momentum_(self, residual_N: Tensor) -> None:
        """Momenta are exchanged times k."""
        for segments in self.segments:
            residual_N[segments.span].div_(segments.expand(self.vectors.scaling_T[segments.tensors]))

    def as_exchanged_(self, momentum_N: Tensor, vectors: dict[str, Tensor]) -> None:
        """Momenta are exchanged times k."""
        for segments in self.segments:
            momentum_N[segments.span].mul_(segments.expand(vectors["scaling_T"][segments.tensors]))

    def stats(self) -> dict[str, Any]:
        """As OneBitAdam.stats, with the spread of trust coefficients and variance factors over the tensors."""
        told = {}
        for name, values in (("lamb_coeff", self.vectors.coeff_T), ("lamb_factor", self.vectors.factor_T)):
            told.update({f"{name}_{kind}": float(f(values)) for kind, f in _SPREAD})
        return {**super().stats(), **told}


_SPREAD = (("min", torch.min), ("median", torch.median), ("max", torch.max))
