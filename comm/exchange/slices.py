"""A vector cut for boxes of L ranks: rank l of every box owns slice l of every bucket.

    vector    |---------------- bucket 1 ----------------|---- bucket 0 ----|
    slices    |--- 0 ---|--- 1 ---|--- 2 ---|--- 3 ---   |- 0 |- 1 |- 2 |- 3|    equal, whole bytes of signs
    of rank 1           |--- 1 ---|                            |- 1 |           lie end to end, as a vector of their own

All slices of a bucket are of one size, so that they cross in equal rows; where it does not divide the bucket, the last
ones reach beyond its end, and what is there is dead. Scales keep to segments, which end where a slice does.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.comm.exchange.held import Move
from thinwire.comm.layout import Buckets, Partition, Span, VectorLayout


@dataclass(frozen=True, slots=True)
class Cut:
    """The slices of one bucket. start, stop: of it in the vector. at: where a slice begins among those of its rank.

    size: elements of a slice.
    """

    start: int
    stop: int
    at: int
    size: int

    def of(self, number: int) -> Span:
        """[start, stop) in the vector of slice `number`, without what lies beyond the bucket."""
        low = min(self.start + number * self.size, self.stop)
        return low, min(low + self.size, self.stop)

    @property
    def own(self) -> slice:
        """Of a slice among those of its rank."""
        return slice(self.at, self.at + self.size)


class Slices:
    """The slices of all buckets of a vector, among `parts` ranks. numel: M, elements of the slices of one rank."""

    def __init__(self, buckets: Buckets, parts: int) -> None:
        self.parts = parts
        self._layout = buckets.layout
        cuts: list[Cut] = []
        at = 0
        for start, stop in buckets.spans[::-1]:
            cuts.append(Cut(start, stop, at, Partition(stop - start, parts).chunk))
            at += cuts[-1].size
        self.cuts = cuts[::-1]
        """Of each bucket, in the order of exchange."""
        self.numel = at

    def buckets(self, number: int) -> Buckets:
        """Of the slices of rank `number` of a box."""
        return Buckets(self.layout(number), tuple((cut.at, cut.at + cut.size) for cut in self.cuts))

    @property
    def bounds(self) -> list[int]:
        """Where slices begin in the vector of one rank: its buckets end there."""
        return [cut.at for cut in self.cuts]

    def layout(self, number: int) -> VectorLayout:
        """Of the slices of rank `number` of a box, end to end."""
        live: list[Span] = []
        segments: list[Span] = []
        for cut in self.cuts[::-1]:
            low, high = cut.of(number)
            live += _inside(self._layout.live, low, high, cut.at)
            segments += _inside(self._layout.segments, low, high, cut.at)
            beyond = cut.at + high - low, cut.at + cut.size
            if beyond[0] < beyond[1]:
                segments.append(beyond)
        return VectorLayout(self.numel, tuple(live), tuple(segments))

    def runs(self, number: int) -> list[int]:
        """Of each live run of layout(number), which run of the vector it is of."""
        found: list[int] = []
        for cut in self.cuts[::-1]:
            low, high = cut.of(number)
            found += [i for i, (start, stop) in enumerate(self._layout.live) if max(start, low) < min(stop, high)]
        return found

    def moves(self, number: int) -> tuple[Move, ...]:
        """Where the slices of rank `number` stand in the vector, and among themselves."""
        found = ((*cut.of(number), cut.at) for cut in self.cuts[::-1])
        return tuple((low, high, at) for low, high, at in found if low < high)

    def take(self, x_N: Tensor, number: int) -> Tensor:
        """The slices of a vector that are of rank `number`: float[M], new, 0 beyond its end."""
        slices_M = x_N.new_zeros(self.numel)
        for low, high, at in self.moves(number):
            slices_M[at : at + high - low] = x_N[low:high]
        return slices_M

    def put(self, slices_M: Tensor, number: int, numel: int) -> Tensor:
        """The inverse: float[N], new, 0 where other slices are."""
        x_N = torch.zeros(numel, dtype=slices_M.dtype, device=slices_M.device)
        for low, high, at in self.moves(number):
            x_N[low:high] = slices_M[at : at + high - low]
        return x_N


def _inside(spans: tuple[Span, ...], low: int, high: int, to: int) -> Iterator[Span]:
    """What of ascending spans lies in [low, high), counted from `to` on."""
    first = bisect_right(spans, low, key=lambda span: span[1])
    last = bisect_left(spans, high, key=lambda span: span[0])
    for start, stop in spans[first:last]:
        cut = max(start, low), min(stop, high)
        if cut[0] < cut[1]:
            yield cut[0] - low + to, cut[1] - low + to
