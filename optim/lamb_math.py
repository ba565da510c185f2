"""The mathematics of LAMB on flat slices: norms and one trust ratio a tensor.  [You et al. 2020, arXiv 1904.00962]

Shapes: N elements of the flat vectors, s elements of one group's span, t tensors of the group. Source of the update:
Alg. 2 there.

What a refresh of 1-bit LAMB's variance takes in where most of a gradient is zero is all gradients since the last one:

A row of an embedding that one step in a hundred touches has, in the gradient of one step, either nothing or a hundred
times its mean square. A variance that takes in such a gradient for all the steps of a gap gets worse by it, and what
divides by it too: LAMB divides by the norm of all of u. But the momentum says what all gradients of the gap were, once
added up, but for what compression has left out:

    A    = the sum of m - beta1 m_before over the compressed steps since R was known, less that R
    S    = (A + (1 - beta1) g + R) / (1 - beta1)          the sum of the mean gradients of G steps, this one included
    v   <- (1 - w) v + w (z S^2 / G + (1 - z) g^2)        z: the part of the tensor's g that is exactly zero
    A   <- -R

A is the same on every rank, for it is made of what all have received. R is brought together for it in 8 bits, a
quarter of an exchange in full, and only where MOSTLY of all of g is zero. It stays in the error memory.

S^2 / G is the mean square of a gradient where gradients of several steps have nothing to do with each other. Where
they agree it is too large, so that g^2 is better where nothing is zero. Measured: docs/algorithms.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.comm.kernels.blocks import on_device
from thinwire.comm.layout import BYTE, Span, round_up
from thinwire.contract.hyperparameters import (
    COEFF_BETA,
    FACTOR_MAX,
    FACTOR_MIN,
    FACTOR_THRESHOLD,
    MAX_COEFF,
    MIN_COEFF,
    TRUST_RATIO,
)
from thinwire.optim import adam_math
from thinwire.optim.engine.ages import Run
from thinwire.optim.engine.box import Box
from thinwire.optim.engine.flat import FlatSpace
from thinwire.optim.engine.hyperparameters import AdamHyper
from thinwire.optim.kernels import updates
from thinwire.optim.kernels.lamb import CudaTiles, Tiles, fits, step_of, tiles_of


@dataclass(frozen=True, slots=True)
class LambBounds:
    """The bounds of LAMB, and the constants of 1-bit LAMB's compressed phase, the same for all groups.

    coeff: bounds of the trust ratio. coeff_beta: how slowly its average moves. factor: bounds of the ratio of frozen to
    fresh variance; factor_threshold: how much that may change in a step.
    """

    max_coeff: float = MAX_COEFF.default
    min_coeff: float = MIN_COEFF.default
    coeff_beta: float = COEFF_BETA.default
    factor_max: float = FACTOR_MAX.default
    factor_min: float = FACTOR_MIN.default
    factor_threshold: float = FACTOR_THRESHOLD.default

    def __post_init__(self) -> None:
        for number in TRUST_RATIO:
            number.check(getattr(self, number.name))
        if self.min_coeff > self.max_coeff:
            raise ValueError(f"min_coeff = {self.min_coeff}: must be at most {self.max_coeff}, max_coeff")
        if self.factor_min > self.factor_max:
            raise ValueError(f"factor_min = {self.factor_min}: must be at most {self.factor_max}, factor_max")


BOUNDS = LambBounds()
"""By default: DeepSpeed's."""
LEAST, MOST = 0.5, 8.0
"""Bounds of how many times longer one bit makes a direction. Below 1 is noise of the estimate."""
CHANCE = 1.0
"""Standard errors of what g and m have in common that do not count, of either sign."""
LEAST_NOISE = 0.25
"""|u_0|^2 is at least this part of what independent gradients would give it."""


@dataclass(frozen=True, slots=True)
class TensorSegments:
    """The tensors of one run, as a rule a parameter group, or of a part of one. `span`, `tensors`: its slice of the
    elements and of all tensors.
    """

    span: slice
    tensors: slice
    live: tuple[Span, ...]
    lengths_t: Tensor
    """int64[t]: elements from one tensor's start to the next one's, the dead ones between them included."""
    tiles: Tiles | CudaTiles | None
    """The same elements for the loops of optim.kernels, or for its kernels, where those fit."""
    box: Box | None = None
    """The ranks that hold the other shards of these tensors: what is found is of all of a tensor, and collective."""

    def norms(self, x_s: Tensor) -> Tensor:
        """||x_l||_2 of each tensor, float[t]."""
        norms_t = torch.stack(list(torch._foreach_norm(self._views(x_s))))
        return norms_t if self.box is None else self._whole(self.box.sums, norms_t.square_()).sqrt_()

    def rms(self, x_s: Tensor) -> Tensor:
        """||x_l||_2 / sqrt(elements), float[t]."""
        host_t = torch.tensor([stop - start for start, stop in self.live], dtype=x_s.dtype, device="cpu")
        counts_t = on_device(host_t, x_s.device)
        if self.box is not None:
            counts_t = self._whole(self.box.sums, counts_t)
        return self.norms(x_s).div_(counts_t.sqrt_())

    def maxima(self, x_s: Tensor) -> Tensor:
        """The largest live element of each tensor, float[t]; 0 of a shard without elements."""
        views = self._views(x_s)
        if self.box is None:
            return torch.stack(list(torch._foreach_max(views)))
        largest_t = torch.stack([view.max() if view.numel() else view.new_zeros(()) for view in views])
        return self._whole(self.box.maxima, largest_t)

    def _whole(self, together: Callable[[Tensor], Tensor], values_t: Tensor) -> Tensor:
        """What the box makes of what each of its ranks has found of its shards. Collective."""
        assert self.box is not None
        values_T = values_t.new_zeros(self.box.num_tensors)
        values_T[self.tensors] = values_t
        return together(values_T)[self.tensors]

    def expand(self, values_t: Tensor) -> Tensor:
        """Each tensor's value at each of its elements: float[span]."""
        return torch.repeat_interleave(values_t, self.lengths_t, output_size=self.span.stop - self.span.start)

    def _views(self, x_s: Tensor) -> list[Tensor]:
        first = self.span.start
        return [x_s[start - first : stop - first] for start, stop in self.live]


PART = 1 << 18
"""Elements of adjoining tensors that are worked on together, on a CPU: what one pass has read the next finds in the
cache. A larger tensor is a part by itself."""


def tensor_segments(space: FlatSpace, runs: Sequence[Run]) -> list[list[TensorSegments]]:
    """Of each run of tensors its parts, in order: one, but for vectors that have loops on a CPU."""
    return [[_segments(space, part) for part in _parts(space, run.span)] for run in runs]


def _parts(space: FlatSpace, span: slice) -> list[list[int]]:
    """The tensors of a span, by their numbers, as they are worked on together."""
    inside = [i for i, tensor in enumerate(space.tensors) if span.start <= tensor.start < span.stop]
    if space.box is not None or not updates.fits(space.p_N):  # all ranks of a box have the same parts
        return [inside]
    parts: list[list[int]] = []
    for i in inside:
        if parts and space.tensors[i].stop - space.tensors[parts[-1][0]].start <= PART:
            parts[-1].append(i)
        else:
            parts.append([i])
    return parts


def _segments(space: FlatSpace, inside: Sequence[int]) -> TensorSegments:
    members = [space.tensors[i] for i in inside]
    live = tuple((tensor.start, tensor.stop) for tensor in members)
    starts = [tensor.start for tensor in members]
    span = slice(starts[0], round_up(members[-1].stop, BYTE))
    lengths = [after - start for start, after in zip(starts, [*starts[1:], span.stop], strict=True)]
    return TensorSegments(
        span=span,
        tensors=slice(inside[0], inside[-1] + 1),
        live=live,
        lengths_t=on_device(torch.tensor(lengths, dtype=torch.int64, device="cpu"), space.p_N.device),
        tiles=tiles_of(live, space.p_N) if space.box is None else None,
        box=space.box,
    )


def adam_direction(m_s: Tensor, v_s: Tensor, h: AdamHyper, bias_step: int | None) -> Tensor:
    """m_hat / (sqrt(v_hat) + eps), float[s], new; m and v as they are where bias_step is None."""
    correction1, correction2 = h.corrections(bias_step)
    return (m_s / correction1).div_((v_s / correction2).sqrt_().add_(h.eps))


def trust_ratios(p_s: Tensor, u_s: Tensor, segments: TensorSegments, bounds: LambBounds) -> Tensor:
    """clip(||x_l|| / ||u_l||, min_coeff, max_coeff) of each tensor, float[t]; 1 where either norm is 0."""
    return clipped_ratios(segments.norms(p_s), segments.norms(u_s), bounds)


def clipped_ratios(p_norm: Tensor, u_norm: Tensor, bounds: LambBounds) -> Tensor:
    """trust_ratios of norms float[t]."""
    ratio = (p_norm / u_norm).clamp_(bounds.min_coeff, bounds.max_coeff)
    return torch.where((p_norm > 0) & (u_norm > 0), ratio, torch.ones_like(ratio))


def step_(
    p_N: Tensor,
    g_N: Tensor,
    m_N: Tensor,
    v_N: Tensor,
    h: AdamHyper,
    parts: Sequence[TensorSegments],
    bounds: LambBounds,
    bias_step: int | None,
    squares_T: Tensor | None = None,
    seen_N: Tensor | None = None,
) -> Tensor:
    """LAMB on the gradient g, of one run of tensors, part after part. p, m, v: modified. Returns c, float[t].

    By loops or kernels where squares and seen are None, in two passes; else, and where tensors are cut over a box, as a
    chain of operations: the definition.

    m, v as Adam's;  u = m_hat / (sqrt(v_hat) + eps) + wd x;  x_l <- x_l - lr q_l c_l u_l
    squares: |u_0|^2 of all tensors as it would be of exact momenta, modified: the mean of what it was, where that is
    known, and of what is found now (exact_squares); q is how many times longer u is (lengthened). None: q is 1.
    seen: what v takes in the square of, in place of g.
    """
    found = []
    if squares_T is None and seen_N is None and has_loops(p_N) and parts[0].box is None:
        clip = bounds.min_coeff, bounds.max_coeff
        by_passes: Any = step_of((p_N, g_N, m_N, v_N), h, bias_step, clip)
        found = [by_passes.descend_(part.tiles) for part in parts]  # tiles of its own kind
        by_passes.done()
        return torch.cat(found)
    for part in parts:
        p_s, g_s, m_s, v_s = (x_N[part.span] for x_N in (p_N, g_N, m_N, v_N))
        square_t = None
        if squares_T is not None:
            square_t, now_t = squares_T[part.tensors], exact_squares(g_s, m_s, v_s, h, part)
            square_t.copy_(torch.where(are_known(square_t), (square_t + now_t) / 2, now_t))
        adam_math.momentum_(m_s, g_s, h.beta1)
        adam_math.variance_(v_s, g_s if seen_N is None else seen_N[part.span], h.beta2)
        u_s = adam_direction(m_s, v_s, h, bias_step)
        direction_t = None if square_t is None else part.norms(u_s)
        u_s.add_(p_s, alpha=h.weight_decay)
        update_t = part.norms(u_s)
        factors_t = clipped_ratios(part.norms(p_s), update_t, bounds)
        found.append(factors_t)
        if square_t is not None and direction_t is not None:
            factors_t = factors_t * lengthened(square_t, direction_t, update_t)
        move_(p_s, u_s, factors_t, h.lr, part)
    return torch.cat(found)


def has_loops(p_N: Tensor) -> bool:
    """Is there a step on the mean gradient in two passes? Its sums go in another order than those of the chain."""
    return fits(p_N)


def exact_squares(g_s: Tensor, m_s: Tensor, v_s: Tensor, h: AdamHyper, segments: TensorSegments) -> Tensor:
    """|u_0|^2 of each tensor as it would be of the mean of exact momenta, where m is decoded: float[t], an estimate.

    g: the mean gradient of the step after m; d = sqrt(v) + eps, with a v that has not seen g. What one bit leaves out
    or adds has nothing to do with g, so that the exact m has with g in common what the decoded one has:

        S = <g / d, m / d>            less CHANCE |g m / d^2| of its size, which chance alone would give it
        |u_0|^2 = S + (|g / d|^2 - S) (1 - beta1) / (1 + beta1)       of m = beta1 m + (1 - beta1) g in the long run

    S = |g / d|^2 where all gradients are alike, 0 where they are independent, below where each undoes a part of the one
    before. S is at most |g / d|^2, and the whole at least LEAST_NOISE times what independent gradients would give.
    """
    d_s = v_s.sqrt().add_(h.eps)
    gradient_s, u_s = g_s / d_s, m_s / d_s
    chance_t = segments.norms(gradient_s * u_s).mul_(CHANCE)
    decoded_t, gradient_t = segments.norms(u_s).square_(), segments.norms(gradient_s).square_()
    signal_t = (segments.norms(gradient_s.add_(u_s)).square_() - gradient_t - decoded_t) / 2
    signal_t = torch.copysign((signal_t.abs() - chance_t).clamp_(min=0), signal_t)
    signal_t = torch.minimum(signal_t, gradient_t)
    averaged = (1 - h.beta1) / (1 + h.beta1)
    return torch.maximum(signal_t + (gradient_t - signal_t) * averaged, gradient_t * (LEAST_NOISE * averaged))


def are_known(squares_t: Tensor) -> Tensor:
    """Which of these squared lengths are: one that is exactly 1 has not been found yet, and 0 says nothing. bool[t]."""
    return (squares_t != 1) & (squares_t > 0)


def lengthened(square_t: Tensor, direction_t: Tensor, update_t: Tensor) -> Tensor:
    """q of each tensor: how many times longer u = u_0 + wd x is, u_0 of a decoded m, than it would be of the exact one.

    square: |u_0|^2 of the exact m; direction: |u_0|; update: |u|.  q = |u| / sqrt(|u|^2 - (|u_0|^2 - square)), in
    [LEAST, MOST]; 1 where the square is not known, or u is 0.
    """
    left_t = 1 - (direction_t * direction_t - square_t) / (update_t * update_t)
    left_t = torch.where(are_known(square_t), left_t, torch.ones_like(left_t))
    return left_t.clamp_(MOST**-2, LEAST**-2).rsqrt_().nan_to_num_(1.0)


def move_(p_s: Tensor, u_s: Tensor, factors_t: Tensor, lr: float, segments: TensorSegments) -> None:
    """x_l <- x_l - lr factor_l u_l for each tensor, in place."""
    p_s.addcmul_(segments.expand(factors_t), u_s, value=-lr)


MOSTLY = 0.25
"""The part of the mean gradient that must be zero, so that R is brought together."""


def are_most_zero(zeros_t: Tensor, space: FlatSpace, most: float = MOSTLY) -> bool:
    """Is at least that part of all elements zero? Of whole tensors, where this rank has shards: collective then."""
    live = space.layout.live
    lengths_t = torch.tensor([stop - start for start, stop in live], dtype=torch.float64, device="cpu")
    of_2t = torch.stack([zeros_t * lengths_t, lengths_t])
    if space.box is not None:
        of_2t = space.box.sums(of_2t.to(space.p_N.device)).cpu()
    zero, every = of_2t.sum(1).tolist()
    return bool(zero >= most * every)


def root_mean_square(sum_N: Tensor, g_N: Tensor, steps: int, zeros_t: Tensor, live: Sequence[Span]) -> Tensor:
    """sqrt(z S^2 / G + (1 - z) g^2), float[N]: S, which is modified. steps: G."""
    for z, (start, stop) in zip(zeros_t.tolist(), live, strict=True):
        at = slice(start, stop)
        sum_N[at].square_().mul_(z / steps).addcmul_(g_N[at], g_N[at], value=1 - z)
    return sum_N.sqrt_()
