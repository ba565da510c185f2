"""A floor under the variance where it is frozen: elements that saw no gradient, or only rounding noise, in warm-up.

A frozen v divides every later step by sqrt(v) + eps. Where v is 0 (embedding rows of tokens not met yet) or of the
size of rounding errors (the key part of an attention bias, whose exact gradient is 0), the first step after the
freeze would be up to 1e8 x lr, one-bit momentum or not, and the loss does not show it. Masking such elements would
keep them from ever training; a floor lets them train at a normal step size. See docs/algorithms.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from thinwire.comm.kernels.choose import CPU_DTYPES
from thinwire.comm.layout import Span

RELATIVE_FLOOR = 1e-2
"""Of the mean of the non-zero v around an element: steps at most 10 times the typical one of their tensor."""
NEGLIGIBLE = 1e-10
"""A tensor whose mean v is below this part of the model's is rounding noise: the model's mean stands in."""
GROUP, GPU_GROUP = 1 << 18, 1 << 24
"""Elements, about: there is scratch for so many. A GPU sums each piece in one thread, so it gets many at a time."""


def floor_variance_(v_N: Tensor, tensors: Sequence[Span], blocks: Sequence[Span]) -> Tensor:
    """Raise v to RELATIVE_FLOOR x mean of the non-zero v, in place. Returns which elements were raised, bool[N].

    The mean is the element's tensor's or that of the block that shares its scale, the larger; the whole model's where
    that is zero or negligible. tensors: ascending live runs; blocks: ascending, covering them. v: float[N].
    A model whose v is zero everywhere is left alone: there is no scale to take. Synchronises with the host.
    """
    # Summed by pieces that lie in one tensor and one block each: few launches, and no long sum in a short dtype.
    bounds = sorted({0, v_N.numel(), *(bound for span in (*tensors, *blocks) for bound in span)})
    cuts = torch.tensor(bounds, dtype=torch.int64, device="cpu")
    sum_p, count_p = _sums(v_N, cuts)
    of_tensor_p, live_p = _means(sum_p, count_p, cuts, tensors)
    of_block_p, _ = _means(sum_p, count_p, cuts, blocks)
    model_mean = sum_p.sum() / count_p.sum().clamp_(min=1)
    around_p = torch.maximum(of_tensor_p, of_block_p)
    floor_p = RELATIVE_FLOOR * torch.where(around_p < NEGLIGIBLE * model_mean, model_mean, around_p)
    raised_N = torch.empty_like(v_N, dtype=torch.bool)
    _raise(v_N, cuts, floor_p.where(live_p, 0.0).to(v_N.device, v_N.dtype), raised_N)
    return raised_N


def _has_loops(v_N: Tensor) -> bool:
    return v_N.device.type == "cpu" and v_N.dtype in CPU_DTYPES and v_N.is_contiguous()


def _groups(v_N: Tensor, cuts: Tensor) -> list[tuple[slice, slice]]:
    """Adjoining pieces between cuts, and their elements: what has scratch at once."""
    most = GROUP if v_N.device.type == "cpu" else GPU_GROUP
    number_p = cuts[:-1] // most
    starts = [0, *(number_p.diff().nonzero().view(-1) + 1).tolist(), len(number_p)]
    return [(slice(a, b), slice(int(cuts[a]), int(cuts[b]))) for a, b in pairwise(starts)]


def _sums(v_N: Tensor, cuts: Tensor) -> tuple[Tensor, Tensor]:
    """Of each piece the sum, and how many are not zero: float64[p], on the host."""
    if _has_loops(v_N):
        from thinwire.optim.kernels import loops  # not at the top: it brings numba, which only CPUs need

        sum_p = torch.zeros(len(cuts) - 1, dtype=torch.float64, device="cpu")
        count_p = torch.zeros_like(sum_p)
        loops.floor_sums(v_N.numpy(), cuts.numpy(), sum_p.numpy(), count_p.numpy())
        return sum_p, count_p
    wide = torch.float32 if v_N.dtype == torch.bfloat16 else v_N.dtype
    sums = [_sums_of(v_N[at].to(wide), cuts[pieces.start : pieces.stop + 1]) for pieces, at in _groups(v_N, cuts)]
    sum_p, count_p = (torch.cat(parts) for parts in zip(*sums, strict=True))
    return sum_p, count_p


def _raise(v_N: Tensor, cuts: Tensor, floor_p: Tensor, raised_N: Tensor) -> None:
    """v <- what is below the floor of its piece, raised to it; raised <- which are. Both modified."""
    if _has_loops(v_N):
        from thinwire.optim.kernels import loops

        loops.raise_to_floor(v_N.numpy(), cuts.numpy(), floor_p.numpy(), raised_N.numpy())
        increment_version(v_N)
        return
    lengths_p = cuts.diff().to(v_N.device)
    for pieces, at in _groups(v_N, cuts):
        floor = floor_p[pieces].repeat_interleave(lengths_p[pieces], output_size=at.stop - at.start)
        torch.lt(v_N[at], floor, out=raised_N[at])
        torch.maximum(v_N[at], floor, out=v_N[at])


def _sums_of(v: Tensor, cuts: Tensor) -> tuple[Tensor, Tensor]:
    lengths_p = cuts.diff().to(v.device)
    sum_p = torch.segment_reduce(v, "sum", lengths=lengths_p, unsafe=True)
    count_p = torch.segment_reduce((v > 0).to(v.dtype), "sum", lengths=lengths_p, unsafe=True)
    return sum_p.double().cpu(), count_p.double().cpu()


def _means(sum_p: Tensor, count_p: Tensor, cuts: Tensor, spans: Sequence[Span]) -> tuple[Tensor, Tensor]:
    """For each piece between cuts: the mean of the non-zero values of its span, 0 without any; is it in a span."""
    starts, stops = torch.tensor(list(spans), dtype=torch.int64, device="cpu").T.contiguous()
    piece = cuts[:-1]
    span_p = torch.searchsorted(starts, piece, right=True).sub_(1).clamp_(min=0)
    inside_p = (starts[span_p] <= piece) & (piece < stops[span_p])
    sums = torch.zeros(len(spans), dtype=torch.float64, device="cpu").index_add_(0, span_p, sum_p * inside_p)
    counts = torch.zeros(len(spans), dtype=torch.float64, device="cpu").index_add_(0, span_p, count_p * inside_p)
    return (sums / counts.clamp(min=1))[span_p] * inside_p, inside_p
