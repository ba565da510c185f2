"""How is the mean in full taken bucket by bucket? For warm-up steps: a bucket is on the wire while backward goes on.

    begin()    launch(0, x) ... launch(K-1, x)    finish()

In place and uncompressed: after a failure x is undefined, and there is nothing to undo or to commit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
from torch import Tensor

from thinwire.comm.errors import CommError, NonFiniteInput
from thinwire.comm.exchange.pipeline import Pipeline
from thinwire.comm.exchange.stepwise import REFUSED, gather_flags, leave, non_finite, whole_or_left
from thinwire.comm.kernels.peak import peak_
from thinwire.comm.layout import Buckets
from thinwire.comm.protocol import ErrorMemory, Group, Pending


class FullMean:
    """Means of vectors of one layout, one at a time. Every rank calls alike. pipeline: on what they are computed."""

    def __init__(self, group: Group, buckets: Buckets, like: Tensor, pipeline: Pipeline) -> None:
        self._group, self._stats, self._pipeline = group, group.stats, pipeline
        self._spans = buckets.spans
        self._peak_K = torch.zeros(len(buckets), dtype=like.dtype, device=like.device)
        self._peaks = list(self._peak_K.unbind())
        self._own_peak, self._peak = self._peak_K.new_zeros(()), self._peak_K.new_zeros(())
        self._scratch = self._peak_K.new_zeros(())
        self._size = self._peak_K.new_full((), group.size)  # a Python number would become a tensor in every division
        self._pending: list[Pending] = []
        self._launched: list[Tensor] = []
        self._error: CommError | None = None
        self.is_open = False
        self._refuses = False

    has_lost = False
    """There is nothing to count: it leaves nothing out."""

    @property
    def num_launched(self) -> int:
        """Buckets launched; the next one to launch is of this number."""
        return len(self._launched)

    def begin(self, memory: ErrorMemory | None = None) -> None:
        """Open a mean; nothing is left out, and the memory stays as it is. Raises: RuntimeError where one is open."""
        if self.is_open:
            raise RuntimeError("a mean is open: finish() or abandon() it before the next begin()")
        self.is_open = True

    def launch(self, k: int, x_N: Tensor) -> None:
        """Start the mean of bucket k of x, in order. x: float[N], contiguous; bucket k belongs to it until finish().

        Raises: RuntimeError, ValueError for a wrong call. A lost peer is told by finish().
        """
        if not self.is_open or k != len(self._launched):
            raise RuntimeError(f"bucket {k}: begin() first, then launch buckets in order; {len(self._launched)} are")
        if x_N.shape != (self._spans[0][1],) or not x_N.is_contiguous():
            raise ValueError(f"vector of {list(x_N.shape)}: must be contiguous, of {self._spans[0][1]} elements")
        with whole_or_left(self._group, self._end), self._pipeline.fed():
            self._start(slice(*self._spans[k]), x_N)

    def launch_refused(self, k: int) -> None:
        """Send NaN in place of bucket k, because this rank takes no part: every rank raises Refused in finish()."""
        if not self.is_open or k != len(self._launched):
            raise RuntimeError(f"bucket {k}: begin() first, then launch buckets in order; {len(self._launched)} are")
        self._refuses = True
        with whole_or_left(self._group, self._end), self._pipeline.fed():
            self._start_nan(k)

    def finish(self) -> None:
        """Wait for all buckets, and divide. Waits for the device once.

        Raises: PeerLost; NonFiniteInput, alike on every rank. x is undefined then. No mean is open after it.
        """
        with whole_or_left(self._group, self._end):
            self._finish()

    def forget(self) -> None:
        """End a mean of which nothing was launched; where peers may wait for it, leave the group."""
        if self._launched:
            leave(self._group)
        self._end()

    def _finish(self) -> None:
        launched, complete = self._launched, self.is_open and len(self._launched) == len(self._spans)
        with self._pipeline.fed():
            torch.amax(self._peak_K, 0, out=self._own_peak)  # NaN and infinity survive it; read only on failure
            for k, one in enumerate(self._pending):
                began = time.perf_counter()
                try:
                    self._pipeline.hold(one)
                except CommError as lost:
                    self._error = self._error or lost
                self._stats.waited_s += time.perf_counter() - began
                if self._error is None and complete:  # while the next ones are on the wire
                    launched[k].div_(self._size)
                    peak_(launched[k], self._peaks[k], self._scratch)
        self._pipeline.join()
        error, refuses = self._error, self._refuses
        self._close()
        if error is not None:
            raise error
        if not complete:
            raise RuntimeError(f"{len(launched)} of {len(self._spans)} buckets launched: launch every bucket first")
        torch.amax(self._peak_K, 0, out=self._peak)
        began = time.perf_counter()
        peak = float(self._pipeline.host(self._peak))
        self._stats.waited_s += time.perf_counter() - began
        if not math.isfinite(peak):
            own = torch.isfinite(self._own_peak).to(torch.uint8)
            raise non_finite(gather_flags(self._group, own.fill_(REFUSED) if refuses else own))

    @contextmanager
    def redone(self) -> Iterator[bool]:
        """There is nothing to count."""
        yield False

    def release(self) -> None:
        """There is no wire memory."""

    def abandon(self) -> None:
        """End a mean that nobody will use; nothing happens where none is open. x is undefined.

        Collective: buckets not launched yet are sent as NaN, so that a rank that waits in finish() gets NonFiniteInput
        instead of waiting for ever. Raises: PeerLost.
        """
        if not self.is_open:
            return
        with whole_or_left(self._group, self._end):
            with self._pipeline.fed():
                for k in range(len(self._launched), len(self._spans)):
                    self._start_nan(k)
            try:
                self._finish()
            except NonFiniteInput:
                return

    def _end(self) -> None:
        """Wait until no collective touches x, as far as it can be known, and close."""
        with self._pipeline.fed():
            for one in self._pending:
                with suppress(CommError):  # this rank has left
                    self._pipeline.hold(one)
        self._pipeline.join()
        self._close()

    def _close(self) -> None:
        self._launched, self._pending, self._error = [], [], None
        self.is_open = self._refuses = False

    def _start_nan(self, k: int) -> None:
        start, stop = self._spans[k]
        self._start(slice(0, stop - start), self._peak_K.new_full((stop - start,), torch.nan))

    def _start(self, at: slice, x_N: Tensor) -> None:
        x_b = x_N[at]
        peak_(x_b, self._peaks[len(self._launched)], self._scratch)
        self._launched.append(x_b)
        if self._error is None:
            try:
                self._pending.append(self._group.start_sum_(x_b))
            except CommError as error:
                self._error = error
