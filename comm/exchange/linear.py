"""Codes that are linear in the vector: two sums over all ranks, and nobody serves.

    z_i   <- x_i + d_i + n E_i          E_i: of what this rank would serve, as restore() leaves R there
    first    a = mean_i A z_i           A: what all know before, as a sketch, or the last factor
    second   b = mean_i B z_i           B: what follows from a, alike on every rank, as chosen places, or a factor
    result   D b                        D: what follows from a and b
    keep     d_i <- z_i - D B z_i,  E_i <- 0          D B mean_i z_i + mean_i d_i' = mean_i x_i + R

What is left out of a rank's own is by its own B z_i, so that no rank's error memory drifts from the others'. The vector
is one bucket: a code that chooses among its values looks at all. Sums are ordinary all-reduces, so that a rank sends as
much among many as among few. What A, B and D are a LinearCodec says (comm/codecs/sketch.py, low_rank.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from thinwire.comm.exchange.coder import Coder, Given, Values
from thinwire.comm.exchange.memory import ErrorMemory, Errors, Place, Served, Whole
from thinwire.comm.kernels.peak import witness
from thinwire.comm.layout import Buckets
from thinwire.comm.protocol import Group, Known, LinearCodec, Pending
from thinwire.comm.signals import deferred


class LinearCoder(Coder):
    """Two sums of vectors of one layout, over a group and its second communicator, or the group itself.

    cuts: positions where what is sent is weighted otherwise, which one bucket cannot be.
    Beside the error memory, 4 + 4 / ranks bytes an element, it takes 4 for what is left out and 4 for a result.
    """

    def __init__(
        self,
        group: Group,
        second: Group,
        buckets: Buckets,
        codec: LinearCodec,
        like: Tensor,
        cuts: Sequence[int] = (),
    ) -> None:
        super().__init__(buckets, like)
        self._group, self._second, self._codec, self._cuts = group, second, codec, cuts
        self.sums = codec.over(buckets.layout, like)
        numel = buckets.layout.numel
        self._own = slice(*buckets[0].chunk(group.rank, group.size))
        whole, own = Served(slice(0, numel), None, group.rank), Served(self._own, None, group.rank)
        self._places = [Place(whole, own)]
        self._z_N: Tensor | None = None
        self._zero_c: Tensor | None = None
        self._memory: ErrorMemory | None = None
        self._gives = False
        self._flag = self._first = self._second_own = self._second_sum = like.new_empty(0)
        self._known: Known | None = None
        self._said: list[tuple[Known, Tensor] | None] = [None, None]
        self._decoded = [Values(partial(self._decode, turn)) for turn in (0, 1)]
        self.results = self._decoded

    def new_memory(self) -> ErrorMemory:
        """Error memory for one exchanged vector, empty."""
        return ErrorMemory(self._places, Whole(self._group, self.buckets.layout.numel), self.like)

    def owns(self, memory: ErrorMemory) -> bool:
        """Was it made here?"""
        return memory.places is self._places

    def begin(self, memory: ErrorMemory | None, draw: int) -> None:
        """Have memory for what is sent."""
        if self._z_N is None:
            self._z_N = self.like.new_empty(self.buckets.layout.numel)
        self._memory, self._known, self._gives = memory, None, False

    def form(self, k: int, given: Given) -> Tensor | None:
        """All of what is to be encoded. Raises: ValueError where parts of it would have weights of their own."""
        if given.weight is not None and self._cuts:
            raise ValueError(
                f"codec {self._codec.name} takes the whole vector at once, and parameter groups are to be mixed by "
                "weights of their own here: use OneBitSGD, or one parameter group"
            )
        return self.formed(k, given)

    def encode(self, k: int, given: Given, formed_b: Tensor | None) -> None:
        """What crosses first of what is given and what waits."""
        assert formed_b is not None
        z_N = self._taken()
        if self._memory is None:
            z_N.copy_(formed_b)
        else:
            errors = self._memory.kept_errors()
            torch.add(formed_b, errors.worker[0], out=z_N)
            z_N[self._own].add_(errors.server[0], alpha=self._group.size)
        self._gives = True
        self._write(self.sums.first(z_N), torch.isfinite(witness(z_N)))

    def encode_nothing(self, k: int) -> None:
        """Zeros; what waits goes on waiting."""
        self._write(self.sums.first(self._taken().zero_()), self.like.new_ones(()))

    def refuse(self, k: int, flag: int) -> None:
        """NaN."""
        first = self.sums.first(self._taken().zero_())
        self._write(first.fill_(torch.nan), self.like.new_zeros(()))

    def _write(self, first: Tensor, finite: Tensor) -> None:
        self._first, self._flag = first, finite.bool() & torch.isfinite(first).all()

    def send(self, k: int) -> Sequence[Pending]:
        """The first sum."""
        return (self._group.start_sum_(self._first),)

    def serve(self, k: int, given: Given) -> None:
        """What follows from the first sum, and what crosses second of this rank's own."""
        self._first.div_(self._group.size)
        self._known, self._second_own = self.sums.second(self._first, self._taken())
        self._second_sum = self._second_own.clone()

    def pass_on(self, k: int) -> Pending | None:
        """The second sum."""
        return self._second.start_sum_(self._second_sum)

    def finite(self) -> Tensor:
        """Are both means?"""
        return torch.isfinite(self._first).all() & torch.isfinite(self._second_sum).all()

    def own_flag(self, given: Sequence[Given]) -> Tensor:
        """Is all that this rank gave, and what it wrote of it?"""
        return self._flag.to(torch.uint8)

    def complete(self) -> None:
        """The result is what all know, and the mean of what crossed second. Local."""
        assert self._known is not None
        mean = self._second_sum.div_(self._group.size)
        self._known.decide(mean)
        self._said[1 - self.turn] = self._known, mean
        self._decoded[1 - self.turn].forget()

    def keep(self) -> None:
        """What was left out takes the place of what waited."""
        assert self._known is not None
        self.sums.kept(self._known)
        self._decoded[self.turn].forget()  # nobody reads it any more: its floats are not kept
        if self._memory is not None and self._gives:
            self._leave(self._taken())
            self._exchange_errors(self._memory)
            assert self._zero_c is not None
            self._zero_c.zero_()  # of what was served before, as after restore(), all has been taken into z
        self._memory = self._known = None

    def _leave(self, z_N: Tensor) -> None:
        """z <- z - what its own second values say."""
        assert self._known is not None
        said_N = torch.empty_like(z_N)
        self._known.decode(self._second_own, said_N)
        z_N.sub_(said_N)

    def remember(self) -> object | None:
        """What was known; what was given is still here."""
        return self._known

    @contextmanager
    def redone(self, memory: ErrorMemory | None, given: Sequence[Given], remembered: object) -> Iterator[bool]:
        """Inside, what was left out is the error memory. What only the result chooses has been left out as a whole."""
        if memory is None or given[0].is_empty:
            yield True
            return
        counts, z_N = False, self._taken()
        self._known, known = remembered, self._known  # type: ignore[assignment]
        sent_N = z_N.clone()
        try:
            with deferred(to_the_end=True):
                self._leave(z_N)
                self._exchange_errors(memory)
                counts = True
            yield True
        finally:  # also where a peer is lost inside: the next attempt begins from the same
            self._known = known
            if counts:
                self._exchange_errors(memory)
            self._z_N = sent_N

    def undo(self, given: Sequence[Given], num_served: int, *, lost: bool) -> None:
        """Nothing was written but a result that nobody has."""
        self._memory = self._known = None
        self._decoded[1 - self.turn].forget()

    def _taken(self) -> Tensor:
        assert self._z_N is not None
        return self._z_N

    def _exchange_errors(self, memory: ErrorMemory) -> None:
        """What was left out and the errors take each other's place; of what is served nothing is."""
        if self._zero_c is None:
            self._zero_c = self.like.new_zeros(self._own.stop - self._own.start)
        before = memory.swap_errors(Errors([self._taken()], [self._zero_c]), self.at)
        self._z_N, self._zero_c = before.worker[0], before.server[0]

    def _decode(self, turn: int) -> Tensor:
        said = self._said[turn]
        assert said is not None
        out_N = self.like.new_empty(self.buckets.layout.numel)
        said[0].decode(said[1], out_N)
        return out_N
