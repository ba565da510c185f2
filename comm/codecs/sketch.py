"""A count-sketch: sums of values in few columns, of which the largest are found; those cross a second time, exact.

    S[r, h_r(i)] += s_r(i) z[i]                     rows r; h: column, pairwise independent; s: sign, 4-wise independent
    z^[i] = median_r s_r(i) S[r, h_r(i)]            right to ||z|| / sqrt(columns), in most rows
    H = the largest `second` k of |z^|;  exact = z[H];  the largest k of |exact| are applied

A sketch of a sum is the sum of sketches: so it crosses in an ordinary all-reduce.
[Ivkin et al. 2019, arXiv 1903.04488 (Sketched-SGD); Rothchild et al. 2020, arXiv 2007.07682 (FetchSGD); Charikar et al.
2002; hashes: Carter and Wegman 1981, polynomials modulo 2^61 - 1]
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.comm.layout import VectorLayout

PRIME = (1 << 61) - 1
PIECE = 1 << 18
"""Elements that are hashed, added and estimated at a time: a CPU's cache holds what is made of them."""
K_PART, SUMS_PART = 1 / 25, 6 / 100
"""Of the values, where nothing is said: all rows together and k are a tenth of them."""


@dataclass(frozen=True, slots=True)
class CountSketch:
    """k: values that are applied of each vector; None: a 25th of them. rows: an odd number of sums for each value.

    More rows tell fewer large values better; where there are more of these than columns, all estimates are noise.
    columns: sums of a row; None: all rows together have 6 for 100 values. second: of how many times k the exact values
    cross. seed: of the hashes, the same on every rank. Raises: ValueError.
    """

    k: int | None = None
    rows: int = 1
    columns: int | None = None
    second: int = 1
    seed: int = 0
    name: ClassVar[str] = "sketch"

    def __post_init__(self) -> None:
        for what, value in (("k", self.k), ("columns", self.columns), ("rows", self.rows), ("second", self.second)):
            optional = what in ("k", "columns")
            if not ((value is None and optional) or (type(value) is int and value >= 1)):
                raise ValueError(f"{what} = {value!r}: must be a whole number, at least 1" + ", or None" * optional)
        if self.rows % 2 == 0:
            raise ValueError(f"rows = {self.rows}: must be odd, for the median of so many estimates is taken")

    def sizes(self, numel: int) -> tuple[int, int]:
        """k and columns for so many values."""
        return self.k or max(1, round(numel * K_PART)), self.columns or max(1, round(numel * SUMS_PART / self.rows))

    def refuse_larger(self, numel: int) -> None:
        """Raises: ValueError where no fewer values would cross than these."""
        k, columns = self.sizes(numel)
        sums, exact = self.rows * columns, self.second * k
        if sums + exact >= numel:
            raise ValueError(
                f"a sketch of {self.rows} rows x {columns} columns and {self.second} k = {exact} exact values are "
                f"{sums + exact:,} values, of a vector of {numel:,}: must be fewer. Lower k or columns, or send it in "
                "full (SGD)"
            )

    def over(self, layout: VectorLayout, like: Tensor) -> Sketch:
        """The sketch of vectors of this layout. Raises: ValueError."""
        self.refuse_larger(layout.num_live)
        return Sketch(self, layout, like)

    def fingerprint(self) -> int:
        """32 bits of all of it."""
        return zlib.crc32(repr(self).encode())


