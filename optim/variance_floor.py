"""A floor under the variance where it is frozen: elements that saw no gradient, or only rounding noise, in warm-up.

A frozen v divides every later step by sqrt(v) + eps. Where v is 0 (embedding rows of tokens not met yet) or of the
size of rounding errors (the key part of an attention bias, whose exact gradient is 0), the first step after the
freeze would be up to 1e8 x lr, one-bit momentum or not, and the loss does not show it. Masking such elements would
keep them from ever training; a floor lets them train at a normal step size. See docs/algorithms.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.comm.layout import Span

RELATIVE_FLOOR = 1e-2
"""Of the mean of the non-zero v around an element: steps at most 10 times the typical one of their tensor."""
NEGLIGIBLE = 1e-10
"""A tensor whose mean v is below this part of the model's is rounding noise: the model's mean stands in."""


def floor_variance_(v_N: Tensor, tensors: Sequence[Span], blocks: Sequence[Span]) -> Tensor:
    """Raise v to RELATIVE_FLOOR x mean of the non-zero v, in place. Returns which elements were raised, bool[N].

    The mean is the element's tensor's or that of the block that shares its scale, the larger; the whole model's where
    that is zero or negligible. tensors: ascending live runs; blocks: ascending, covering them. v: float[N].
    A model whose v is zero everywhere is left alone: there is no scale to take. Synchronises with the host.
    """
    model_mean = _nonzero_mean(v_N)
    floor_N = torch.zeros_like(v_N)
    for means_of in (blocks, tensors):
        for start, stop in means_of:
            floor_N[start:stop].clamp_(min=_nonzero_mean(v_N[start:stop]))
    floor_N[floor_N < NEGLIGIBLE * model_mean] = model_mean
    floor_N.mul_(RELATIVE_FLOOR)
    live_N = torch.zeros_like(v_N, dtype=torch.bool)
    for start, stop in tensors:
        live_N[start:stop] = True
    raised_N = (v_N < floor_N) & live_N
    torch.where(raised_N, floor_N, v_N, out=v_N)
    return raised_N


def _nonzero_mean(v: Tensor) -> float:
    positive = v[v > 0]
    return float(positive.mean(dtype=torch.float64)) if positive.numel() else 0.0
