"""One rank that has no others: nothing is sent, nothing left out, and what error memory holds is given out.

    result = x + R;  R <- 0:  a larger group may have left R, and a run that shrinks to one rank loses none of it.

A result is made where it is read. Where x is r + w (g - r), r being the last result, a Reader that can (Making) is
handed r, g and w, and leaves the result in the place of r: one vector is enough then, and one pass. Else there are two,
in turns. What no exchange begins from is made by the Reader too, or a piece at a time, and kept nowhere.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from thinwire.comm.exchange.coder import ABSENT, Coder, Given
from thinwire.comm.exchange.fidelity import Fidelity
from thinwire.comm.exchange.memory import ErrorMemory, Place, Served, Whole
from thinwire.comm.kernels.blocks import spread
from thinwire.comm.kernels.peak import witness
from thinwire.comm.layout import Buckets
from thinwire.comm.protocol import Group, Pending, Reader

Results = Literal["kept", "read", "taken"]
"""What becomes of a result of one rank: an exchange may begin from it; it is read, once; it takes the place of x."""
PIECE = 1 << 20
"""Elements that are made at a time on a CPU: its cache holds them until they are read."""


@runtime_checkable
class Making(Protocol):
    """A Reader that makes what it reads by itself."""

    def make(self, at: slice, x: Tensor, last: Tensor | None, weight: float | None) -> None:
        """Read last + weight (x - last), and leave that in `last`; or, where last is None, what is formed of x.

        at: which elements all of these are.
        """


class Launched:
    """What was launched, as a Result. before: the last one. room: memory for this one. waiting: R, where there is any.

    given: of each bucket that is not made yet. mixed: what of them lies in the place of the last result.
    """

    def __init__(
        self, coder: AloneCoder, before: Launched | None, room_N: Tensor | None, waiting_N: Tensor | None
    ) -> None:
        self._coder, self._before, self._room_N, self._waiting_N = coder, before, room_N, waiting_N
        self._numel = coder.buckets.layout.numel
        self.given: dict[int, Given] = {}
        self.mixed: list[tuple[int, int]] = []

    @property
    def values_N(self) -> Tensor:
        """All of it, 0 where dead."""
        self.make()
        return self.room()

    def room(self) -> Tensor:
        """Memory for all of it."""
        if self._room_N is None:
            self._room_N = self._coder.like.new_zeros(self._numel)
        return self._room_N

    def give_room(self) -> Tensor | None:
        """That memory, where there is any, for another: this one is read no more."""
        room_N, self._room_N = self._room_N, None
        return room_N

    def decode_(self, out_N: Tensor, start: int = 0, stop: int | None = None) -> None:
        """out <- elements [start, stop) of the result."""
        out_N.copy_(self.values_N[start:stop])

    def read(self, reader: Reader, start: int = 0, stop: int | None = None) -> None:
        """Hand elements [start, stop) to the reader, as floats. One that makes them is handed each once."""
        stop = self._numel if stop is None else stop
        if isinstance(reader, Making) and self._can_be_handed:
            for given, at, x in self._inputs(start, stop, self._numel, of_formed=True):
                assert x is not None
                mixes = given.weight is not None
                if mixes:
                    self.mixed.append((at.start, at.stop))
                reader.make(at, x, self._last_of(given)[at] if mixes else None, given.weight)
        elif self._coder.keeps_results:
            reader.values(slice(start, stop), self.values_N[start:stop])
        else:
            for at, made in self.pieces(start, stop):
                reader.values(at, made)

    def pieces(self, start: int, stop: int) -> Iterator[tuple[slice, Tensor]]:
        """What is not made yet of these elements, made. Not to be modified."""
        for given, at, x in self._inputs(start, stop, self._coder.piece):
            yield at, self._made(given, at, x)

    def make(self) -> None:
        """Make what is not made yet; what was launched may change after that."""
        if self.mixed:
            last_N = self._last_of(next(iter(self.given.values())))
            ends = [0, *(end for span in sorted(self.mixed) for end in span), self._numel]
            left = [(low, high) for low, high in list(pairwise(ends))[::2] if low < high]
            for low, high in left:  # what nobody has read
                for at, made in self.pieces(low, high):
                    last_N[at] = made
            if self._before is not None and self._before._room_N is last_N:
                self._before._room_N = None
            self._room_N = last_N
        elif self.given:
            for at, made in self.pieces(0, self._numel):
                self.room()[at] = made
        self.given.clear()
        self.mixed.clear()
        self._before = self._waiting_N = None

    @property
    def _can_be_handed(self) -> bool:
        """Is all of it a mixture, or formed of what is known, and no more than that?"""

        def can_be(one: Given) -> bool:
            is_made = one.weight is not None or one.form is not None
            return is_made and one.vector_N is not None and one.factor_r is None

        whole = len(self.given) == len(self._coder.buckets) and self._waiting_N is None
        return whole and all(can_be(one) for one in self.given.values())

    def _last_of(self, given: Given) -> Tensor:
        """What is mixed with x."""
        if given.start_N is not None:
            return given.start_N
        assert self._before is not None
        return self._before.values_N

    def _inputs(
        self, start: int, stop: int, most: int, *, of_formed: bool = False
    ) -> Iterator[tuple[Given, slice, Tensor | None]]:
        """What was launched of these elements, in pieces of at most so many; None where it is nothing.

        of_formed: what is formed is of x; else None stands there too.
        """
        for k, given in self.given.items():
            low, high = self._coder.buckets.spans[k]
            made = given.is_empty or (given.form is not None and not of_formed)
            for part in [None] if made else self._coder.parts_of(k, given):
                end = high if part is None else low + len(part)
                for first in range(max(low, start), min(end, stop), most):
                    at = slice(first, min(first + most, end, stop))
                    yield given, at, None if part is None else part[at.start - low : at.stop - low]
                low = end

    def _made(self, given: Given, at: slice, x: Tensor | None) -> Tensor:
        """Rounded as the fused kernels do it: without a fused multiply-add."""
        if given.is_empty:
            return self._coder.like.new_zeros(at.stop - at.start)
        if given.form is not None:
            made = given.form(at)
        else:
            assert x is not None
            made = x if given.weight is None else self._mixture(given, at, x, given.weight)
        return made if self._waiting_N is None else made + self._waiting_N[at]

    def _mixture(self, given: Given, at: slice, x: Tensor, weight: float) -> Tensor:
        last, factor = self._last_of(given)[at], None
        if given.factor_r is not None:
            factor = self._factor(given.factor_r, at)
            last = last if given.start_N is not None else last / factor
        made = (x.to(last.dtype) - last).mul_(weight).add_(last)
        return made if factor is None else made.mul_(factor)

    def _factor(self, factor_r: Tensor, at: slice) -> Tensor:
        """Of these elements: 0-dim where they lie in one run, for which it is the same and nothing is written."""
        layout = self._coder.buckets.layout
        run = max(bisect_right(layout.live, at.start, key=itemgetter(0)) - 1, 0)
        if run + 1 == len(layout.live) or at.stop <= layout.live[run + 1][0]:
            return factor_r[run]
        return spread(factor_r, layout, at.start, at.stop)


class AloneCoder(Coder):
    """Vectors of one layout on one rank. results: what becomes of them."""

    def __init__(self, group: Group, buckets: Buckets, like: Tensor, *, results: Results) -> None:
        super().__init__(buckets, like)
        self.keeps_results = results == "kept"
        self.takes_ranges = results != "taken"
        self._takes = results == "taken"
        self._group = group
        self.piece = PIECE if like.device.type == "cpu" else buckets.layout.numel
        self._places = [Place(*2 * (Served(slice(start, stop), None, 0),)) for start, stop in buckets.spans]
        self._memory: ErrorMemory | None = None
        self._waiting_N: Tensor | None = None
        """R, where the result is to have it."""
        self._gives_out: set[int] = set()
        """Buckets whose part of R is in the result."""
        self._new = Launched(self, None, None, None)
        self._witness: Tensor | None = None
        """Finite where all is that was given."""

    def new_memory(self) -> ErrorMemory:
        """Error memory for one exchanged vector, empty."""
        return ErrorMemory(self._places, Whole(self._group, self.buckets.layout.numel), self.like)

    def owns(self, memory: ErrorMemory) -> bool:
        """Was it made here, or by the reducer whose means these are?"""
        return memory.places is self._places or self._takes

    def begin(self, memory: ErrorMemory | None, draw: int) -> None:
        """Have the last result and the one that is to be made; there is memory for them when it is needed."""
        self._memory, self._witness, self._gives_out = memory, None, set()
        self._waiting_N = None if memory is None or memory.is_empty else memory.share(1)
        before, room_N = Launched(self, None, None, None), None
        if self.keeps_results and self.results:
            before, old = self._launched(self.turn), self._launched(1 - self.turn)
            room_N = old.give_room()
        self._new = Launched(self, before, room_N, self._waiting_N)
        if not self._takes:
            self.results = [self._new, before] if self.turn else [before, self._new]

    def _launched(self, turn: int) -> Launched:
        found = self.results[turn]
        assert isinstance(found, Launched)
        return found

    def form(self, k: int, given: Given) -> Tensor | None:
        """What is made now: what takes the place of x, and what is kept and no mixture."""
        return self.formed(k, given) if self._takes or (self.keeps_results and given.weight is None) else None

    def encode(self, k: int, given: Given, formed_b: Tensor | None) -> None:
        """result <- x + R, where that is made now."""
        at = slice(*self.buckets.spans[k])
        if self._waiting_N is not None:
            self._gives_out.add(k)
        if formed_b is not None:
            self._look_at(formed_b)
            made_b = formed_b if self._takes else self._new.room()[at].copy_(formed_b)
            if self._waiting_N is not None:
                made_b.add_(self._waiting_N[at])
            return
        self._new.given[k] = given
        if given.vector_N is None:
            for _, made in self._new.pieces(at.start, at.stop):
                self._look_at(made)
        else:
            for part in self.parts_of(k, given):
                self._look_at(part)

    def _look_at(self, x: Tensor) -> None:
        found = witness(x)
        self._witness = found if self._witness is None else torch.maximum(self._witness, found)

    def encode_nothing(self, k: int) -> None:
        """result <- 0: what waits goes on waiting."""
        self._new.given[k] = ABSENT

    def refuse(self, k: int, flag: int) -> None:
        """No other rank waits for it."""
        self._witness = self.like.new_full((), torch.nan)

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
        if self._witness is None:
            return torch.ones((), dtype=torch.uint8, device="cpu")
        return torch.isfinite(self._witness).to(torch.uint8)

    def keep(self) -> None:
        """R is given out, and what an exchange may begin from is made."""
        if self._memory is not None:
            self._memory.give_out(self._gives_out)
        if self.keeps_results:
            self._new.make()
        else:
            self.results = ()  # who reads it has it
        self._forget()

    def merge(self) -> None:
        """Their values."""
        last_N, new_N = self._launched(self.turn).room(), self._launched(1 - self.turn).room()
        for low, high in self.buckets.spans[self.at.start : self.at.stop]:
            last_N[low:high] = new_N[low:high]

    def undo(self, given: Sequence[Given], num_served: int, *, lost: bool) -> None:
        """Nothing was written but a result that nobody has; or, where a Reader has mixed some of it, the last one."""
        if self._new.mixed and self._memory is not None:
            self._memory.torn = "an exchange was undone while its result was read"
        self._new.given.clear()
        self._forget()

    def _forget(self) -> None:
        self._memory = self._witness = self._waiting_N = None

    def fidelity(self, memory: ErrorMemory) -> Fidelity | None:
        """All of it was carried: rho is 1 on the way back; what waits in error memory was put there since."""
        given = float(torch.linalg.vector_norm(self._launched(self.turn).values_N))
        waiting = float(torch.linalg.vector_norm(memory.residual()))
        return Fidelity(None, 1.0 if given > 0 else None, waiting / given if given > 0 else None)
