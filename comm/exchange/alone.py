"""One rank: nothing crosses a wire, so nothing is compressed, and what error memory holds is given out.

    result = x + R;  R <- 0

A larger group may have left R: a run that shrinks to one rank loses none of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.comm.exchange.coder import Coder, Given
from thinwire.comm.exchange.fidelity import Fidelity
from thinwire.comm.exchange.memory import ErrorMemory, Place, Served, Whole
from thinwire.comm.kernels.peak import peak
from thinwire.comm.layout import Buckets
from thinwire.comm.protocol import Group, Pending, Reader


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


class AloneCoder(Coder):
    """Vectors of one layout on one rank. keeps_results: as CodecCoder."""

    def __init__(self, group: Group, buckets: Buckets, like: Tensor, *, keeps_results: bool) -> None:
        super().__init__(buckets, like)
        self.keeps_results = keeps_results
        self._group = group
        self._places = [Place(*2 * (Served(slice(start, stop), None, 0),)) for start, stop in buckets.spans]
        self._memory: ErrorMemory | None = None
        self._gives_out: set[int] = set()
        """Buckets whose part of R is in the result."""
        self._peak: Tensor | None = None
        """The largest of what was given; NaN and infinity survive it."""

    def new_memory(self) -> ErrorMemory:
        """Error memory for one exchanged vector, empty."""
        return ErrorMemory(self._places, Whole(self._group, self.buckets.layout.numel), self.like)

    def owns(self, memory: ErrorMemory) -> bool:
        """Was it made here, or by the reducer whose means these are?"""
        return memory.places is self._places or not self.keeps_results

    def begin(self, memory: ErrorMemory | None, draw: int) -> None:
        """Make results when they are first needed: an optimizer that compresses nothing has none."""
        self._memory, self._peak, self._gives_out = memory, None, set()
        if self.keeps_results and not self.results:
            self.results = [Values(self.like.new_zeros(self.buckets.layout.numel)) for _ in range(2)]

    def encode(self, k: int, given: Given, formed_b: Tensor | None) -> None:
        """result <- x + R."""
        assert formed_b is not None
        at = slice(*self.buckets.spans[k])
        if self.keeps_results:
            result = self.results[1 - self.turn]
            assert isinstance(result, Values)
            result_b = result.values_N[at].copy_(formed_b)
        else:
            result_b = formed_b
        here = peak(result_b)
        self._peak = here if self._peak is None else torch.maximum(self._peak, here)
        if self._memory is not None and not self._memory.is_empty:
            result_b.add_(self._memory.worker[k].sum_c).add_(self._memory.server[k].sum_c)
            self._gives_out.add(k)

    def encode_nothing(self, k: int) -> None:
        """result <- 0: what waits goes on waiting."""
        if self.keeps_results:
            result = self.results[1 - self.turn]
            assert isinstance(result, Values)
            result.values_N[slice(*self.buckets.spans[k])] = 0

    def refuse(self, k: int, flag: int) -> None:
        """There is no other rank to be told."""
        self._peak = self.like.new_full((), torch.nan)

    def send(self, k: int) -> Sequence[Pending]:
        """Nothing."""
        return ()

    def serve(self, k: int, given: Given) -> None:
        """Nothing."""

    def finite(self) -> Tensor:
        """Is all that was given?"""
        return self.own_flag(())

    def own_flag(self, given: Sequence[Given]) -> Tensor:
        """The same."""
        if self._peak is None:
            return torch.ones((), dtype=torch.uint8)
        return torch.isfinite(self._peak).to(torch.uint8)

    def keep(self) -> None:
        """R is given out."""
        if self._memory is not None:
            self._memory.give_out(self._gives_out)
        self._memory = self._peak = None

    def undo(self, given: Sequence[Given], num_served: int, *, lost: bool) -> None:
        """Nothing was written but a result that nobody has."""
        self._memory = self._peak = None

    def fidelity(self, memory: ErrorMemory) -> Fidelity | None:
        """All of it was carried: rho is 1 on the way back; what waits in error memory was put there since."""
        result = self.results[self.turn]
        assert isinstance(result, Values)
        given = float(torch.linalg.vector_norm(result.values_N))
        waiting = float(torch.linalg.vector_norm(memory.residual()))
        return Fidelity(None, 1.0 if given > 0 else None, waiting / given if given > 0 else None)
