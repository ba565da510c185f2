"""How the bytes of a bucket are made and read, and what is kept of what they leave out. exchange.py says when.

    coder        file            what crosses                                       error memory
    SignCoder    sign.py         a sign a value, a scale a block; fused kernels     kept sums, written in place
    CodecCoder   any_codec.py    rows of any Codec                                  errors, swapped at the end
    LinearCoder  linear.py       two sums of a linear code                          errors, swapped at the end
    NodeCoder    node_first.py   exact inside a box, a SignCoder between boxes      that of the SignCoder, of slices
    SumCoder     in_full.py      the values, in a sum of all ranks or by node       none is needed
    AloneCoder   alone.py        nothing: there is one rank                         is given out

A new way to write vectors in fewer bytes is a Codec (docs/adding.md). Only a new order of collectives is a Coder.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from thinwire.comm.exchange.fidelity import Fidelity
from thinwire.comm.exchange.memory import ErrorMemory
from thinwire.comm.kernels.added import Added
from thinwire.comm.kernels.blocks import spread
from thinwire.comm.layout import Buckets, VectorLayout
from thinwire.comm.protocol import Pending, Reader, Result


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Elements [start, stop) of the vector, in one bucket. run: the live run that they are of, where it stands alone.

    A bucket is read from the flat vector, or where a tensor's part of it lies elsewhere from there:

        bucket   |....tensor a....|..tensor b..|bias, norm, bias|
        parts    |--- a's grad ---|- b's grad -|---- vector ----|

    A gradient that is read where backward left it need not be copied into the flat vector. That works for tensors that
    are a segment by themselves and whole bytes of signs: then no block reaches across, and no dead element lies behind
    them.

    inside: where they are in that run; None where they are all of it.
    """

    start: int
    stop: int
    run: int | None = None
    inside: slice | None = None

    def of(self, vector_N: Tensor, runs: Sequence[Tensor | None]) -> Tensor:
        """These elements: of the run's own memory where it is given, else of the vector."""
        own = runs[self.run] if self.run is not None and runs else None
        if own is None:
            return vector_N[self.start : self.stop]
        return own if self.inside is None else own[self.inside]


@dataclass(frozen=True, slots=True, eq=False)
class Given:
    """What a bucket was launched with. vector: x. weight: of x against the last result; None: x itself.

    runs: what was read in place of parts of x. start: what stood for the last result. factor: of each live run, where
    what was sent is so many times that. form: what makes x, where it is no vector; then vector and runs are those it is
    made of, if known. added: gives of such elements what kernels can form the same by in the pass that encodes it, bit
    for bit, or None. usable: False where the rows that were sent say that they are not, and every rank undoes the
    exchange.
    """

    vector_N: Tensor | None
    weight: float | None = None
    runs: Sequence[Tensor | None] = ()
    start_N: Tensor | None = None
    factor_r: Tensor | None = None
    form: Callable[[slice], Tensor] | None = None
    added: Callable[[slice], Added | None] | None = None
    usable: bool = True

    @property
    def is_empty(self) -> bool:
        """Did this rank give nothing? Then its error memory was not written."""
        return self.vector_N is None and self.form is None


ABSENT = Given(None)
"""This rank gives nothing and takes part: its rows are zeros."""
UNUSABLE = Given(None, usable=False)
"""The bucket was refused, or the exchange abandoned."""
GIVEN_AGAIN = object()
"""What is remembered of an exchange that redone() makes anew of what it was given."""


class Values:
    """A float vector, as a Result. make: gives it when it is first read, and again after forget()."""

    def __init__(self, make: Callable[[], Tensor]) -> None:
        self._make = make
        self._made_N: Tensor | None = None

    @property
    def values_N(self) -> Tensor:
        """All of it, 0 where dead."""
        if self._made_N is None:
            self._made_N = self._make()
        return self._made_N

    def forget(self) -> None:
        """What it is made from has changed, or nobody reads it any more."""
        self._made_N = None

    def decode_(self, out_N: Tensor, start: int = 0, stop: int | None = None) -> None:
        """out <- elements [start, stop) of the result."""
        out_N.copy_(self.values_N[start:stop])

    def read(self, reader: Reader, start: int = 0, stop: int | None = None) -> None:
        """Hand elements [start, stop) to the reader, as floats."""
        at = slice(start, self.values_N.numel() if stop is None else stop)
        reader.values(at, self.values_N[at])


