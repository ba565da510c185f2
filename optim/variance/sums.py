"""What a refresh of 1-bit LAMB's variance takes in where most of a gradient is zero: all gradients since the last one.

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

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.comm.exchange.memory import ErrorMemory
from thinwire.comm.exchange.reducer import Reducer
from thinwire.comm.layout import Span
from thinwire.comm.protocol import FullWire

MOSTLY = 0.25
"""The part of the mean gradient that must be zero, so that R is brought together."""


def zeros_of(g_N: Tensor, live: Sequence[Span]) -> Tensor:
    """z of each tensor, float64[tensors], on the host. Waits for the device."""
    counts = [torch.count_nonzero(g_N[start:stop]) for start, stop in live]
    lengths = torch.tensor([stop - start for start, stop in live], dtype=torch.float64)
    return 1 - torch.stack(counts).double().cpu() / lengths


def are_most_zero(zeros_t: Tensor, live: Sequence[Span], most: float = MOSTLY) -> bool:
    """Is at least that part of all elements zero?"""
    lengths = torch.tensor([stop - start for start, stop in live], dtype=torch.float64)
    return bool((zeros_t * lengths).sum() >= most * lengths.sum())


def brought_together(reduce: Reducer, memory: ErrorMemory, ranks: int, wire: FullWire) -> Tensor:
    """R, float[N], bit-identical on every rank, rounded as the wire says. Collective; modifies nothing.

    Raises: PeerLost, NonFiniteInput.
    """
    residual_N = memory.share(ranks).mul_(ranks)
    reduce.full_(residual_N, wire)
    return residual_N


def root_mean_square(sum_N: Tensor, g_N: Tensor, steps: int, zeros_t: Tensor, live: Sequence[Span]) -> Tensor:
    """sqrt(z S^2 / G + (1 - z) g^2), float[N]: S, which is modified. steps: G."""
    for z, (start, stop) in zip(zeros_t.tolist(), live, strict=True):
        at = slice(start, stop)
        sum_N[at].square_().mul_(z / steps).addcmul_(g_N[at], g_N[at], value=1 - z)
    return sum_N.sqrt_()
