"""The papers, literally, for a list of workers. Slow and plain: no flat buffers, no ranks, no wire. Read it first.

    Adam           Kingma and Ba 2015, arXiv 1412.6980, Alg. 1; decoupled decay: Loshchilov and Hutter 2019, Alg. 2
    LAMB           You et al. 2020, arXiv 1904.00962, Alg. 2
    1-bit Adam     Tang et al. 2021, arXiv 2102.02888, Alg. 1
    1-bit SGD      the second phase of it with v = 1; the rule is torch.optim.SGD's
    1-bit LAMB     Li et al. 2021, arXiv 2104.06069
    0/1 Adam       Lu et al. 2022, arXiv 2202.06009, Alg. 1

Of the three one-bit papers no page was at hand when this was written: their recursions come from DeepSpeed's code,
published summaries and memory. So no line numbers are given, "recalled" marks what rests on memory alone, and it
should be checked before a claim is built on it. Where we do otherwise on purpose, and where DeepSpeed does, the switch
is an argument, off by default; docs/algorithms.md has the reasons, deepspeed.py the settings.

A model is a list of tensors, one a parameter; `gradients[i][l]` is worker i's gradient of tensor l. Every dtype works;
float64 is what the laws are tested in. Steps count from 1. Nothing that is passed in is modified.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from math import isfinite

import torch
from torch import Tensor

from tests.reference.exchange import Exchange, Floor, TwoPhase, Vectors, laid_end_to_end, mean, split_like
from tests.reference.state import Hyper, Moments, copies, hypers, mean_gradient, zeros

__all__ = [
    "Fresh",
    "Hyper",
    "ReferenceAdam",
    "ReferenceLamb",
    "ReferenceOneBitAdam",
    "ReferenceOneBitLamb",
    "ReferenceOneBitSgd",
    "ReferenceSgd",
    "ReferenceZeroOneAdam",
]


class Fresh(StrEnum):
    """When 0/1 Adam updates v before using it: never as in the paper, at the first update only (ours), DeepSpeed's."""

    NEVER = "never"
    AT_FIRST = "at_first"
    ALWAYS = "always"


class ReferenceSgd:
    """Momentum descent:  m <- momentum m + g + decay x;  x <- x - lr m.  As torch.optim.SGD, on the mean gradient."""

    def __init__(self, x: Sequence[Tensor], lr: float, momentum: float = 0.0, weight_decay: float = 0.0) -> None:
        self.x = copies(x)
        self.m = zeros(x)
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay

    def step(self, gradients: Sequence[Vectors]) -> None:
        """One step."""
        for at, g in enumerate(mean_gradient(gradients)):
            self.m[at] = self.momentum * self.m[at] + g + self.weight_decay * self.x[at]
            self.x[at] = self.x[at] - self.lr * self.m[at]


class ReferenceOneBitSgd(ReferenceSgd):
    """The same whose momentum crosses:  m <- exchange of momentum m + w (g_i + decay x);  x <- x - lr m.

    w is 1 - dampening, in the first step 1; to maximise, g_i has the other sign. nesterov: x descends along
    (1 + momentum) m - momentum m_before. Each is one for all tensors, but lr, momentum and decay, which may be a list.
    """

    def __init__(
        self,
        x: Sequence[Tensor],
        hyper: Sequence[tuple[float, float, float]],
        *,
        exchange: Exchange,
        dampening: float = 0.0,
        nesterov: bool = False,
        maximize: bool = False,
    ) -> None:
        super().__init__(x, 0.0)
        self.hyper, self.exchange = list(hyper), exchange
        self.dampening, self.nesterov, self.sign, self.t = dampening, nesterov, -1 if maximize else 1, 0

    def step(self, gradients: Sequence[Vectors]) -> None:
        """One step."""
        self.t += 1
        weight = 1.0 if self.t == 1 else 1 - self.dampening
        zs = []
        for tensors in gradients:
            every = zip(self.hyper, self.m, tensors, self.x, strict=True)
            z = [mu * m + weight * (self.sign * g + decay * x) for (_, mu, decay), m, g, x in every]
            zs.append(laid_end_to_end(z))
        before, self.m = self.m, split_like(self.exchange(zs, "momentum"), self.x)
        for at, (lr, mu, _) in enumerate(self.hyper):
            along = (1 + mu) * self.m[at] - mu * before[at] if self.nesterov else self.m[at]
            self.x[at] = self.x[at] - lr * along


class ReferenceAdam(Moments):
    """Adam on the mean gradient, bias-corrected as in its paper, decay decoupled as in AdamW."""

    def __init__(self, x: Sequence[Tensor], hyper: Hyper | Sequence[Hyper], *, bias_correction: bool = True) -> None:
        super().__init__(x, hyper, bias_correction)

    def step(self, gradients: Sequence[Vectors]) -> None:
        """One step. Source: Kingma and Ba 2015, Alg. 1, the body of its loop."""
        self.t += 1
        self.accumulate(mean_gradient(gradients))
        self.adam_descend()


class ReferenceLamb(Moments):
    """LAMB on the mean gradient:  u = m_hat / (sqrt(v_hat) + eps) + decay x;  x <- x - lr c u,  c = ||x|| / ||u||.

    c is 1 where either norm is 0, and clipped to [min_coeff, max_coeff] as 1-bit LAMB does it; the paper of LAMB has a
    function of ||x|| in that place (recalled), here the identity. coefficients: c of the last step, one a tensor.
    """

    def __init__(
        self,
        x: Sequence[Tensor],
        hyper: Hyper | Sequence[Hyper],
        *,
        min_coeff: float = 0.0,
        max_coeff: float = float("inf"),
        bias_correction: bool = True,
    ) -> None:
        super().__init__(x, hyper, bias_correction)
        self.min_coeff, self.max_coeff = min_coeff, max_coeff
        self.coefficients = [1.0 for _ in x]

    def step(self, gradients: Sequence[Vectors]) -> None:
        """One step. Source: You et al. 2020, Alg. 2."""
        self.t += 1
        self.accumulate(mean_gradient(gradients))
        self._lamb_descend()

    def _lamb_descend(self) -> None:
        for at, h in enumerate(self.hyper):
            m, v = self.corrected(at)
            u = m / (v.sqrt() + h.eps) + h.weight_decay * self.x[at]
            self.coefficients[at] = self._coefficient(self.x[at], u)
            self.x[at] = self.x[at] - h.lr * self.coefficients[at] * u

    def _coefficient(self, x: Tensor, u: Tensor) -> float:
        x_norm, u_norm = float(torch.linalg.vector_norm(x)), float(torch.linalg.vector_norm(u))
        if x_norm == 0 or u_norm == 0:
            return 1.0
        return min(max(x_norm / u_norm, self.min_coeff), self.max_coeff)


class ReferenceOneBitAdam(Moments):
    """1-bit Adam: `warmup` steps of Adam, then momentum descent under the variance of the last of them.

        t <= T:  g = mean_i g_i;  m, v as in Adam;          x <- x - lr (m / (sqrt(v) + eps) + decay x)
        t >  T:  m <- exchange of b1 m + (1 - b1) g_i;      x <- the same, with v of step T

    bias_correction (ours; the paper has none, recalled): m and v corrected in warm-up, the corrected v kept.
    floor (ours): applied to the v that is kept. The paper has no decay, and no eps in the second phase (recalled).
    exchange: by default the paper's, one scale for the whole vector.
    """

    def __init__(
        self,
        x: Sequence[Tensor],
        hyper: Hyper | Sequence[Hyper],
        *,
        warmup: int,
        exchange: Exchange | None = None,
        bias_correction: bool = False,
        floor: Floor | None = None,
    ) -> None:
        super().__init__(x, hyper, bias_correction)
        self.warmup = warmup
        self.exchange = exchange or TwoPhase()
        self.floor = floor

    def step(self, gradients: Sequence[Vectors]) -> None:
        """One step. Source: Tang et al. 2021, Alg. 1."""
        self.t += 1
        if self.t <= self.warmup:
            self.accumulate(mean_gradient(gradients))
        else:
            self.exchange_momentum(gradients, self.exchange, [1.0 for _ in self.x])
        self.adam_descend()
        if self.t == self.warmup:
            self.freeze_variance(self.floor)


class ReferenceOneBitLamb(ReferenceLamb):
    """1-bit LAMB: `warmup` steps of LAMB, then momentum descent with a layer's frozen coefficient times a ratio r.

        t <= T:  LAMB;  c_avg <- b3 c_avg + (1 - b3) c,  from 0
        at T:    v_fresh = v;  k_l = (mean over layers of RMS(m)) / RMS(m_l)
        t >  T:  m' <- exchange of k_l (b1 m + (1 - b1) g_i), divided by k_l
                 g_hat = (m' - b1 m) / (1 - b1);  v_fresh <- b2 v_fresh + (1 - b2) g_hat^2;  m <- m'
                 u_0 = m / (sqrt(v) + eps);  u = u_0 + decay x
                 r = max over elements of (sqrt(v) + eps) / (sqrt(v_fresh) + eps)
                 r <- r into [factor_min, factor_max], then into r_prev (1 -+ factor_threshold);  r_prev = r, from 1
                 x <- x - lr c_avg r u

    A layer is a tensor. One whose m is zero at T has k = 1 and no part in the mean; the formula would divide by zero.
    bias_correction, floor, exchange: as in 1-bit Adam; v_fresh starts at the v that is kept. With bias_correction c_avg
    is divided by 1 - b3^T at T. Ours too: ratio_without_floored: elements that the floor
    raised have no part in the maximum of r, which is 1 where that leaves none.
    DeepSpeed's: weigh_ratio (not recalled from the paper; ours too): with decay, r <- r w + 1 - w before the clips,
    w = min(1, ||u_0|| / ||u||). skip_unit_coefficients: a c of exactly 1 does not enter c_avg.
    longest_step (ours): c_avg r is at most this times the c that LAMB would have for u.
    """

    def __init__(
        self,
        x: Sequence[Tensor],
        hyper: Hyper | Sequence[Hyper],
        *,
        warmup: int,
        exchange: Exchange | None = None,
        min_coeff: float = 0.01,
        max_coeff: float = 10.0,
        coeff_beta: float = 0.9,
        factor_min: float = 0.5,
        factor_max: float = 4.0,
        factor_threshold: float = 0.1,
        bias_correction: bool = False,
        floor: Floor | None = None,
        ratio_without_floored: bool = False,
        weigh_ratio: bool = False,
        skip_unit_coefficients: bool = False,
        longest_step: float = float("inf"),
    ) -> None:
        super().__init__(x, hyper, min_coeff=min_coeff, max_coeff=max_coeff, bias_correction=bias_correction)
        self.warmup, self.exchange, self.floor = warmup, exchange or TwoPhase(), floor
        self.coeff_beta, self.factor_threshold = coeff_beta, factor_threshold
        self.factor_min, self.factor_max = factor_min, factor_max
        self.ratio_without_floored = ratio_without_floored
        self.weigh_ratio, self.skip_unit_coefficients = weigh_ratio, skip_unit_coefficients
        self.longest_step = longest_step
        self.c_avg, self.r, self.k = [0.0 for _ in x], [1.0 for _ in x], [1.0 for _ in x]
        self.v_fresh = zeros(x)
        self.floored = [torch.zeros_like(tensor, dtype=torch.bool) for tensor in x]

    def step(self, gradients: Sequence[Vectors]) -> None:
        """One step. Source: Li et al. 2021, as DeepSpeed's runtime/fp16/onebit/lamb.py has it."""
        if self.t < self.warmup:
            super().step(gradients)
            for at, c in enumerate(self.coefficients):
                if c != 1.0 or not self.skip_unit_coefficients:
                    self.c_avg[at] = self.coeff_beta * self.c_avg[at] + (1 - self.coeff_beta) * c
            if self.t == self.warmup:
                self._freeze()
            return
        self.t += 1
        before = self.m
        self.exchange_momentum(gradients, self.exchange, self.k)
        for at, h in enumerate(self.hyper):
            b1, b2 = h.betas
            g_hat = (self.m[at] - b1 * before[at]) / (1 - b1)
            self.v_fresh[at] = b2 * self.v_fresh[at] + (1 - b2) * g_hat**2
            u0 = self.m[at] / (self.v[at].sqrt() + h.eps)
            u = u0 + h.weight_decay * self.x[at]
            self.r[at] = self._ratio(at, h, u0, u)
            factor = min(self.c_avg[at] * self.r[at], self.longest_step * self._coefficient(self.x[at], u))
            self.x[at] = self.x[at] - h.lr * factor * u

    def _freeze(self) -> None:
        if self.bias_correction:  # ours: c_avg starts at 0 as m and v do
            self.c_avg = [c / (1 - self.coeff_beta**self.t) for c in self.c_avg]
        self.floored = self.freeze_variance(self.floor)
        self.v_fresh = copies(self.v)
        rms = [float(m.square().mean().sqrt()) for m in self.m]
        moving = [size for size in rms if size > 0]
        self.k = [sum(moving) / len(moving) / size if size > 0 else 1.0 for size in rms]

    def _ratio(self, at: int, h: Hyper, u0: Tensor, u: Tensor) -> float:
        ratios = (self.v[at].sqrt() + h.eps) / (self.v_fresh[at].sqrt() + h.eps)
        if self.ratio_without_floored:
            ratios = ratios[~self.floored[at]]
        r = float(ratios.max()) if ratios.numel() else 1.0
        if self.weigh_ratio and h.weight_decay > 0:
            u_norm = float(torch.linalg.vector_norm(u))
            w = min(1.0, float(torch.linalg.vector_norm(u0)) / u_norm) if u_norm > 0 else 1.0
            r = r * w + 1 - w
        r = min(max(r, self.factor_min), self.factor_max)
        return min(max(r, self.r[at] * (1 - self.factor_threshold)), self.r[at] * (1 + self.factor_threshold))


