"""Of which memory is a bucket read? Of the flat vector, or where a tensor's part of it lies elsewhere.

    bucket   |....tensor a....|..tensor b..|bias, norm, bias|
    parts    |--- a's grad ---|- b's grad -|---- vector ----|

A gradient that is read where backward left it need not be copied into the flat vector. That works for tensors that are
a segment by themselves and whole bytes of signs: then no block reaches across, and no dead element lies behind them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from thinwire.comm.layout import VectorLayout


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Elements [start, stop) of the vector, in one bucket. run: the live run that they are of, where it stands alone.

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


def by_segment(start: int, stop: int, layout: VectorLayout) -> list[Part]:
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
        found.append(_part(low, high, run, layout))
    return found


def _part(start: int, stop: int, run: int | None, layout: VectorLayout) -> Part:
    if run is None or (start, stop) == layout.live[run]:
        return Part(start, stop, run)
    first = layout.live[run][0]
    return Part(start, stop, run, slice(start - first, stop - first))