class Coder(ABC):
    """The bytes of all buckets of vectors of one layout, on one rank. Every method is called by an Exchange.

    in_place: error memory is written while buckets are encoded, so that an error in between may tear it.
    keeps_results: results stay until the next exchange but one; else they are written over what was launched.
    keeps_last: where results are kept, are there two? Else both are one, which the next exchange writes over.
    serves_on: where a bucket is not received the others are served all the same: other ranks may have it, and the whole
    result then. Else nothing more is begun.
    sits_out: can one rank take part and give nothing (Exchange.launch_absent)?
    takes_givers: can bytes be saved where only some ranks give? givers: those of this exchange; None: all.
    takes_ranges: can some of the buckets be exchanged without the others? at: those of this exchange.
    results: two, of which results[turn] was committed last and the other one is being made.
    """

    in_place = False
    keeps_results = True
    keeps_last = True
    serves_on = False
    sits_out = True
    takes_givers = False
    takes_ranges = False
    givers: Sequence[int] | None = None

    def __init__(self, buckets: Buckets, like: Tensor) -> None:
        self.buckets = buckets
        self.at = range(len(buckets))
        self.like = like.new_empty(0)
        self.results: Sequence[Result] = ()
        self.turn = 0
        self._parts: list[list[Part]] = [[] for _ in range(len(buckets))]
        """Of each bucket, where some of the vector may lie elsewhere; made when it first does."""

    @abstractmethod
    def new_memory(self) -> ErrorMemory:
        """Error memory for one exchanged vector, empty."""

    def owns(self, memory: ErrorMemory) -> bool:
        """Was it made here?"""
        return True

    def choose(self, at: range | None) -> None:
        """The next exchange is of these buckets; None: of all. Raises: ValueError where it cannot be."""
        every = range(len(self.buckets))
        at = every if at is None else at
        if not at or at.step != 1 or at.start < 0 or at.stop > every.stop:
            raise ValueError(f"at = {at}: must be buckets one after another, of {every.stop}, at least one")
        if at != every and not self.takes_ranges:
            raise ValueError(
                f"at = {at}: must be all {every.stop} buckets with topology node_first and in means, which are whole"
            )
        self.at = at

    @abstractmethod
    def begin(self, memory: ErrorMemory | None, draw: int) -> None:
        """Have memory for an exchange. draw: its number, by which is rounded. Local."""

    def release(self) -> None:
        """Let go of wire memory until the next begin(). Local."""
        return

    def form(self, k: int, given: Given) -> Tensor | None:
        """Bucket k of what is to be encoded, where that is made before encode(); else None. Writes no error memory."""
        return self.formed(k, given)

    @abstractmethod
    def encode(self, k: int, given: Given, formed_b: Tensor | None) -> None:
        """Write what bucket k sends first. formed: as form() gave it."""

    @abstractmethod
    def encode_nothing(self, k: int) -> None:
        """Write in its place rows of zeros, which are usable. Error memory stays as it is."""

    @abstractmethod
    def refuse(self, k: int, flag: int) -> None:
        """Write in its place that there is nothing. flag: 0, or REFUSED."""

    @abstractmethod
    def send(self, k: int) -> Sequence[Pending]:
        """Start the first collectives of bucket k. Raises: PeerLost."""

    def fuse(self, k: int) -> Tensor | None:
        """What makes what this rank serves unusable, spoilt; None where nothing would come of it (pipeline.py)."""
        return None

    @abstractmethod
    def serve(self, k: int, given: Given) -> None:
        """What follows from the first collectives of bucket k."""

    def pass_on(self, k: int) -> Pending | None:
        """Start the second collective of bucket k, where there is one. Raises: PeerLost."""
        return None

    def receive(self, k: int, given: Given) -> None:
        """What follows from that. Raises: PeerLost."""
        return

    @property
    def is_whole(self) -> bool:
        """Is this exchange one of all buckets?"""
        return len(self.at) == len(self.buckets)

    @abstractmethod
    def finite(self) -> Tensor:
        """0-dim: 1 where all of the result is usable, else 0 or NaN, the same on every rank. May be collective.

        Raises: PeerLost.
        """

    @abstractmethod
    def own_flag(self, given: Sequence[Given]) -> Tensor:
        """0-dim uint8: 1 where all that this rank gave can be encoded, else 0. given: of each bucket in `at`."""

    def complete(self) -> None:
        """What else crosses with an exchange whose result is usable. Collective. Raises: PeerLost."""
        return

    def undo(self, given: Sequence[Given], num_served: int, *, lost: bool) -> None:
        """Have error memory as before. lost: a peer was lost. Local. Nothing where it was not written.

        given: of each bucket in `at` that was launched, of which the first num_served were served.
        """
        return

    @abstractmethod
    def keep(self) -> None:
        """The result counts: error memory is what it has left out. Local. turn is changed by the exchange."""

    def merge(self) -> None:
        """After keep() of some buckets: results[turn] has of them, too, what has come last. Where results are kept."""
        raise NotImplementedError

    def remember(self) -> object | None:
        """What redone() needs of an exchange that is to be undone, or GIVEN_AGAIN; None: there is nothing to count."""
        return None

    @contextmanager
    def redone(self, memory: ErrorMemory | None, given: Sequence[Given], remembered: object) -> Iterator[bool]:
        """Inside, error memory is as if the exchange had been kept. Gives whether it is."""
        yield False

    def rebuilds(self, memory: ErrorMemory) -> bool:
        """Can this rank help to estimate what a rank that is gone held? Asked where `memory` has a last result."""
        return False

    def add_rebuilt_(
        self, part_N: Tensor, memory: ErrorMemory, missing: Collection[int], holders: int, *, has_result: bool
    ) -> None:
        """part <- part + what this rank knows of it. has_result: this rank adds what all of them know."""
        return

    def left_squares(self, memory: ErrorMemory) -> Tensor:
        """As Reducer.left_squares."""
        return self.like.new_zeros(2)

    def fidelity(self, memory: ErrorMemory) -> Fidelity | None:
        """How well the last exchange carried what it was given. Collective. Raises: PeerLost."""
        return None

    def is_in_vector(self, k: int, given: Given) -> bool:
        """Does no part of bucket k lie in memory of its own?"""
        if not given.runs:
            return True
        if not self._parts[k]:
            self._parts[k] = _by_segment(*self.buckets.spans[k], self.buckets.layout)
        return not any(part.run is not None and given.runs[part.run] is not None for part in self._parts[k])

    def parts_of(self, k: int, given: Given) -> list[Tensor]:
        """Bucket k of the vector that was given, in tensors that lie end to end."""
        at = slice(*self.buckets.spans[k])
        assert given.vector_N is not None
        if self.is_in_vector(k, given):
            return [given.vector_N[at]]
        return self.cut_parts(k, given)

    def cut_parts(self, k: int, given: Given) -> list[Tensor]:
        """parts_of() where not is_in_vector()."""
        assert given.vector_N is not None
        vector_N, runs = given.vector_N, given.runs
        return [
            run
            if part.run is not None and part.inside is None and (run := runs[part.run]) is not None
            else part.of(vector_N, runs)
            for part in self._parts[k]
        ]

    def formed(self, k: int, given: Given) -> Tensor:
        """Bucket k of what is to be encoded: float[b]. Not to be modified: it may be part of what was given.

        Rounded as the fused kernels do it: without a fused multiply-add.
        """
        at = slice(*self.buckets.spans[k])
        if given.form is not None:
            return given.form(at)
        parts = self.parts_of(k, given)
        if given.weight is None:
            return parts[0] if len(parts) == 1 else torch.cat(parts)
        factor_b = None
        if given.factor_r is not None:
            factor_b = spread(given.factor_r, self.buckets.layout, at.start, at.stop)
        if given.start_N is not None:
            from_b = given.start_N[at]
        else:
            from_b = self.like.new_empty(at.stop - at.start)
            self.results[self.turn].decode_(from_b, at.start, at.stop)
            if factor_b is not None:
                from_b.div_(factor_b)
        formed_b = torch.cat([part.to(from_b.dtype) for part in parts])
        formed_b.sub_(from_b).mul_(given.weight).add_(from_b)
        return formed_b if factor_b is None else formed_b.mul_(factor_b)


def _by_segment(start: int, stop: int, layout: VectorLayout) -> list[Part]:
    """The elements [start, stop), cut around every run that stands alone: at ends of segments."""
    stops = [bound for _, bound in layout.segments if start < bound < stop]
    return _between([start, *stops, stop], layout)


def _between(bounds: Sequence[int], layout: VectorLayout) -> list[Part]:
    alone = {layout.live[i]: i for i in layout.alone()}
    stops = [stop for _, stop in layout.segments]
    found: list[Part] = []
    for low, high in pairwise(bounds):
        run = alone.get(layout.segments[bisect_right(stops, low)])
        if found and found[-1].run == run:
            low = found.pop().start
        found.append(_cut_of(low, high, run, layout))
    return found


def _cut_of(start: int, stop: int, run: int | None, layout: VectorLayout) -> Part:
    if run is None or (start, stop) == layout.live[run]:
        return Part(start, stop, run)
    first = layout.live[run][0]
    return Part(start, stop, run, slice(start - first, stop - first))
