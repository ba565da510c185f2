"""The variance of rows that are rarely met: what one gradient, most of which is zero, says of them.

A row of an embedding that one step in a hundred touches has, in the gradient of one step, nothing or a hundred times
its mean square. A refresh (refresh.py) that takes in that square for all steps of a gap lets v of most rows fall, and
makes a few jump. What such a gradient does say is how large gradients of the tensor are by now: a mean over all rows
that it touched. So where a part z of a tensor's mean gradient g is exactly zero, and z is at least RARE:

    a refresh   v <- (1 - w) v + w (z r v + (1 - z) g^2),         r = sum g^2 / sum v over the tensor
    the freeze  v <- v + TOUCHES q (1 - beta2) / (1 - beta2^t),   q the mean of the g^2 that are not zero

The second: of a row that was touched once in t steps the corrected v is one squared gradient over t, which may by
chance be next to nothing. So each is taken to have been touched TOUCHES times more, by typical gradients. Adam's v of
such a row mends itself when the row is touched again; a frozen one does not. Tensors with fewer zeros are left as they
are, bit for bit. Measured: docs/algorithms.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.comm.layout import Span
from thinwire.optim.engine.hyperparameters import AdamHyper

RARE = 0.25
"""The part of a tensor's mean gradient that is zero where its rows are rare."""
TOUCHES = 3.0
"""How many typical gradients v of each element is given at the freeze."""


def zeros_of(g_N: Tensor, live: Sequence[Span]) -> Tensor:
    """z of each tensor, float64[tensors], on the host. Waits for the device."""
    counts = [torch.count_nonzero(g_N[start:stop]) for start, stop in live]
    lengths = torch.tensor([stop - start for start, stop in live], dtype=torch.float64, device="cpu")
    return 1 - torch.stack(counts).double().cpu() / lengths.clamp_(min=1)  # of a shard without elements all


def rare_tensors(g_N: Tensor, live: Sequence[Span]) -> list[tuple[slice, float]]:
    """Where the tensors lie that have rare rows, and z of each. One whose gradient is zero everywhere says nothing."""
    zeros = zeros_of(g_N, live).tolist()
    return [(slice(*span), z) for span, z in zip(live, zeros, strict=True) if RARE <= z < 1]


def seen_at_refresh(v_N: Tensor, g_N: Tensor, live: Sequence[Span]) -> Tensor | None:
    """What a refresh takes in the square of: sqrt(z r v + (1 - z) g^2), and g where rows are not rare; float[N], new.

    None: g everywhere. The same on every rank, for v and g are. g: the mean gradient.
    """
    rare = rare_tensors(g_N, live)
    if not rare:
        return None
    seen_N = g_N.clone()
    for at, z in rare:
        v, g = v_N[at].to(g_N.dtype, copy=True), g_N[at]
        grown = torch.linalg.vector_norm(g).square_() / v.sum()
        seen_N[at] = v.mul_(grown * z).addcmul_(g, g, value=1 - z).sqrt_()
    return seen_N


def give_touches_(
    v_N: Tensor, g_N: Tensor, live: Sequence[Span], groups: Sequence[AdamHyper]
) -> list[tuple[slice, float]]:
    """At the freeze: corrected v <- with TOUCHES typical gradients more where rows are rare, in place. Returns where.

    groups: the runs of tensors and what their v has seen; one whose v was kept before is left as it is. As of
    rare_tensors, those that were not.
    """
    rare, given = rare_tensors(g_N, live), []
    for h in groups:
        for at, z in rare:
            if h.seen and h.span.start <= at.start < h.span.stop:
                g = g_N[at]
                typical = torch.linalg.vector_norm(g).square_() / torch.count_nonzero(g)
                v_N[at] += typical * (TOUCHES * (1 - h.beta2) / (1 - h.beta2**h.seen))
                given.append((at, z))
    return given
