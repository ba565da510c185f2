"""What one rank holds of an error memory, as a file keeps it: enough to go on from there, and to be added up to R.

    vector of the model      |a......|b...|c.......|
    vector as it is exchanged   |b...|a......|c.......|      moves say where each run stands; mostly the same vector
    worker error             |........................|      of all of it
    server error                 |...|       |....|          of the spans that this rank serves

    R = sum over ranks of (worker error / ranks + server error)

With topology node_first a rank exchanges slices of the vector, of which each box has a worker error: what moves do not
name is not its part, and boxes stand for ranks.

Errors are written, not kept sums (memory.py): c - s sgn(c), with which the next exchange begins anyway. Where sums
are kept in bfloat16 they are written, and the scales: an error has more bits than they have, and cannot be kept so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from thinwire.comm.layout import Span

Move = tuple[int, int, int]
"""Elements [start, stop) of the model's vector stand in the exchanged one from the third number on."""


@dataclass(frozen=True, slots=True, eq=False)
class Exact:
    """Kept sums bfloat16[c] and the scales that were sent of them float[b], which tell the errors.

    size_b: int64[b], elements of each block. dead: int64[d], positions whose error is 0. Both on the host.
    """

    sum_c: Tensor
    scale_b: Tensor
    size_b: Tensor
    dead: Tensor

    def error_c(self) -> Tensor:
        """c - s sgn(c), new."""
        scale_c = self.scale_b.repeat_interleave(self.size_b.to(self.scale_b.device))
        error_c = self.sum_c - torch.where(self.sum_c >= 0, scale_c, -scale_c)
        error_c[self.dead.to(error_c.device)] = 0
        return error_c

    def to(self, device: torch.device) -> Exact:
        """Sums and scales there."""
        return Exact(self.sum_c.to(device), self.scale_b.to(device), self.size_b, self.dead)

    def plain(self) -> dict[str, Tensor]:
        """For of_plain; shares memory."""
        return {"sums": self.sum_c, "scales": self.scale_b, "sizes": self.size_b, "dead": self.dead}

    @classmethod
    def of_plain(cls, what: str, plain: object) -> Self:
        """What plain() gave. Raises: ValueError where it cannot be."""
        names = ("sums", "scales", "sizes", "dead")
        if not isinstance(plain, dict) or not all(isinstance(plain.get(name), Tensor) for name in names):
            raise ValueError(f"{what} must be a dict of the tensors {list(names)}; it is damaged")
        sums, scales, sizes, dead = (plain[name] for name in names)
        types = sums.dtype, scales.dtype, sizes.dtype, dead.dtype
        if types != (torch.bfloat16, torch.float32, torch.int64, torch.int64) or any(
            x.dim() != 1 for x in plain.values()
        ):
            raise ValueError(f"{what} has tensors of {types}: it is damaged")
        if len(scales) != len(sizes) or int(sizes.sum()) != len(sums) or bool((sizes < 0).any()):
            raise ValueError(f"{what} has {len(scales)} scales of {int(sizes.sum())} in {len(sums)} elements: damaged")
        if dead.numel() and not 0 <= int(dead.min()) <= int(dead.max()) < len(sums):
            raise ValueError(f"{what} has dead elements outside of {len(sums)}: damaged")
        return cls(sums, scales, sizes, dead)


_EXACT = {"worker": "worker_sums", "server": "server_sums", "replica": "replica_sums"}
"""What is written in the place of errors. Under other names, so that who does not know it says that it is not whole."""
_KEYS = ("numel", "worker", "server", "served", "moves", "replica")


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """The errors of one rank. numel: N, elements of the model's vector; M: of the exchanged one; c: that it serves.

    served: the spans of the exchanged vector whose server errors follow one another in server_c.
    replica_r: the server error of the rank before, where it is kept too; else empty.
    workers: how many hold a worker error of an element; 0: all ranks.
    exact: of worker, server and replica, where sums are kept in few bits: what tells their errors.
    """

    numel: int
    worker_M: Tensor
    server_c: Tensor
    served: tuple[Span, ...]
    moves: tuple[Move, ...]
    replica_r: Tensor
    workers: int = 0
    exact: dict[str, Exact] | None = None

    @property
    def is_empty(self) -> bool:
        """Is every error zero?"""
        return not (bool(self.worker_M.any()) or bool(self.server_c.any()))

    def part(self, size: int) -> Tensor:
        """What this is of R, where R is of `size` ranks: float[N], new. Summed over all of them it is R."""
        part_M = self.worker_M / self.worker_M.new_full((), self.workers or size)
        at = 0
        for start, stop in self.served:
            part_M[start:stop] += self.server_c[at : at + stop - start]
            at += stop - start
        part_N = part_M.new_zeros(self.numel)
        for start, stop, to in self.moves:
            part_N[start:stop] = part_M[to : to + stop - start]
        return part_N

    def refuse_other_size(self, mine: Held) -> None:
        """mine: what the error memory holds that is to hold these. Raises: ValueError where it has another size."""
        if self.numel != mine.numel:
            raise ValueError(
                f"errors of {self.numel} elements do not fit error memory of {mine.numel}: they were saved by a model "
                "with other parameters"
            )

    def as_laid_out(self, other: Held) -> bool:
        """Do the errors of the other stand where these do, so that one can take the place of the other as it is?"""
        same = self.numel == other.numel and self.served == other.served and self.moves == other.moves
        mine, theirs = self._sizes(), other._sizes()
        return same and mine == theirs and self.workers == other.workers

    def to(self, like: Tensor) -> Held:
        """In the dtype and on the device of `like`."""
        worker_M, server_c, replica_r = (one.to(like) for one in (self.worker_M, self.server_c, self.replica_r))
        exact = None if self.exact is None else {name: one.to(like.device) for name, one in self.exact.items()}
        where = self.served, self.moves
        return Held(self.numel, worker_M, server_c, *where, replica_r, self.workers, exact)

    def plain(self) -> dict[str, Any]:
        """A dict of numbers, lists and tensors, for of_plain; shares memory."""
        errors = {"worker": self.worker_M, "server": self.server_c, "replica": self.replica_r}
        return {
            "numel": self.numel,
            "served": [list(span) for span in self.served],
            "moves": [list(move) for move in self.moves],
            **(errors if self.exact is None else {_EXACT[name]: one.plain() for name, one in self.exact.items()}),
            **({"workers": self.workers} if self.workers else {}),
        }

    @classmethod
    def of_plain(cls, what: str, plain: object) -> Self:
        """What plain() gave. what: what messages call it. Raises: ValueError saying what cannot be."""
        if not isinstance(plain, dict):
            raise ValueError(f"{what} = {type(plain).__name__}: must be a dict of {list(_KEYS)}")
        exact = None
        if all(key in plain for key in _EXACT.values()):
            exact = {name: Exact.of_plain(f"{what}[{key!r}]", plain[key]) for name, key in _EXACT.items()}
            plain = {**plain, **{name: one.error_c() for name, one in exact.items()}}
        missing = [key for key in _KEYS if key not in plain]
        if missing:
            raise ValueError(f"{what} lacks {missing}: it is not whole; load another file")
        for key in ("worker", "server", "replica"):
            one = plain[key]
            if not isinstance(one, Tensor) or not one.dtype.is_floating_point or one.dim() != 1:
                found = f"{one.dtype} {list(one.shape)}" if isinstance(one, Tensor) else type(one).__name__
                raise ValueError(f"{what}[{key!r}] = {found}: must be a floating vector")
        served, moves = _rows(what, plain, "served", 2), _rows(what, plain, "moves", 3)
        numel, worker, server = plain["numel"], plain["worker"], plain["server"]
        workers = plain.get("workers", 0)
        if type(workers) is not int or workers < 0:
            raise ValueError(f"{what}['workers'] = {workers!r}: must be a whole number, at least 0; damaged")
        inside = all(0 <= a <= b <= worker.numel() for a, b in served)
        if not inside or sum(b - a for a, b in served) != server.numel():
            raise ValueError(f"{what} has {server.numel()} server errors of {served} in {worker.numel()}: damaged")
        if type(numel) is not int or any(
            not (0 <= a <= b <= numel and to >= 0 and to + b - a <= worker.numel()) for a, b, to in moves
        ):
            raise ValueError(f"{what} has numel = {numel!r} and moves {moves} into {worker.numel()}: damaged")
        spans = tuple((a, b) for a, b in served)
        where = spans, tuple((a, b, to) for a, b, to in moves)
        return cls(numel, worker, server, *where, plain["replica"], workers, exact)

    def _sizes(self) -> list[int]:
        return [one.numel() for one in (self.worker_M, self.server_c, self.replica_r)]


def in_place(numel: int) -> tuple[Move, ...]:
    """The moves of a vector that is exchanged as it is."""
    return ((0, numel, 0),)


def nothing(like: Tensor) -> Tensor:
    """An empty vector."""
    return torch.empty(0, dtype=like.dtype, device=like.device)


def _rows(what: str, plain: dict[str, Any], key: str, width: int) -> list[list[int]]:
    rows = plain[key]
    whole = isinstance(rows, list | tuple) and all(
        isinstance(row, list | tuple) and len(row) == width and all(type(one) is int for one in row) for row in rows
    )
    if not whole:
        raise ValueError(f"{what}[{key!r}] = {rows!r}: must be a list of {width} whole numbers each")
    return [list(row) for row in rows]
