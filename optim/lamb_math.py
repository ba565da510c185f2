"""The mathematics of LAMB on flat slices: norms and one trust ratio a tensor.  [You et al. 2020, arXiv 1904.00962]

Shapes: N elements of the flat vectors, s elements of one group's span, t tensors of the group. Source of the update:
Alg. 2 there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.comm.layout import Span
from thinwire.optim.engine.ages import Run
from thinwire.optim.engine.flat import FlatSpace
from thinwire.optim.engine.hyperparameters import AdamHyper, refuse_out_of_range
from thinwire.optim.kernels import updates
from thinwire.optim.kernels.updates import Tiles


@dataclass(frozen=True, slots=True)
class LambHyper:
    """The bounds of LAMB, and the constants of 1-bit LAMB's compressed phase, the same for all groups.

    coeff: bounds of the trust ratio. coeff_beta: how slowly its average moves. factor: bounds of the ratio of frozen to
    fresh variance; factor_threshold: how much that may change in a step.
    """

    max_coeff: float = 10.0
    min_coeff: float = 0.01
    coeff_beta: float = 0.9
    factor_max: float = 4.0
    factor_min: float = 0.5
    factor_threshold: float = 0.1

    def __post_init__(self) -> None:
        ratio, factor = f"above 0 and at most {self.max_coeff}", f"above 0 and at most {self.factor_max}"
        refuse_out_of_range(
            ("min_coeff", self.min_coeff, f"{ratio}, max_coeff", 0 < self.min_coeff <= self.max_coeff),
            ("coeff_beta", self.coeff_beta, "in [0, 1)", 0 <= self.coeff_beta < 1),
            ("factor_min", self.factor_min, f"{factor}, factor_max", 0 < self.factor_min <= self.factor_max),
            ("factor_threshold", self.factor_threshold, "in (0, 1)", 0 < self.factor_threshold < 1),
        )


BOUNDS = LambHyper()
"""By default: DeepSpeed's."""
LEAST, MOST = 0.5, 8.0
"""Bounds of how many times longer one bit makes a direction. Below 1 is noise of the estimate."""


@dataclass(frozen=True, slots=True)
class TensorSegments:
    """The tensors of one run, as a rule a parameter group. `span`, `tensors`: its slice of the elements and of all
    tensors.
    """

    span: slice
    tensors: slice
    live: tuple[Span, ...]
    lengths_t: Tensor
    """int64[t]: elements from one tensor's start to the next one's, the dead ones between them included."""
    tiles: Tiles | None
    """The same elements for the loops of optim.kernels, where those fit."""

    def norms(self, x_N: Tensor) -> Tensor:
        """||x_l||_2 of each tensor, float[t]."""
        return torch.stack(list(torch._foreach_norm(self._views(x_N))))

    def rms(self, x_N: Tensor) -> Tensor:
        """||x_l||_2 / sqrt(elements), float[t]."""
        counts = torch.tensor([stop - start for start, stop in self.live], dtype=x_N.dtype, device=x_N.device)
        return self.norms(x_N).div_(counts.sqrt_())

    def maxima(self, x_N: Tensor) -> Tensor:
        """The largest live element of each tensor, float[t]."""
        return torch.stack(list(torch._foreach_max(self._views(x_N))))

    def expand(self, values_t: Tensor) -> Tensor:
        """Each tensor's value at each of its elements: float[span]."""
        return torch.repeat_interleave(values_t, self.lengths_t, output_size=self.span.stop - self.span.start)

    def _views(self, x_N: Tensor) -> list[Tensor]:
        return [x_N[start:stop] for start, stop in self.live]


def tensor_segments(space: FlatSpace, runs: Sequence[Run]) -> list[TensorSegments]:
    """One TensorSegments a run of tensors, in order."""
    found = []
    for span in (run.span for run in runs):
        inside = [i for i, tensor in enumerate(space.tensors) if span.start <= tensor.start < span.stop]
        members = [space.tensors[i] for i in inside]
        live = tuple((tensor.start, tensor.stop) for tensor in members)
        starts = [tensor.start for tensor in members]
        lengths = [after - start for start, after in zip(starts, [*starts[1:], span.stop], strict=True)]
        found.append(
            TensorSegments(
                span=span,
                tensors=slice(inside[0], inside[-1] + 1),
                live=live,
                lengths_t=torch.tensor(lengths, dtype=torch.int64, device=space.p_N.device),
                tiles=Tiles.of(live, space.p_N) if updates.fits(space.p_N) else None,
            )
        )
    return found


def adam_direction(m_s: Tensor, v_s: Tensor, h: AdamHyper, bias_step: int | None) -> Tensor:
    """m_hat / (sqrt(v_hat) + eps), float[s], new; m and v as they are where bias_step is None."""
    correction1 = 1.0 if bias_step is None else 1 - h.beta1**bias_step
    correction2 = 1.0 if bias_step is None else 1 - h.beta2**bias_step
    return (m_s / correction1).div_((v_s / correction2).sqrt_().add_(h.eps))


def trust_ratios(p_N: Tensor, u_N: Tensor, segments: TensorSegments, bounds: LambHyper) -> Tensor:
    """clip(||x_l|| / ||u_l||, min_coeff, max_coeff) of each tensor, float[t]; 1 where either norm is 0."""
    return clipped_ratios(segments.norms(p_N), segments.norms(u_N), bounds)


def clipped_ratios(p_norm: Tensor, u_norm: Tensor, bounds: LambHyper) -> Tensor:
    """trust_ratios of norms float[t]."""
    ratio = (p_norm / u_norm).clamp_(bounds.min_coeff, bounds.max_coeff)
    return torch.where((p_norm > 0) & (u_norm > 0), ratio, torch.ones_like(ratio))


def descend_(
    p_N: Tensor,
    m_N: Tensor,
    v_N: Tensor,
    u_N: Tensor,
    h: AdamHyper,
    segments: TensorSegments,
    bounds: LambHyper,
    bias_step: int | None,
    times_t: Tensor | None = None,
) -> Tensor:
    """LAMB's move of one group:  u = m_hat / (sqrt(v_hat) + eps) + wd x;  x_l <- x_l - lr c_l u_l.

    p and u (scratch) are modified inside the group's span. times: of each c, None for 1. Returns c, float[t].
    """
    u_N[h.span] = adam_direction(m_N[h.span], v_N[h.span], h, bias_step)
    u_N[h.span].add_(p_N[h.span], alpha=h.weight_decay)
    coeff_t = trust_ratios(p_N, u_N, segments, bounds)
    move_(p_N[h.span], u_N[h.span], coeff_t if times_t is None else times_t * coeff_t, h.lr, segments)
    return coeff_t


def lengthened(
    p_N: Tensor, g_N: Tensor, m_N: Tensor, v_N: Tensor, u_N: Tensor, h: AdamHyper, segments: TensorSegments
) -> Tensor:
    """How many times longer u is, of a decoded m, than it would be of the mean of exact momenta: float[t], an estimate.

    g: the mean gradient of the step after m; d = sqrt(v) + eps, with a v that has not seen g. What one bit leaves out
    or adds has nothing to do with g, and neither has the noise of the gradients that m is made of. So

        S = <g / d, m / d>            estimates the squared length of the expected gradient, in units of d
        |g / d|^2 - S                 that of a gradient's noise; m averages it down to (1 - beta1) / (1 + beta1)
        |u_0|^2 = S + (|g / d|^2 - S) (1 - beta1) / (1 + beta1)       of the exact m
        q = |u| / sqrt(|u|^2 - (|m / d|^2 - |u_0|^2)),  u = m / d + wd x

    in [LEAST, MOST]. u_N: scratch, modified inside the group's span.
    """
    d_s = v_N[h.span].sqrt().add_(h.eps)
    gradient_s, u_s = g_N[h.span] / d_s, u_N[h.span]
    torch.div(m_N[h.span], d_s, out=u_s)
    decoded_t = segments.norms(u_N).square_()
    u_s.add_(gradient_s)
    both_t = segments.norms(u_N).square_()
    u_s.copy_(gradient_s)
    gradient_t = segments.norms(u_N).square_()
    torch.div(m_N[h.span], d_s, out=u_s).add_(p_N[h.span], alpha=h.weight_decay)
    update_t = segments.norms(u_N).square_()
    signal_t = ((both_t - gradient_t - decoded_t) / 2).clamp_(min=0)
    signal_t = torch.minimum(signal_t, gradient_t)
    exact_t = signal_t + (gradient_t - signal_t) * ((1 - h.beta1) / (1 + h.beta1))
    left_t = (1 - (decoded_t - exact_t) / update_t).clamp_(MOST**-2, LEAST**-2)
    return left_t.rsqrt_().nan_to_num_(1.0)


def move_(p_s: Tensor, u_s: Tensor, factors_t: Tensor, lr: float, segments: TensorSegments) -> None:
    """x_l <- x_l - lr factor_l u_l for each tensor, in place."""
    p_s.addcmul_(segments.expand(factors_t), u_s, value=-lr)
