"""The reducer of one rank: nothing crosses a wire, so nothing is compressed, and what error memory holds is given out.

    result = x + R;  R <- 0

A larger group may have left R: a run that shrinks to one rank loses none of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from thinwire.comm.exchange.error_feedback import ErrorFeedback
from thinwire.comm.exchange.fidelity import Fidelity
from thinwire.comm.exchange.held import Held
from thinwire.comm.exchange.stepwise import Stepwise, lerp_, non_finite
from thinwire.comm.kernels.blocks import spread
from thinwire.comm.kernels.peak import peak
from thinwire.comm.layout import Buckets, Partition, VectorLayout
from thinwire.comm.protocol import ErrorMemory, Errors, FullMeans, FullWire, Group, Reader


class Values:
    """A float vector, as a Result."""

    def __init__(self, values_N: Tensor) -> None:
        self.values_N = values_N

    def decode_(self, out_N: Tensor, start: int = 0, stop: int | None = None) -> None:
        """out <- elements [start, stop) of the result."""
        out_N.copy_(self.values_N[start:stop])

    def read(self, reader: Reader, start: int = 0, stop: int | None = None) -> None:
        """Hand elements [start, stop) to the reader, as floats."""
        at = slice(start, self.values_N.numel() if stop is None else stop)
        reader.values(at, self.values_N[at])


class OwnMean:
    """The mean over one rank: x itself, if it is finite, and the R that a larger group left."""

    def __init__(self) -> None:
        self.is_open = False
        self._x_N: Tensor | None = None
        self._memory: ErrorMemory | None = None

    has_lost = False
    """There are no peers to lose."""

    def begin(self, memory: ErrorMemory | None = None) -> None:
        """Open a mean; R of the memory is given out. Raises: RuntimeError where one is open."""
        if self.is_open:
            raise RuntimeError("a mean is open: finish() or abandon() it before the next begin()")
        self._memory = memory
        self.is_open = True

    def launch(self, k: int, x_N: Tensor) -> None:
        """The only bucket."""
        if not self.is_open or k or self._x_N is not None:
            raise RuntimeError(f"bucket {k}: begin() first, then launch the only bucket, 0")
        self._x_N = x_N

    def finish(self) -> None:
        """Waits for the device once. Raises: NonFiniteInput."""
        x_N, self._x_N, self.is_open = self._x_N, None, False
        if x_N is None:
            raise RuntimeError("0 of 1 buckets launched: launch every bucket first")
        _refuse_non_finite(x_N)
        if isinstance(self._memory, GivenOut) and not self._memory.is_empty:
            x_N.add_(self._memory.worker_N).add_(self._memory.server_c)
            self._memory.give_out()

    @contextmanager
    def redone(self) -> Iterator[bool]:
        """There is nothing to count."""
        yield False

    def release(self) -> None:
        """There is no wire memory."""

    def launch_refused(self, k: int) -> None:
        """finish() raises NonFiniteInput: there is no other rank to be told."""
        self.launch(k, torch.tensor(torch.nan))

    def abandon(self) -> None:
        """End it."""
        self._x_N, self.is_open = None, False

    def forget(self) -> None:
        """End it."""
        self.abandon()


class GivenOut(ErrorFeedback):
    """Error memory of one rank, which a larger group may have left: it has memory of its own until it is given out."""

    __slots__ = ()

    def __init__(self, layout: VectorLayout, group: Group, dtype: torch.dtype, device: torch.device) -> None:
        self.version, self._group, self._partition = 0, group, Partition(layout.numel, group.size)
        self.worker_N = self.server_c = torch.zeros(1, dtype=dtype, device=device).expand(layout.numel)

    @property
    def is_empty(self) -> bool:
        """Is there nothing to give out?"""
        return self.server_c.stride() == self.worker_N.stride() == (0,)

    def restore(self, residual_N: Tensor) -> None:
        """As ErrorFeedback.restore."""
        self._take_room()
        super().restore(residual_N)
        if not bool(residual_N.any()):
            self.give_out()

    def give_out(self) -> None:
        """Hold nothing."""
        self.worker_N = self.server_c = self.worker_N.new_zeros(1).expand(self.worker_N.numel())

    def errors(self) -> Errors:
        """As ErrorFeedback.errors."""
        self._take_room()
        return super().errors()

    def scale_(self, factor_N: Tensor) -> None:
        """As ErrorFeedback.scale_."""
        if not self.is_empty:
            super().scale_(factor_N)

    def _take_room(self) -> None:
        if self.is_empty:
            self.worker_N, self.server_c = self.worker_N.clone(), self.server_c.clone()

    def _take(self, held: Held) -> None:
        self._take_room()
        super()._take(held)

    def _take_part(self, worker_N: Tensor) -> None:
        self._take_room()
        super()._take_part(worker_N)


class SoloReducer(Stepwise[GivenOut, Values]):
    """A Reducer of one rank, for vectors of one layout."""

    def __init__(self, group: Group, layout: VectorLayout, like: Tensor) -> None:
        super().__init__(group, Buckets(layout, ((0, layout.numel),)), GivenOut)
        self._like = like.new_empty(0)
        self._launched = False

    def new_memory(self) -> GivenOut:
        """Error memory for one exchanged vector, empty."""
        return GivenOut(self.buckets.layout, self._group, self._like.dtype, self._like.device)

    def launch_sum(self, k: int, x_N: Tensor) -> None:
        """result <- x + R."""
        self._expect(k)
        self._results[1 - self._last].values_N.copy_(x_N)
        self._add_residual()

    def launch_lerp(
        self,
        k: int,
        x_N: Tensor,
        weight: float,
        runs: Sequence[Tensor | None] = (),
        start_N: Tensor | None = None,
        factor_r: Tensor | None = None,
    ) -> None:
        """result <- f (r + weight (x - r)) + R; the rest as Reducer.launch_lerp."""
        memory, layout = self._expect(k), self.buckets.layout
        result_N = self._results[1 - self._last].values_N
        if start_N is not None:
            result_N.copy_(start_N)
        else:
            result_N.copy_(self._require_last(memory).values_N)
            if factor_r is not None:
                result_N.div_(spread(factor_r, layout))
        lerp_(result_N, x_N, weight, layout, runs, factor_r)
        self._add_residual()

    def launch_formed(self, k: int, form: Callable[[slice], Tensor]) -> None:
        """As launch_sum of what form() makes."""
        self.launch_sum(k, form(slice(0, self.buckets.layout.numel)))

    def launch_refused(self, k: int) -> None:
        """finish() raises NonFiniteInput: there is no other rank to be told."""
        self.launch_sum(k, self._like.new_full((self.buckets.layout.numel,), torch.nan))

    def finish(self) -> None:
        """Waits for the device once. Raises: NonFiniteInput; then nothing has changed and no exchange is open."""
        if not self._launched or self._finished:
            raise RuntimeError(f"launched = {self._launched}, finished = {self._finished}: launch, then finish once")
        try:
            _refuse_non_finite(self._results[1 - self._last].values_N)
        except BaseException:
            self._close()
            raise
        self._finished = True

    def commit(self) -> None:
        """Keep it; R is given out. Ends the exchange."""
        memory = self._require_finished()
        memory.give_out()
        self._keep(memory)
        self._close()

    def abandon(self) -> None:
        """End the exchange as if it had not begun."""
        self._close()

    def forget(self) -> None:
        """Close what is open, the mean too: there are no peers to wait for it."""
        self._close()
        self._forget_means()

    @contextmanager
    def redone(self) -> Iterator[bool]:
        """There are no peers to lose."""
        yield False

    def fidelity(self, memory: ErrorMemory) -> Fidelity | None:
        """All of it was carried: rho is 1 on the way back; what waits in error memory was put there since."""
        if self._last_of is None or self._last_of[0] is not memory:
            return None
        given = float(torch.linalg.vector_norm(self._results[self._last].values_N))
        waiting = float(torch.linalg.vector_norm(memory.residual()))
        return Fidelity(None, 1.0 if given > 0 else None, waiting / given if given > 0 else None)

    def _make_means(self, wire: FullWire) -> FullMeans:
        return OwnMean()

    def _expect(self, k: int) -> GivenOut:
        memory = self._open()
        if k or self._launched:
            raise RuntimeError(f"bucket {k}: the only bucket is 0; launched = {self._launched}")
        if not self._results:  # made when first needed: an optimizer that compresses nothing has none
            self._results = [Values(self._like.new_zeros(self.buckets.layout.numel)) for _ in range(2)]
        self._launched = True
        return memory

    def _add_residual(self) -> None:
        memory = self._open()
        if not memory.is_empty:
            self._results[1 - self._last].values_N.add_(memory.worker_N).add_(memory.server_c)

    def _close(self) -> None:
        self._memory, self._launched, self._finished = None, False, False


def _refuse_non_finite(x_N: Tensor) -> None:
    # NaN and infinity survive the maximum.
    largest = peak(x_N)
    if not math.isfinite(float(largest)):
        raise non_finite(torch.isfinite(largest).view(1))