class Sketch:
    """The same for one layout. Where an element goes in each row is made once: 4 bytes an element and row."""

    def __init__(self, codec: CountSketch, layout: VectorLayout, like: Tensor) -> None:
        self._numel = layout.numel
        self._k, self._columns = codec.sizes(layout.num_live)
        self._rows, self._most = codec.rows, min(codec.second * self._k, layout.numel)
        self._like = like.new_empty(0)
        self._place_rN = torch.empty((codec.rows, layout.numel), dtype=torch.int32, device=like.device)
        """2 x its column, and 1 more where it is taken with a minus."""
        drawn = random.Random(codec.seed)
        for row in range(codec.rows):
            column, sign = ([drawn.randrange(1, PRIME) for _ in range(degree)] for degree in (2, 4))
            for at in self._pieces():
                i = torch.arange(at.start, at.stop, dtype=torch.int64, device=like.device)
                made = hashed(i, column).remainder_(self._columns).mul_(2).add_(hashed(i, sign) & 1)
                self._place_rN[row, at] = made.to(torch.int32)

    @property
    def numel(self) -> int:
        """Values that a rank gives to both sums."""
        return self._rows * self._columns + self._most

    def first(self, z_N: Tensor) -> Tensor:
        """S, row by row: float[rows x columns]."""
        sums_rc = self._like.new_zeros((self._rows, self._columns))
        for at in self._pieces():
            z = z_N[at]
            for sums_c, place_N in zip(sums_rc, self._place_rN, strict=True):
                place = place_N[at]
                sums_c.index_add_(0, place >> 1, _signed(z, place))
        return sums_rc.view(-1)

    def second(self, first: Tensor, z_N: Tensor) -> tuple[Chosen, Tensor]:
        """The places of the largest estimates, ascending, and what z has there."""
        size_N = self._like.new_empty(self._numel)
        sums_rc = first.view(self._rows, self._columns)
        for at in self._pieces():
            found = []
            for sums_c, place_N in zip(sums_rc, self._place_rN, strict=True):
                place = place_N[at]
                found.append(_signed(sums_c.index_select(0, place >> 1), place))
            torch.abs(median(found), out=size_N[at])
        places = size_N.topk(self._most, sorted=False).indices.sort().values
        return Chosen(places, self._k), z_N[places]

    def kept(self, known: object) -> None:
        """Nothing: the next one chooses anew."""

    def _pieces(self) -> Iterator[slice]:
        for start in range(0, self._numel, PIECE):
            yield slice(start, min(start + PIECE, self._numel))


class Chosen:
    """Places whose values all ranks have, and of those the largest k, once their mean is there."""

    def __init__(self, places: Tensor, k: int) -> None:
        self._places, self._k = places, k
        self._applied = places[:0]
        """Which of them, by their number."""

    def decide(self, second: Tensor) -> None:
        """The largest k of these."""
        self._applied = second.abs().topk(min(self._k, second.numel()), sorted=False).indices

    def decode(self, second: Tensor, out_N: Tensor) -> None:
        """out <- the values of what is applied, 0 elsewhere."""
        out_N.zero_()
        out_N[self._places[self._applied]] = second[self._applied]


def hashed(i: Tensor, coefficients: list[int]) -> Tensor:
    """A polynomial of i, modulo 2^61 - 1: int64. i: int64, below 2^31. coefficients: below 2^61, the highest first.

    The product of 61 and 31 bits is taken in two: with h = a 2^30 + b it is (a i) 2^30 + b i, and 2^61 is 1.
    """
    h = torch.full_like(i, coefficients[0])
    for coefficient in coefficients[1:]:
        high = (h >> 30).mul_(i)
        h = (h & ((1 << 30) - 1)).mul_(i)
        h.add_(high >> 31).add_((high & ((1 << 31) - 1)) << 30)
        h = _modulo(_modulo(h).add_(coefficient))
    return h


def _modulo(h: Tensor) -> Tensor:
    """Of numbers below 2^63."""
    h = (h & PRIME).add_(h >> 61)
    return torch.where(h >= PRIME, h - PRIME, h)


def _signed(x: Tensor, place: Tensor) -> Tensor:
    return torch.where((place & 1).bool(), -x, x)


def median(rows: list[Tensor]) -> Tensor:
    """Of an odd number of tensors, element by element, by exchanges: the same bits on every device."""
    rows = list(rows)
    for end in range(len(rows) - 1, len(rows) // 2 - 1, -1):
        for at in range(end):
            low, high = torch.minimum(rows[at], rows[at + 1]), torch.maximum(rows[at], rows[at + 1])
            rows[at], rows[at + 1] = low, high
    return rows[len(rows) // 2]
