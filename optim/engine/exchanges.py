"""What a step sends, bucket by bucket: the mean gradient, a sum with error feedback, or the momentum in one pass.

Each is opened when it is made, launched in order 0 to K - 1 by hooks or by step(), and finished in step():

    mean_gradient       g_N <- mean_i g_i, in full or in few bits                     dense steps and warm-ups
    formed_sum          z -> the reducer's result, z made bucket by bucket            0/1 Adam
    fused_momentum      beta1 m + (1 - beta1) g -> the same, m being its last result  1-bit Adam; k times it: 1-bit LAMB

What the compressed ones leave is the reducer's result: read it, then commit. How buckets go while backward still runs
is in overlap.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from thinwire.comm.exchange.memory import ErrorMemory
from thinwire.comm.exchange.reducer import Reducer
from thinwire.comm.kernels.added import Added
from thinwire.comm.kernels.choose import reads_narrow
from thinwire.comm.layout import VectorLayout
from thinwire.comm.protocol import FullWire
from thinwire.optim.engine.flat import Keeps
from thinwire.optim.engine.lying import holders


class Carrier(Protocol):
    """A reducer, or its full means: what ends an exchange."""

    def finish(self) -> None:
        """Wait for all buckets. Raises: PeerLost; NonFiniteInput, alike on every rank."""

    def abandon(self) -> None:
        """Undo what was launched. Collective. Raises: PeerLost."""

    def launching(self) -> AbstractContextManager[object]:
        """Around launches between which nothing else is queued."""

    @property
    def at(self) -> range:
        """The buckets that are exchanged."""

    @property
    def has_failed(self) -> bool:
        """Will finish() raise, as far as is known?"""


ALIGNED = 16
"""Bytes: what kernels read at a time. FSDP makes the gradients of a module in one piece of memory."""
LeftGradients = Sequence[Tensor | None]
"""Of each tensor: its gradient, float[elements], where it is not in g_N."""


class LeftInPlace:
    """Gradients that are read where backward left them: of tensors that stand alone in the layout, like g in type.

    also: of what other types they may be.
    """

    def __init__(self, layout: VectorLayout, g_N: Tensor, also: Sequence[torch.dtype] = ()) -> None:
        self._alone = frozenset(layout.alone())
        self._types: Sequence[torch.dtype] = (g_N.dtype, *also)
        self._first, self._bytes, self._device = g_N.data_ptr(), g_N.nbytes, g_N.device
        self._only_alone = False
        self._taken: list[Tensor | None] = [None] * len(layout.live)
        self.runs: LeftGradients = ()
        """Of each tensor, what was taken; empty while nothing is: then nobody looks through it, bucket by bucket."""

    def are_written(self, *, share_memory: bool) -> None:
        """Take only what is like g in type and, unless they share_memory side by side as shards do, has its own."""
        self._types = self._types[:1]
        self._only_alone = not share_memory

    def take(self, index: int, grad: Tensor) -> bool:
        """Use it, where that can be done; it must not change until the commit. What lies in g is read there."""
        if index not in self._alone or grad.dtype not in self._types or grad.layout is not torch.strided:
            return False
        at = grad.data_ptr()
        if at % ALIGNED or 0 <= at - self._first < self._bytes or grad.device != self._device:
            return False
        if self._only_alone and holders(grad.untyped_storage()) > 1:  # one for two, where views of them are added
            return False
        if not grad.is_contiguous():
            return False
        self._taken[index] = grad if grad.dim() == 1 else grad.view(-1)
        self.runs = self._taken
        return True

    def read(self, views: Sequence[Tensor]) -> list[Tensor]:
        """Where the gradient of each tensor is read, but of those without elements. views: its part of g."""
        chosen = (view if run is None else run for view, run in zip(views, self._taken, strict=True))
        return [x for x in chosen if x.numel()]


class Exchange:
    """One step's exchange. Every rank calls alike. After an error, and after abandon(), it is over and undone.

    at: the buckets that it is of. launch(k): sends bucket k; its part of the gradient is final and stays as it is. A
    lost peer is named by finish().
    where: of tensors whose gradients are read where backward left them; without it all are in g. keeps: will launch
    read the gradient of this tensor where it is? Until the commit it stays so then; else it must be in g.
    """

    def __init__(self, carrier: Carrier, launch: Callable[[int], None], where: LeftInPlace | None = None) -> None:
        self.launch, self.finish, self.abandon = launch, carrier.finish, carrier.abandon
        self.launching: Callable[[], AbstractContextManager[object]] = carrier.launching
        self.keeps: Keeps | None = None if where is None else where.take
        self.wrote: Sequence[int] = ()
        self.at = carrier.at
        self._carrier = carrier
        self._where = where

    @property
    def has_failed(self) -> bool:
        """Is a peer lost, as far as is known? finish() raises it."""
        return self._carrier.has_failed

    @property
    def runs(self) -> LeftGradients:
        """Of each tensor, its gradient where it is read where backward left it; empty where all are in g_N."""
        return () if self._where is None else self._where.runs

    def preceded(self, first: Callable[[int], Sequence[int]], *, share_memory: bool) -> Exchange:
        """The same exchange, where first(k) comes before each bucket k is launched. Returns itself.

        It writes this rank's gradients, in g or in runs, and returns of which tensors. share_memory: as in are_written.
        """
        launch, where = self.launch, self._where

        def both(k: int) -> None:
            self.wrote = first(k)
            launch(k)

        self.launch = both
        self.launching = nullcontext  # what is written between two launches is queued between them
        if where is not None:
            where.are_written(share_memory=share_memory)
        return self


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
    g_N: Tensor | None = None,
    added: Callable[[slice], Added | None] | None = None,
    at: range | None = None,
) -> Exchange:
    """A sum through the codec that exists a bucket at a time. form(slice, runs): makes these elements of it, new.

    Of gradients that are final, and of what else stays as it is until the commit. memory: modified; as before, to
    rounding, where it fails or is abandoned. g: the gradients, where what is made is finite if these are.
    added: as in Reducer.launch_formed; then all gradients are in one place, and where is None. at: the only buckets
    that are exchanged; None: all.
    """
    reduce.begin(memory, at=at)

    def launch(k: int) -> None:
        runs: LeftGradients = () if where is None else where.runs
        reduce.launch_formed(k, lambda at: form(at, runs), g_N, runs, added)

    return Exchange(reduce, launch, where)


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


def refusal(reduce: Reducer, memory: ErrorMemory | None, wire: FullWire, at: range | None = None) -> Exchange:
    """Nothing, where the other ranks exchange something: finish() raises Refused, alike on every rank.

    memory: of what they exchange, which stays as it is; None: they take the mean of gradients, by this wire. at: the
    buckets that they exchange; None: all.
    """
    if memory is None:
        means = reduce.means(wire)
        means.begin()
        return Exchange(means, means.launch_refused)
    reduce.begin(memory, at=at)
    return Exchange(reduce, reduce.launch_refused)
