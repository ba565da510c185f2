"""What a flat vector is made of, and how it is cut: live runs, scale segments, blocks, one chunk a rank.

    vector   |tensor a......|tensor b...|bias, norm, bias...|     starts are multiples of 8: whole bytes of signs
    segments |--------------|-----------|-------------------|     a scale never spans two segments
    blocks   |----|----|----|----|------|-------------------|     runs of at most `block` values inside a segment
    chunks   |------ rank 0 ------|------ rank 1 ------|          equal, multiples of 8; a block ends where a chunk does

The few elements between a tensor's end and the next multiple of 8 are dead: zero on the way in, zero on the way
out, in no scale, no error and no count.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from itertools import pairwise

Span = tuple[int, int]
BYTE = 8
"""Values in a byte of signs; every bound below is a multiple of it."""
DEFAULT_BLOCK = 4096
"""Values that share a scale: 4 bytes in 516, 0.8 % of the wire. Blocks of 256 would cost 12.5 %."""


@dataclass(frozen=True, slots=True)
class VectorLayout:
    """The layout of a flat vector of `numel` elements, the same on every rank and for any number of ranks.

    live: ascending runs of elements that carry values, each starting at a multiple of 8.
    segments: runs that cover the vector without gaps; bounds are multiples of 8.
    """

    numel: int
    live: tuple[Span, ...]
    segments: tuple[Span, ...]

    def __post_init__(self) -> None:
        bounds = [0, *(stop for _, stop in self.segments)]
        if self.numel % BYTE or any(bound % BYTE for bound in bounds) or bounds[-1] != self.numel:
            raise ValueError(f"segments {self.segments} must cover {self.numel} elements in multiples of {BYTE}")
        if any(segment != span for segment, span in zip(self.segments, pairwise(bounds), strict=True)):
            raise ValueError(f"segments {self.segments} leave a gap or overlap")

    @classmethod
    def single(cls, num_live: int) -> VectorLayout:
        """One tensor of `num_live` elements, one segment."""
        numel = round_up(num_live, BYTE)
        return cls(numel, ((0, num_live),), ((0, numel),))

    @property
    def num_live(self) -> int:
        """Elements that carry values."""
        return sum(stop - start for start, stop in self.live)

    def dead(self, start: int, stop: int) -> list[int]:
        """Positions in [start, stop) that carry no value."""
        edges = [0, *(edge for run in self.live for edge in run), self.numel]
        gaps = zip(edges[0::2], edges[1::2], strict=True)
        return [i for low, high in gaps for i in range(max(low, start), min(high, stop))]

    def blocks(self, block: int, start: int = 0, stop: int | None = None) -> list[Span]:
        """Blocks of at most `block` values inside [start, stop); a segment's last one is ragged."""
        stop = self.numel if stop is None else stop
        found = []
        for low, high in self.segments:
            for at in range(low, high, block):
                cut = max(at, start), min(at + block, high, stop)
                if cut[0] < cut[1]:
                    found.append(cut)
        return found

    def fingerprint(self) -> int:
        """32 bits that differ when two layouts do."""
        return zlib.crc32(repr((self.numel, self.live, self.segments)).encode())


@dataclass(frozen=True, slots=True)
class Partition:
    """Which rank serves which elements: equal chunks of whole bytes, the last ones short or empty."""

    numel: int
    world_size: int

    @property
    def chunk(self) -> int:
        """Elements in a full chunk, a multiple of 8."""
        return round_up(-(-self.numel // self.world_size), BYTE)

    def bounds(self, rank: int) -> Span:
        """[start, stop) of a rank's chunk."""
        return min(rank * self.chunk, self.numel), min((rank + 1) * self.chunk, self.numel)


def round_up(value: int, multiple: int) -> int:
    """The least multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple
