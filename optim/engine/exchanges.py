"""What a step sends, bucket by bucket: the mean gradient, a sum with error feedback, or the momentum in one pass.

Each is opened when it is made, launched in order 0 to K - 1 by hooks or by step(), and finished in step():

    mean_gradient       g_N <- mean_i g_i, in full or in few bits                     dense steps and warm-ups
    formed_sum          z -> the reducer's result, z made bucket by bucket            0/1 Adam; buckets of several betas
    fused_momentum      beta1 m + (1 - beta1) g -> the same, m being its last result  1-bit Adam; k times it: 1-bit LAMB

What the compressed ones leave is the reducer's result: read it, then commit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from thinwire.comm.exchange.memory import ErrorMemory
from thinwire.comm.exchange.reducer import Reducer
from thinwire.comm.kernels.choose import reads_narrow
from thinwire.comm.layout import VectorLayout
from thinwire.comm.protocol import FullWire


class Carrier(Protocol):
    """A reducer, or its full means: what ends an exchange."""

    def finish(self) -> None:
        """Wait for all buckets. Raises: PeerLost; NonFiniteInput, alike on every rank."""

    def abandon(self) -> None:
        """Undo what was launched. Collective. Raises: PeerLost."""


LeftGradients = Sequence[Tensor | None]
"""Of each tensor: its gradient, float[elements], where it is not in g_N."""


class LeftInPlace:
    """Gradients that are read where backward left them: of tensors that stand alone in the layout, like g in type.

    also: of what other types they may be. runs: of each tensor, those that were taken.
    """

    def __init__(self, layout: VectorLayout, g_N: Tensor, also: Sequence[torch.dtype] = ()) -> None:
        self._alone = frozenset(layout.alone())
        self._g_N = g_N
        self._types = (g_N.dtype, *also)
        self._first, self._bytes = g_N.data_ptr(), g_N.nbytes
        self.runs: list[Tensor | None] = [None] * len(layout.live)

    def take(self, index: int, grad: Tensor) -> bool:
        """Use it, where that can be done; it must not change until the commit. What lies in g is read there."""
        if index not in self._alone or grad.dtype not in self._types or grad.layout != torch.strided:
            return False
        if 0 <= grad.data_ptr() - self._first < self._bytes:
            return False
        if grad.device != self._g_N.device or not grad.is_contiguous():
            return False
        self.runs[index] = grad.view(-1)
        return True


class Exchange:
    """One step's exchange. Every rank calls alike. After an error, and after abandon(), it is over and undone.

    launch(k): sends bucket k; its part of the gradient is final and stays as it is. A lost peer is named by finish().
    where: of tensors whose gradients are read where backward left them; without it all are in g.
    """

    def __init__(self, carrier: Carrier, launch: Callable[[int], None], where: LeftInPlace | None = None) -> None:
        self.launch, self.finish, self.abandon = launch, carrier.finish, carrier.abandon
        self._where = where

    def keeps(self, index: int, grad: Tensor) -> bool:
        """Will launch read this tensor's gradient where it is? Else it must be in g_N. Until the commit it stays so."""
        return self._where is not None and self._where.take(index, grad)


def mean_gradient(reduce: Reducer, g_N: Tensor, memory: ErrorMemory | None, wire: FullWire) -> Exchange:
    """g <- the mean over ranks. After a failure, and after abandon(), g is undefined.

    memory: for what few bits leave out; None: nothing is left out, or it is dropped.
    """
    means = reduce.means(wire)
    means.begin(memory)
    return Exchange(means, lambda k: means.launch(k, g_N))


def formed_sum(
    reduce: Reducer,
    memory: ErrorMemory,
    form: Callable[[slice, LeftGradients], Tensor],
    where: LeftInPlace | None = None,
) -> Exchange:
    """A sum through the codec that exists a bucket at a time. form(slice, runs): makes these elements of it, new.

    Of gradients that are final, and of what else stays as it is until the commit. memory: modified; as before, to
    rounding, where it fails or is abandoned.
    """
    reduce.begin(memory)
    runs: LeftGradients = () if where is None else where.runs
    return Exchange(reduce, lambda k: reduce.launch_formed(k, lambda at: form(at, runs)), where)


def whole_sum(reduce: Reducer, memory: ErrorMemory, z_N: Tensor) -> Exchange:
    """z, float[N], through the codec; its own until the commit. memory: as in formed_sum."""
    reduce.begin(memory)
    return Exchange(reduce, lambda k: reduce.launch_sum(k, z_N))


def fused_momentum(
    reduce: Reducer,
    memory: ErrorMemory,
    g_N: Tensor,
    beta1_K: Sequence[float],
    m_N: Tensor | None = None,
    factor_T: Tensor | None = None,
) -> Exchange:
    """beta1 m + (1 - beta1) g, m being the reducer's last result: formed in the pass that encodes it.

    g: float[N], not to be written until the commit. beta1_K: of each bucket. memory: as in formed_sum; its last result
    is the momentum (reduce.last), unless that is given as floats, which are as g. factor: float[tensors], as g: what is
    exchanged, the last result too, is so many times the momentum.
    """
    also = (torch.bfloat16,) if reads_narrow(g_N.device, g_N.dtype) else ()  # widened as it is read
    where = LeftInPlace(reduce.buckets.layout, g_N, also)
    reduce.begin(memory)
    return Exchange(reduce, lambda k: reduce.launch_lerp(k, g_N, 1 - beta1_K[k], where.runs, m_N, factor_T), where)


def refusal(reduce: Reducer, memory: ErrorMemory | None, wire: FullWire) -> Exchange:
    """Nothing, where the other ranks exchange something: finish() raises Refused, alike on every rank.

    memory: of what they exchange, which stays as it is; None: they take the mean of gradients, by this wire.
    """
    if memory is None:
        means = reduce.means(wire)
        means.begin()
        return Exchange(means, means.launch_refused)
    reduce.begin(memory)
    return Exchange(reduce, reduce.launch_refused)
