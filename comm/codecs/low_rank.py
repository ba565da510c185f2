"""PowerSGD: a matrix as the product of two thin ones, by one step of power iteration from where the last one ended.

    P <- mean_i M_i Q;   P^ <- P with orthonormal columns      M: rows x columns, Q: columns x r
    Q <- mean_i M_i^T P^;   what is applied: P^ Q^T             the next step begins from this Q

A tensor of more dimensions is a matrix of its first one by all others. Vectors, and matrices that two factors would
not make smaller, cross as they are. [Vogels et al. 2019, arXiv 1905.13727, Alg. 1 and 2]
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.comm.layout import VectorLayout

LOST = 1e-6
"""Of a column's length: where less is left of it, it is taken to be a sum of those before it."""


@dataclass(frozen=True, slots=True)
class PowerSGD:
    """rank: columns of both factors. seed: of the first Q, the same on every rank. Raises: ValueError."""

    rank: int = 2
    seed: int = 0
    name: ClassVar[str] = "powersgd"

    def __post_init__(self) -> None:
        if type(self.rank) is not int or self.rank < 1:
            raise ValueError(f"rank = {self.rank!r}: must be a whole number, at least 1")

    def over(self, layout: VectorLayout, like: Tensor) -> LowRank:
        """The factors of the matrices of this layout."""
        return LowRank(self, layout, like)

    def fingerprint(self) -> int:
        """32 bits of all of it."""
        return zlib.crc32(repr(self).encode())


@dataclass(frozen=True, slots=True)
class Matrix:
    """Elements [start, start + rows x columns) of the vector. p, q: where its factors lie among those of all."""

    start: int
    rows: int
    columns: int
    p: slice
    q: slice

    def of(self, x_N: Tensor) -> Tensor:
        """A view, rows x columns."""
        return x_N[self.start : self.start + self.rows * self.columns].view(self.rows, self.columns)


class LowRank:
    """The same for one layout, and where the next step begins: Q of all matrices, the same on every rank.

    Q can also be had, given and kept as a vector of the layout, as optimizers save what they hold: of each matrix the
    first elements, columns by r. Where that is 0 a matrix begins anew.
    """

    def __init__(self, codec: PowerSGD, layout: VectorLayout, like: Tensor) -> None:
        self._numel, self._rank, self._like = layout.numel, codec.rank, like.new_empty(0)
        self._matrices: list[Matrix] = []
        self._in_full: list[slice] = []
        p = q = 0
        for (start, stop), shape in zip(layout.live, layout.shapes or ((),) * len(layout.live), strict=True):
            rows, columns = (shape[0], (stop - start) // max(shape[0], 1)) if len(shape) > 1 else (0, 0)
            if self._rank * (rows + columns) < rows * columns:
                at_p, at_q = slice(p, p + rows * self._rank), slice(q, q + columns * self._rank)
                self._matrices.append(Matrix(start, rows, columns, at_p, at_q))
                p, q = at_p.stop, at_q.stop
            elif self._in_full and self._in_full[-1].stop == start:
                self._in_full[-1] = slice(self._in_full[-1].start, stop)
            else:
                self._in_full.append(slice(start, stop))
        self._size_p, self._size_q = p, q
        generator = torch.Generator().manual_seed(codec.seed)
        drawn = torch.randn(q, generator=generator, dtype=torch.float64, device="cpu")
        for one in self._matrices:
            orthonormal_(drawn[one.q].view(-1, self._rank))
        self._fresh_q = drawn.to(like)
        self._q = self._fresh_q

    @property
    def numel(self) -> int:
        """Values that a rank gives to both sums."""
        return max(self._size_p, 1) + self._size_q + sum(int(at.stop - at.start) for at in self._in_full)

    def first(self, z_N: Tensor) -> Tensor:
        """P of all matrices."""
        p = self._like.new_zeros(max(self._size_p, 1))
        for one in self._matrices:
            torch.mm(one.of(z_N), self._q[one.q].view(-1, self._rank), out=p[one.p].view(-1, self._rank))
        return p

    def second(self, first: Tensor, z_N: Tensor) -> tuple[Factors, Tensor]:
        """Q of all matrices, and what is no matrix."""
        p, q = first.clone(), self._like.new_empty(self._size_q)
        for one in self._matrices:
            own = orthonormal_(p[one.p].view(-1, self._rank))
            torch.mm(one.of(z_N).t(), own, out=q[one.q].view(-1, self._rank))
        return Factors(self, p), torch.cat([q, *(z_N[at] for at in self._in_full)])

    def kept(self, known: Factors) -> None:
        """The next step begins from the mean of Q, each column as long as is safe, for its direction alone counts.

        A column of zeros, as of a matrix of lower rank, begins anew.
        """
        assert known.q is not None
        self._q = known.q.clone()
        for one in self._matrices:
            q, fresh = (x[one.q].view(-1, self._rank) for x in (self._q, self._fresh_q))
            largest = q.abs().amax(0)
            torch.where(largest > 0, q / largest, fresh, out=q)

    def decode(self, p: Tensor, second: Tensor, out_N: Tensor) -> None:
        """out <- P^ Q^T, and what is no matrix. A product is rounded before it is added: the same bits everywhere."""
        out_N.zero_()
        at = self._size_q
        for part in self._in_full:
            length = part.stop - part.start
            out_N[part], at = second[at : at + length], at + length
        for one in self._matrices:
            made = one.of(out_N)
            columns = p[one.p].view(-1, self._rank).unbind(1), second[one.q].view(-1, self._rank).unbind(1)
            for p_r, q_c in zip(*columns, strict=True):
                made.add_(torch.outer(p_r, q_c))

    # as a vector of the layout

    def floats(self) -> Tensor:
        """Q, each matrix's in its first elements: float[N], new."""
        return self.part(slice(0, self._numel))

    def part(self, at: slice) -> Tensor:
        """These elements of it, new."""
        made = self._like.new_zeros(at.stop - at.start)
        for one, low, high in self._inside(at):
            made[low - at.start : high - at.start] = self._q[one.q][low - one.start : high - one.start]
        return made

    def hold(self, q_N: Tensor) -> None:
        """Begin from this one: float[N], as floats() gives it."""
        self._q = self._fresh_q.clone()
        for one, low, high in self._inside(slice(0, self._numel)):
            if bool(q_N[low:high].any()):
                self._q[one.q] = q_N[low:high]

    def follow(self, other: LowRank) -> None:
        """Begin from where the other one does, of the same layout."""
        self._q = other._q

    def described(self) -> None:
        """Nothing: it is given as a vector."""

    def _inside(self, at: slice) -> Iterator[tuple[Matrix, int, int]]:
        for one in self._matrices:
            low, high = max(one.start, at.start), min(one.start + one.columns * self._rank, at.stop)
            if low < high:
                yield one, low, high


class Factors:
    """P^ of all matrices, which all ranks know, and once it is there the mean of what crossed second."""

    def __init__(self, code: LowRank, p: Tensor) -> None:
        self._code, self._p = code, p
        self.q: Tensor | None = None

    def decide(self, second: Tensor) -> None:
        """Q of all matrices is the first part of it."""
        self.q = second[: self._code._size_q]

    def decode(self, second: Tensor, out_N: Tensor) -> None:
        """out <- what these say."""
        self._code.decode(self._p, second, out_N)


def orthonormal_(p: Tensor) -> Tensor:
    """p <- with orthonormal columns, by Gram and Schmidt, twice; one that the others make up becomes 0. Returns it."""
    columns = p.unbind(1)
    for at, column in enumerate(columns):
        column.div_(_length(column))
        for _ in range(2):
            for before in columns[:at]:
                column.sub_(before * (before * column).sum())
            left = torch.linalg.vector_norm(column)
            column.copy_(torch.where(left > LOST, column / left, torch.zeros_like(column)))
    return p


def _length(x: Tensor) -> Tensor:
    """Its norm, whatever its size; 1 for zeros."""
    largest = x.abs().amax()
    safe = torch.where(largest > 0, largest, torch.ones_like(largest))
    length: Tensor = safe * torch.linalg.vector_norm(x / safe).clamp_(min=1.0)  # x / safe has a 1, or is all 0
    return length