class ReferenceZeroOneAdam:
    """0/1 Adam: local steps under a stale variance, a one-bit exchange of their sum at some steps.

        worker i   m_i <- b1 m_i + (1 - b1) g_i;  x_i <- x_i - lr m_i / root;  u_i <- u_i + lr m_i;  S <- S + lr
        sync       u = exchange of u_i;  m_i = u / S;  x_i = x_s - u / root;  x_s = x_i;  u_i = 0;  S = 0
        variance   v <- b2 v + (1 - b2) (mean_i g_i)^2
        root = sqrt(v + eps)

    sync_step(t), variance_step(t): is step t in T_u, in T_v? Two schedules the paper leaves to the user.
    x, m, u: one list a worker; x_s: x at the last sync; v, and S, one a tensor, common to all. After a round of lr = 0
    m_i stays, and where that holds for all tensors nothing is exchanged; the formula would divide by zero.
    Ours: eps_outside: root = sqrt(v) + eps. fresh: when v is updated before its use. bias_correction: v is divided by
    1 - b2^(its updates). floor: under the v of every step. freeze_at: after that step v is kept, corrected and floored.
    longest_step: what a sync gives out moves no element of x by more than this times S. as_momentum: u_i over the mean
    rate of its steps is exchanged, and the memory is of momenta. skip_idle: lr = 0 leaves m alone. dense_steps: up to
    this step, and not after the freeze, a step is Adam's on the mean gradient, m and v corrected.
    decay (hyper.weight_decay; the paper has none): x_i, x_s, u_i and S shrink by the factor 1 - lr decay at every step,
    so that x_i = x_s - u_i / root stays true.
    DeepSpeed's: decay_in_sum: lr decay root x_i goes into u_i, and so into m, instead. gradient_stage: up to this step
    there are no local steps: g_i is exchanged, in full at variance steps and through the memory "gradient" at others,
    and m and x are Adam's; sync_step is asked from the step after it on.
    """

    def __init__(
        self,
        x: Sequence[Tensor],
        num_workers: int,
        hyper: Hyper | Sequence[Hyper],
        *,
        sync_step: Callable[[int], bool],
        variance_step: Callable[[int], bool],
        exchange: Exchange | None = None,
        eps_outside: bool = False,
        fresh: Fresh = Fresh.NEVER,
        bias_correction: bool = False,
        freeze_at: int | None = None,
        floor: Floor | None = None,
        longest_step: float = float("inf"),
        skip_idle: bool = False,
        as_momentum: bool = False,
        dense_steps: int = 0,
        decay_in_sum: bool = False,
        gradient_stage: int = 0,
    ) -> None:
        self.x = [copies(x) for _ in range(num_workers)]
        self.x_s, self.v = copies(x), zeros(x)
        self.m, self.u = ([zeros(x) for _ in range(num_workers)] for _ in range(2))
        self.hyper = hypers(hyper, x)
        self.S = [0.0 for _ in x]
        self.sync_step, self.variance_step = sync_step, variance_step
        self.exchange = exchange or TwoPhase()
        self.eps_outside, self.fresh = eps_outside, fresh
        self.longest_step, self.skip_idle = longest_step, skip_idle
        self.as_momentum = as_momentum
        self.bias_correction, self.freeze_at, self.floor = bias_correction, freeze_at, floor
        self.decay_in_sum, self.gradient_stage, self.dense_steps = decay_in_sum, gradient_stage, dense_steps
        self.t = self.synced_at = self.variance_updates = 0

    def step(self, gradients: Sequence[Vectors]) -> None:
        """One step of every worker. Source: Lu et al. 2022, Alg. 1; there v is used before it is updated."""
        self.t += 1
        if self.t <= min(self.dense_steps, self.freeze_at or self.t):
            self.dense_step(gradients)
            return
        first = self.fresh is Fresh.ALWAYS or (self.fresh is Fresh.AT_FIRST and not self.variance_updates)
        if first and self.variance_step(self.t):
            self.update_variance(gradients)
        if self.t <= self.gradient_stage:
            self.gradient_step(gradients)
        else:
            self.local_step(gradients)
            if self.sync_step(self.t):
                self.synchronize()
        if not first and self.variance_step(self.t):
            self.update_variance(gradients)
        self._freeze_if_due()

    def dense_step(self, gradients: Sequence[Vectors]) -> None:
        """Adam, on every worker alike."""
        self.update_variance(gradients)
        for at, (h, g) in enumerate(zip(self.hyper, mean_gradient(gradients), strict=True)):
            m = h.betas[0] * self.m[0][at] + (1 - h.betas[0]) * g
            b1, b2 = (1 - b**self.t if self.bias_correction else 1.0 for b in h.betas)
            move = (m / b1) / ((self.v[at] / b2).sqrt() + h.eps) + h.weight_decay * self.x_s[at]
            self.x_s[at] = self.x_s[at] - h.lr * move
            for own_x, own_m in zip(self.x, self.m, strict=True):
                own_x[at], own_m[at] = self.x_s[at].clone(), m.clone()
        self.synced_at = self.t
        self._freeze_if_due()

    def _freeze_if_due(self) -> None:
        if self.t == self.freeze_at:
            self.v, self.bias_correction, self.floor = self._used_variance(), False, None

    def local_step(self, gradients: Sequence[Vectors]) -> None:
        """What a worker does by itself."""
        for at, (h, root) in enumerate(zip(self.hyper, self.roots(), strict=True)):
            if self.skip_idle and h.lr == 0:
                continue
            inside, keep = (h.weight_decay, 1.0) if self.decay_in_sum else (0.0, 1 - h.lr * h.weight_decay)
            for x, m, u, g in zip(self.x, self.m, self.u, gradients, strict=True):
                m[at] = h.betas[0] * m[at] + (1 - h.betas[0]) * g[at]
                move = m[at] + inside * root * x[at]
                x[at] = keep * x[at] - h.lr * move / root
                u[at] = keep * u[at] + h.lr * move
            self.x_s[at] = keep * self.x_s[at]
            self.S[at] = keep * self.S[at] + h.lr

    def synchronize(self) -> None:
        """Bring the workers together. Leaves y (see agreed) as it was."""
        if not any(self.S):
            self.synced_at = self.t
            return
        units = [(S or 1.0) / (self.t - self.synced_at) if self.as_momentum else 1.0 for S in self.S]
        sent = [laid_end_to_end([u / unit for u, unit in zip(us, units, strict=True)]) for us in self.u]
        received = split_like(self.exchange(sent, "update"), self.x_s)
        us = [mean * unit for mean, unit in zip(received, units, strict=True)]
        for at, (u_mean, root) in enumerate(zip(us, self.roots(), strict=True)):
            if self.S[at] and isfinite(self.longest_step):
                longest = self.longest_step * self.S[at] * root
                u_mean = torch.minimum(torch.maximum(u_mean, -longest), longest)
            idle = 0.0 if self.S[at] else 1.0
            self.x_s[at] = self.x_s[at] - (1 - idle * self.as_momentum) * u_mean / root
            for x, m, u in zip(self.x, self.m, self.u, strict=True):
                x[at] = self.x_s[at].clone()
                m[at] = m[at] + idle * self.as_momentum * u_mean if idle else u_mean / self.S[at]
                u[at] = torch.zeros_like(u[at])
            self.S[at] = 0.0
        self.synced_at = self.t

    def gradient_step(self, gradients: Sequence[Vectors]) -> None:
        """DeepSpeed's first stage: Adam under a stale variance, on a gradient that all workers agree on."""
        if self.variance_step(self.t):
            agreed = mean_gradient(gradients)
        else:
            agreed = split_like(self.exchange([laid_end_to_end(g) for g in gradients], "gradient"), self.x_s)
        for at, (h, root) in enumerate(zip(self.hyper, self.roots(), strict=True)):
            m = h.betas[0] * self.m[0][at] + (1 - h.betas[0]) * agreed[at]
            self.x_s[at] = self.x_s[at] - h.lr * (m / root + h.weight_decay * self.x_s[at])
            for own_x, own_m in zip(self.x, self.m, strict=True):
                own_x[at], own_m[at] = self.x_s[at].clone(), m.clone()
        self.synced_at = self.t

    def update_variance(self, gradients: Sequence[Vectors]) -> None:
        """v <- b2 v + (1 - b2) (mean_i g_i)^2, exchanged in full."""
        for at, g in enumerate(mean_gradient(gradients)):
            b2 = self.hyper[at].betas[1]
            self.v[at] = b2 * self.v[at] + (1 - b2) * g**2
        self.variance_updates += 1

    def roots(self) -> Vectors:
        """What a step is divided by."""
        pairs = zip(self._used_variance(), self.hyper, strict=True)
        return [v.sqrt() + h.eps if self.eps_outside else (v + h.eps).sqrt() for v, h in pairs]

    def agreed(self, residual: Tensor | None) -> Vectors:
        """y = mean_i x_i - R / root, what no exchange of u changes. residual: R of "update", None where zero."""
        means = [mean(xs) for xs in zip(*self.x, strict=True)]
        if residual is None:
            return means
        parts = split_like(residual, self.x_s)
        return [x - r / root for x, r, root in zip(means, parts, self.roots(), strict=True)]

    def _used_variance(self) -> Vectors:
        used = copies(self.v)
        if self.bias_correction and self.variance_updates:
            used = [v / (1 - h.betas[1] ** self.variance_updates) for v, h in zip(used, self.hyper, strict=True)]
        return self.floor(used) if self.floor else used
