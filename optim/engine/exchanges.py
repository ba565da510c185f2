"""What can a step send, bucket by bucket? The mean gradient, a sum with error feedback, or the momentum in one pass.

Each is opened by its constructor, launched in order 0 to K - 1 by hooks or by step(), and finished in step():

    MeanGradient       g_N <- mean_i g_i, in full or in few bits                     dense steps and warm-ups
    CompressedSum      z_N -> the reducer's result, z made of g bucket by bucket     where a bucket has several betas
    FormedSum          the same, and no z is kept                                    0/1 Adam
    FusedMomentum      beta1 m + (1 - beta1) g -> the same, m being its last result  1-bit Adam; k times it: 1-bit LAMB

What the compressed ones leave is the reducer's result: read it, then commit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from thinwire.comm.kernels.choose import reads_narrow
from thinwire.comm.layout import VectorLayout
from thinwire.comm.protocol import ErrorMemory, FullMeans, FullWire, Reducer


class Exchange(Protocol):
    """One step's exchange. Every rank calls alike. After an error, and after abandon(), it is over and undone."""

    def keeps(self, index: int, grad: Tensor) -> bool:
        """Will launch read this tensor's gradient where it is? Else it must be in g_N. Until the commit it stays so."""

    def launch(self, k: int) -> None:
        """Send bucket k; its part of the gradient is final and stays as it is. A lost peer is told by finish()."""

    def finish(self) -> None:
        """Wait for all K. Raises: PeerLost; NonFiniteInput, alike on every rank."""

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


class MeanGradient:
    """g <- the mean over ranks, as the reducer sends it. After a failure, and after abandon(), g is undefined.

    memory: for what few bits leave out; None: nothing is left out, or it is dropped. wire: None for the reducer's own.
    """

    def __init__(
        self, reduce: Reducer, g_N: Tensor, memory: ErrorMemory | None = None, wire: FullWire | None = None
    ) -> None:
        self._full = reduce.full if wire is None else reduce.means(wire)
        self._g_N = g_N
        self._full.begin(memory)

    def keeps(self, index: int, grad: Tensor) -> bool:
        """No: the mean takes the gradient's place in g."""
        return False

    def launch(self, k: int) -> None:
        """Start the mean of bucket k."""
        self._full.launch(k, self._g_N)

    def finish(self) -> None:
        """Wait for all K."""
        self._full.finish()

    def abandon(self) -> None:
        """End it; nobody will use it."""
        self._full.abandon()


class CompressedSum:
    """z through the codec. form(slice, runs): writes these elements of z, from gradients that are final.

    z: float[N], its own until the commit. memory: modified; as before, to rounding, where it fails or is abandoned.
    where: of tensors whose gradients form() reads where backward left them; without it all are in g.
    """

    def __init__(
        self,
        reduce: Reducer,
        memory: ErrorMemory,
        z_N: Tensor,
        form: Callable[[slice, LeftGradients], None],
        where: LeftInPlace | None = None,
    ) -> None:
        self._reduce = reduce
        self._z_N = z_N
        self._form = form
        self._where = where
        reduce.begin(memory)

    def keeps(self, index: int, grad: Tensor) -> bool:
        """Where form() can read it there."""
        return self._where is not None and self._where.take(index, grad)

    def launch(self, k: int) -> None:
        """Form bucket k of z, encode it and send it."""
        runs = () if self._where is None else self._where.runs
        self._form(slice(*self._reduce.buckets.spans[k]), runs)
        self._reduce.launch_sum(k, self._z_N)

    def finish(self) -> None:
        """Wait for all K."""
        self._reduce.finish()

    def abandon(self) -> None:
        """Undo it."""
        self._reduce.abandon()


class FormedSum:
    """A sum through the codec that exists a bucket at a time. form(slice, runs): makes these elements of it, new.

    Of gradients that are final, and of what else stays as it is until the commit. memory, where: as in CompressedSum.
    """

    def __init__(
        self,
        reduce: Reducer,
        memory: ErrorMemory,
        form: Callable[[slice, LeftGradients], Tensor],
        where: LeftInPlace | None = None,
    ) -> None:
        self._reduce = reduce
        self._form = form
        self._where = where
        reduce.begin(memory)

    def keeps(self, index: int, grad: Tensor) -> bool:
        """Where form() can read it there."""
        return self._where is not None and self._where.take(index, grad)

    def launch(self, k: int) -> None:
        """Form bucket k, encode it and send it."""
        self._reduce.launch_formed(k, self._made)

    def finish(self) -> None:
        """Wait for all K."""
        self._reduce.finish()

    def abandon(self) -> None:
        """Undo it."""
        self._reduce.abandon()

    def _made(self, at: slice) -> Tensor:
        return self._form(at, () if self._where is None else self._where.runs)


class FusedMomentum:
    """beta1 m + (1 - beta1) g, m being the reducer's last result: formed in the pass that encodes it.

    g: float[N], not to be written until the commit. beta1_K: of each bucket. memory: as in CompressedSum; its last
    result is the momentum (reduce.last), unless that is given as floats, which are as g. factor: float[tensors], as g:
    what is exchanged, the last result too, is so many times the momentum.
    """

    def __init__(
        self,
        reduce: Reducer,
        memory: ErrorMemory,
        g_N: Tensor,
        beta1_K: Sequence[float],
        m_N: Tensor | None = None,
        factor_T: Tensor | None = None,
    ) -> None:
        self._reduce = reduce
        self._g_N, self.m_N, self._factor_T = g_N, m_N, factor_T
        self._beta1_K = beta1_K
        also = (torch.bfloat16,) if reads_narrow(g_N.device, g_N.dtype) else ()  # widened as it is read
        self._where = LeftInPlace(reduce.buckets.layout, g_N, also)
        reduce.begin(memory)

    def keeps(self, index: int, grad: Tensor) -> bool:
        """Where the reducer can read it there."""
        return self._where.take(index, grad)

    def launch(self, k: int) -> None:
        """Encode bucket k and send it."""
        self._reduce.launch_lerp(k, self._g_N, 1 - self._beta1_K[k], self._where.runs, self.m_N, self._factor_T)

    def finish(self) -> None:
        """Wait for all K."""
        self._reduce.finish()

    def abandon(self) -> None:
        """Undo it."""
        self._reduce.abandon()


class Refusal:
    """Nothing, where the other ranks exchange something: finish() raises Refused, alike on every rank.

    memory: of what they exchange, which stays as it is; None: they take the mean of gradients, by this wire.
    """

    def __init__(self, reduce: Reducer, memory: ErrorMemory | None, wire: FullWire) -> None:
        self._one: Reducer | FullMeans = reduce
        if memory is None:
            self._one = reduce.means(wire)
            self._one.begin()
        else:
            reduce.begin(memory)

    def keeps(self, index: int, grad: Tensor) -> bool:
        """No gradient is sent."""
        return False

    def launch(self, k: int) -> None:
        """Say so in place of bucket k."""
        self._one.launch_refused(k)

    def finish(self) -> None:
        """Wait for all K. Raises: Refused, PeerLost."""
        self._one.finish()

    def abandon(self) -> None:
        """End it."""
        self._one.abandon()
