"""What a flat vector is made of, and how it is cut: live runs, scale segments, blocks, buckets, one chunk a rank.

    vector   |tensor a......|tensor b...|bias, norm, bias...|     starts are multiples of 8: whole bytes of signs
    segments |--------------|-----------|-------------------|     a scale never spans two segments
    blocks   |----|----|----|----|------|-------------------|     runs of at most `block` values inside a segment
    chunks   |------ rank 0 ------|------ rank 1 ------|          equal, multiples of 8; a block ends where a chunk does
    buckets  |------ 2 ------|------ 1 ------|--- 0 ---|          exchanged by themselves, each in chunks of its own

The few elements between a tensor's end and the next multiple of 8 are dead: zero on the way in, zero on the way
out, in no scale, no error and no count.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from operator import itemgetter

Span = tuple[int, int]
BYTE = 8
"""Values in a byte of signs; every bound below is a multiple of it."""
DEFAULT_BLOCK = 4096
"""Values that share a scale: 4 bytes in 516, 0.8 % of the wire. Blocks of 256 would cost 12.5 %."""
DEFAULT_BUCKET = 1 << 22
"""Elements of a bucket: a row of signs of 512 kB, and enough buckets of a large model to keep wire and cores busy."""
BUCKETS_ON_GPU, MOST_ON_GPU = 8, 1 << 26
"""A GPU does its part of a bucket sooner than the host has launched it: few buckets, so that seven eighths of the wire
can still hide behind backward, and none larger than so many elements (docs/gpu.md has what each costs)."""


def default_bucket(numel: int, on_gpu: bool) -> int:
    """Elements of a bucket of a vector of `numel` where nobody has measured the network (comm/bucket_size.py does)."""
    if not on_gpu:
        return DEFAULT_BUCKET
    return min(max(round_up(-(-numel // BUCKETS_ON_GPU), BYTE), DEFAULT_BUCKET), MOST_ON_GPU)


@dataclass(frozen=True, slots=True)
class VectorLayout:
    """The layout of a flat vector of `numel` elements, the same on every rank and for any number of ranks.

    live: ascending runs of elements that carry values, each starting at a multiple of 8.
    segments: runs that cover the vector without gaps; bounds are multiples of 8.
    shapes: of the tensors that the live runs are, for codecs that write matrices; empty where nobody says.
    """

    numel: int
    live: tuple[Span, ...]
    segments: tuple[Span, ...]
    shapes: tuple[tuple[int, ...], ...] = field(default=(), compare=False)
    _alone: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        known = set(self.segments)
        object.__setattr__(self, "_alone", tuple(i for i, run in enumerate(self.live) if run in known))
        bounds = [0, *(stop for _, stop in self.segments)]
        if self.numel % BYTE or any(bound % BYTE for bound in bounds) or bounds[-1] != self.numel:
            raise ValueError(f"segments {self.segments} must cover {self.numel} elements in multiples of {BYTE}")
        if any(segment != span for segment, span in zip(self.segments, pairwise(bounds), strict=True)):
            raise ValueError(f"segments {self.segments} leave a gap or overlap")

    @classmethod
    def of(cls, sizes: Sequence[int]) -> VectorLayout:
        """Tensors of so many elements, one after another, each a segment by itself."""
        ends = [0, *accumulate(round_up(size, BYTE) for size in sizes)]
        live = tuple((start, start + size) for start, size in zip(ends, sizes, strict=False))
        return cls(ends[-1], live, tuple(pairwise(ends)))

    @classmethod
    def single(cls, num_live: int) -> VectorLayout:
        """One tensor of `num_live` elements, one segment."""
        return cls.of([num_live])

    @property
    def num_live(self) -> int:
        """Elements that carry values."""
        return sum(stop - start for start, stop in self.live)

    def alone(self) -> list[int]:
        """Which runs are a segment by themselves and end with a whole byte of signs: they may lie elsewhere."""
        return list(self._alone)

    def dead(self, start: int, stop: int) -> list[int]:
        """Positions in [start, stop) that carry no value."""
        edges = [0, *(edge for run in self.live for edge in run), self.numel]
        gaps = zip(edges[0::2], edges[1::2], strict=True)
        return [i for low, high in gaps for i in range(max(low, start), min(high, stop))]

    def blocks(self, block: int, start: int = 0, stop: int | None = None) -> list[Span]:
        """Blocks of at most `block` values inside [start, stop); a segment's last one is ragged.

        Looks at nothing outside: of a large vector each bucket and each rank's chunk of it is asked for.
        """
        stop = self.numel if stop is None else stop
        if start >= stop:
            return []
        found = []
        for low, high in self.segments[bisect_right(self.segments, start, key=itemgetter(1)) :]:
            if low >= stop:
                break
            first = max(start - low, 0) // block * block
            found += [
                (max(at, start), min(at + block, high, stop)) for at in range(low + first, min(high, stop), block)
            ]
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


@dataclass(frozen=True, slots=True)
class Bucket:
    """Consecutive elements [start, stop) that cross the wire by themselves.

    index: its place in the order of exchange. runs: which of the layout's live runs (tensors) have elements in it.
    """

    index: int
    start: int
    stop: int
    runs: range

    def chunk(self, rank: int, world_size: int) -> Span:
        """[start, stop) of the elements that a rank serves, counted from the start of the vector."""
        start, stop = Partition(self.stop - self.start, world_size).bounds(rank)
        return self.start + start, self.start + stop


@dataclass(frozen=True, slots=True)
class Buckets:
    """A vector cut into buckets, numbered from its end: backward makes the gradients of the last tensors first.

    A tensor may lie in several buckets. Bounds are multiples of 8.
    """

    layout: VectorLayout
    spans: tuple[Span, ...]

    def __post_init__(self) -> None:
        bounds = [self.layout.numel, *(start for start, _ in self.spans)]
        if any(bound % BYTE for bound in bounds) or bounds[-1] != 0 or not self.spans:
            raise ValueError(f"buckets {self.spans} must cover {self.layout.numel} elements in multiples of {BYTE}")
        if any(
            span != (low, high) or low >= high for span, (high, low) in zip(self.spans, pairwise(bounds), strict=True)
        ):
            raise ValueError(f"buckets {self.spans} must follow one another from the end of the vector to its start")

    @classmethod
    def cut(
        cls, layout: VectorLayout, target: int = DEFAULT_BUCKET, cuts: Iterable[int] = (), unit: int = BYTE
    ) -> Buckets:
        """Buckets of at most `target` elements (rounded up to whole units), as equal as can be between two cuts.

        cuts: positions that no bucket may reach across, such as the ends of parameter groups; multiples of 8. unit: a
        multiple of 8; all buckets but the last between two cuts are multiples of it.
        Raises: ValueError naming a target below 1 or a cut that is not inside the vector.
        """
        if target < 1:
            raise ValueError(f"target = {target}: a bucket has at least one element")
        inner = sorted(set(cuts) - {0, layout.numel})
        if any(cut % BYTE or not 0 < cut < layout.numel for cut in inner):
            raise ValueError(f"cuts {inner} must be multiples of {BYTE} between 0 and {layout.numel}")
        spans = []
        for low, high in pairwise([0, *inner, layout.numel]):
            num_buckets = -(-(high - low) // round_up(target, unit))
            size = round_up(-(-(high - low) // num_buckets), unit)
            spans += [(max(low, stop - size), stop) for stop in range(high, low, -size)][::-1]
        return cls(layout, tuple(spans[::-1]))

    def inside(self, start: int, stop: int) -> range:
        """The buckets that [start, stop) is made of. Raises: ValueError where one reaches across a bound."""
        at = [k for k, (low, high) in enumerate(self.spans) if start <= low and high <= stop]
        if not at or (self.spans[at[-1]][0], self.spans[at[0]][1]) != (start, stop):
            raise ValueError(f"[{start}, {stop}) is not made of whole buckets of {self.spans}")
        return range(at[0], at[-1] + 1)

    def __len__(self) -> int:
        return len(self.spans)

    def __getitem__(self, index: int) -> Bucket:
        start, stop = self.spans[index]
        at = [i for i, (low, high) in enumerate(self.layout.live) if low < stop and start < high]
        return Bucket(index, start, stop, range(at[0], at[-1] + 1) if at else range(0))

    def __iter__(self) -> Iterator[Bucket]:
        return (self[index] for index in range(len(self)))

    def fingerprint(self) -> int:
        """32 bits that differ when two cuts do."""
        return zlib.crc32(repr(self.spans).encode())


def refuse_block(block: object) -> None:
    """Raises: ValueError for what is no length of runs that share something: a positive multiple of BYTE."""
    if type(block) is not int or block < BYTE or block % BYTE:
        raise ValueError(f"block = {block!r}: must be a positive multiple of {BYTE}")


def round_up(value: int, multiple: int) -> int:
    """The least multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple
