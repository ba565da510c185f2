"""What compression left out, kept as what was to be sent and the scale that was: the error is never written.

    e = c - s sgn(c)      c: kept sum of an element, s: scale of its block; s = 0: nothing was sent, e = c

Rank i keeps the worker's sums of the whole vector and the server's of its own chunk of every bucket. As in
error_feedback.py only R = mean_i e_i + server e has meaning; it alone is saved, and neither the number of ranks nor
the cut into buckets is in it.

Sums may be kept in bfloat16, half the memory, where everything else is float32. An exchange rounds each at random so
that it is right on average (kernels/bf16.py), and sends of what it keeps: e = c - s sgn(c) as ever. What comes from
elsewhere, R that is restored or errors that were written, stays in float32 until the next exchange begins.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from thinwire.comm.exchange.held import Exact, Held, in_place, nothing
from thinwire.comm.exchange.outliers import Outliers
from thinwire.comm.exchange.rows import BucketRows
from thinwire.comm.kernels.bf16 import Noise, narrow, noise_of
from thinwire.comm.kernels.blocks import BlockTable
from thinwire.comm.kernels.left_out import left_out_
from thinwire.comm.protocol import Errors, Group

WORKER, SERVER, RESTORED = range(3)
"""What numbers are drawn for: the two encodings of an exchange, and sums in float32 that it begins with."""


def noise_for(draw: int, what: int, rank: int = 0) -> Noise:
    """What exchange number `draw` draws. rank: of whose vector; what a chunk's server draws is the same on all."""
    return noise_of(draw, what, rank)


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """Views of a chunk, or of all chunks of a bucket: kept sums float[c] and the scales that were sent float[b]."""

    sum_c: Tensor
    scale_b: Tensor

    def sent(self, table: BlockTable) -> Tensor:
        """s sgn(c), 0 where dead: what was sent of the sum. A new tensor."""
        scale_c = torch.repeat_interleave(self.scale_b, table.starts.diff(), output_size=table.numel)
        sent_c = torch.where(self.sum_c >= 0, scale_c, -scale_c)
        sent_c[table.dead] = 0
        return sent_c

    def error(self, table: BlockTable) -> Tensor:
        """c - s sgn(c). A new tensor, in the type of the scales."""
        return self.error_(table, torch.empty_like(self.sum_c, dtype=self.scale_b.dtype))

    def error_(self, table: BlockTable, out_c: Tensor) -> Tensor:
        """out <- c - s sgn(c). out may be c. Returns it."""
        return left_out_(self.sum_c, self.scale_b, table, out_c)


class KeptSums:
    """Error memory of one exchanged vector, an ErrorMemory. Made by BucketedAllReduce.new_memory().

    worker[k]: of bucket k, what goes to the servers. server[k]: of this rank's own chunk of bucket k. replica[k]: where
    they are kept, the server's sums of the rank before this one, bit-equal to that rank's; else empty. Either side has
    memory from when it is first asked for, which an exchange does: in a warm-up, and after restore() of the worker's,
    all is zero and takes none. outliers: the largest server errors of all ranks, where they are sent.
    version: changes whenever the sums are written from outside of an exchange. torn: what was raised while they were
    being written, and where, after which nobody knows what they hold; "" where they are whole.
    is_behind: replicas are kept, and are not those of the errors now.
    sums: the type that exchanges keep sums in, float32's or bfloat16; None: that of the vector.
    """

    __slots__ = (
        "_group",
        "_has_sums",
        "_like",
        "_numel",
        "_replica",
        "_rows",
        "_server",
        "_sums",
        "_worker",
        "is_behind",
        "outliers",
        "torn",
        "version",
    )

    def __init__(self, rows: Sequence[BucketRows], group: Group, like: Tensor, sums: torch.dtype | None = None) -> None:
        self._rows = rows
        self._group = group
        self._like = like.new_empty(0)
        self._sums = sums or like.dtype
        self.version, self.torn = 0, ""
        self._has_sums = self.is_behind = False
        self._numel = rows[0].layout.numel
        self._worker: list[Kept] | None = None
        self._server: list[Kept] | None = None
        self._replica: list[Kept] | None = None
        self.outliers = Outliers(rows, group, like) if rows[0].keeps_last else None

    @property
    def is_narrow(self) -> bool:
        """Do exchanges keep sums in fewer bits than the vector has?"""
        return self._sums != self._like.dtype

    @property
    def worker(self) -> list[Kept]:
        """Of each bucket."""
        if self._worker is None:
            self._worker = self._made(self._tables_of_worker(), self._like.dtype)
        return self._worker

    @property
    def server(self) -> list[Kept]:
        """Of each bucket."""
        if self._server is None:
            self._server = self._made(self._tables_of_server(), self._like.dtype)
        return self._server

    @property
    def replica(self) -> list[Kept]:
        """Of each bucket, or of none."""
        if self._replica is None:
            self._replica = self._made(self._tables_of_replica(), self._like.dtype)
        return self._replica

    @property
    def workers(self) -> int:
        """All ranks hold a worker error of every element."""
        return self._group.size

    def take_room(self, draw: int) -> None:
        """Have memory for all, before an exchange writes sums and scales to it. draw: its number, where it rounds."""
        workers, servers, replicas = self._tables_of_worker(), self._tables_of_server(), self._tables_of_replica()
        spans = [rows.span for rows in self._rows]
        self._worker = self._with_room(self._worker, workers, spans, noise_for(draw, RESTORED, 1 + self._group.rank))
        served = noise_for(draw, RESTORED)
        self._server = self._with_room(self._server, servers, [rows.own for rows in self._rows], served)
        spans = [rows.replica.span for rows in self._rows if rows.replica is not None]
        self._replica = self._with_room(self._replica, replicas, spans, served)
        self._has_sums = True

    def _with_room(
        self, kept: list[Kept] | None, tables: Sequence[BlockTable], spans: Sequence[slice], noise: Noise
    ) -> list[Kept]:
        """The same in the type that exchanges keep; where there was none, zeros."""
        if kept is None:
            return self._made(tables, self._sums)
        if all(one.sum_c.dtype == self._sums for one in kept):
            return kept
        made = self._made(tables, self._sums)
        for one, wide, span in zip(made, kept, spans, strict=True):  # nothing was sent of them: scales are 0
            narrow(wide.sum_c, noise.at(span.start), one.sum_c)
        return made

    def _tables_of_worker(self) -> list[BlockTable]:
        return [one.table for one in self._rows]

    def _tables_of_server(self) -> list[BlockTable]:
        return [one.own_table for one in self._rows]

    def _tables_of_replica(self) -> list[BlockTable]:
        return [one.replica.table for one in self._rows if one.replica is not None]

    def _made(self, tables: Sequence[BlockTable], dtype: torch.dtype) -> list[Kept]:
        """Zeros of one piece of memory, and of another the scales."""
        sizes, blocks = [table.numel for table in tables], [table.num_blocks for table in tables]
        sums = torch.split(self._like.new_zeros(sum(sizes), dtype=dtype), sizes) if tables else ()
        scales = torch.split(self._like.new_zeros(sum(blocks)), blocks) if tables else ()
        return [Kept(*pair) for pair in zip(sums, scales, strict=True)]

    def errors(self) -> Errors:
        """The errors, in the place of the sums, of which nothing was sent: to be read and written. Local.

        Replicas do not follow what is written there, and are not kept_of() any more until restore().
        """
        self.refuse_torn()
        if self._has_sums:
            self._worker = self._as_errors(self.worker, self._tables_of_worker())
            self._server = self._as_errors(self.server, self._tables_of_server())
        self._has_sums, self._replica = False, None
        self.version, self.is_behind = self.version + 1, self._keeps_replicas
        if self.outliers is not None:
            self.outliers.forget()
        return Errors([kept.sum_c for kept in self.worker], [kept.sum_c for kept in self.server])

    def swap_errors(self, errors: Errors) -> Errors:
        """Hold these tensors in the place of errors(), which has been called and nothing sent since. Local."""
        before = Errors([kept.sum_c for kept in self.worker], [kept.sum_c for kept in self.server])
        self._worker = [Kept(x_c, kept.scale_b) for x_c, kept in zip(errors.worker, self.worker, strict=True)]
        self._server = [Kept(x_c, kept.scale_b) for x_c, kept in zip(errors.server, self.server, strict=True)]
        return before

    def _as_errors(self, kept: list[Kept], tables: Sequence[BlockTable]) -> list[Kept]:
        """In place, unless the sums have fewer bits than errors have."""
        made = kept if all(one.sum_c.dtype == self._like.dtype for one in kept) else None
        made = made or self._made(tables, self._like.dtype)
        for one, to, table in zip(kept, made, tables, strict=True):
            one.error_(table, to.sum_c)
            to.scale_b.zero_()
        return made

    def scale_(self, factor_N: Tensor) -> None:
        """R <- factor R. Local."""
        errors = self.errors()
        for rows, worker_c, server_c in zip(self._rows, errors.worker, errors.server, strict=True):
            worker_c.mul_(factor_N[rows.span])
            server_c.mul_(factor_N[rows.own])

    @property
    def _keeps_replicas(self) -> bool:
        return any(rows.replica is not None for rows in self._rows)

    def refuse_torn(self) -> None:
        """Raises: RuntimeError where something was raised while the sums were written. restore() makes them whole."""
        if self.torn:
            raise RuntimeError(
                f"the error memory of this rank is half written: {self.torn}. Make the optimizer anew and load a "
                "checkpoint, or let this process end: the others go on without it"
            )

    @property
    def worker_N(self) -> Tensor:
        """This rank's compression error, the whole vector: a new tensor."""
        return self._worker_error_(self._like.new_empty(self._numel))

    def _worker_error_(self, out_N: Tensor) -> Tensor:
        if self._worker is None:
            return out_N.zero_()
        for rows, kept in zip(self._rows, self._worker, strict=True):
            kept.error_(rows.table, out_N[rows.span])
        return out_N

    @property
    def server_c(self) -> Tensor:
        """The error of encoding what this rank serves, chunk after chunk in the order of the vector: a new tensor."""
        return torch.cat(self._server_errors()[::-1])

    def _server_errors(self) -> list[Tensor]:
        if self._server is None:
            return [self._like.new_zeros(one.own_table.numel) for one in self._rows]
        return [kept.error(rows.own_table) for rows, kept in zip(self._rows, self._server, strict=True)]

    def squares(self) -> Tensor:
        """float[2]: the squared norms of the worker error and of the server error, a bucket at a time. Local."""
        found = self._like.new_zeros(2)
        for side, (kept, tables) in enumerate(
            ((self._worker, self._tables_of_worker()), (self._server, self._tables_of_server()))
        ):
            for one, table in zip(kept or (), tables, strict=False):
                found[side] += torch.linalg.vector_norm(one.error(table)) ** 2
        return found

    @property
    def largest(self) -> float:
        """The largest |c| that is kept here now: what the rounding of an undone exchange is measured by."""
        kept = [one.sum_c for one in (*(self._worker or ()), *(self._server or ())) if one.sum_c.numel()]
        return max((float(one.abs().max()) for one in kept), default=0.0)

    def residual(self, out_N: Tensor | None = None) -> Tensor:
        """As ErrorMemory.residual, in flat order."""
        residual_N = self.share(self._group.size, (), out_N)
        self._group.start_sum_(residual_N).wait()
        return residual_N

    def share(self, holders: int, missing: Collection[int] = (), out_N: Tensor | None = None) -> Tensor:
        """As ErrorMemory.share; the server errors of missing ranks are added by those that keep them too."""
        self.refuse_torn()
        part_N = self._worker_error_(self._like.new_empty(self._numel) if out_N is None else out_N)
        part_N.div_(part_N.new_full((), holders))
        for rows, kept in zip(self._rows, self._replica or (), strict=False):
            if rows.replica is not None and rows.replica.before in missing:
                part_N[rows.replica.span] += kept.error(rows.replica.table)
        for rows, kept in zip(self._rows, self._server or (), strict=False):
            part_N[rows.own] += kept.error(rows.own_table)
        return part_N

    def kept_of(self, rank: int) -> bool:
        """Is the server error of this rank kept here?"""
        here = any(rows.replica is not None and rows.replica.before == rank for rows in self._rows)
        return rank == self._group.rank or (here and not self.is_behind)

    def restore(self, residual_N: Tensor) -> None:
        """Hold R: all of it in the server's sums, each rank its own chunks; nothing sent. Local; R is not modified.

        Exact for any number of ranks and any buckets on either side, until an exchange rounds it. What was received
        last no longer counts as the result (BucketedAllReduce.last). Raises: ValueError where R is of another length.
        """
        if residual_N.shape != (self._numel,):
            raise ValueError(
                f"residual of {tuple(residual_N.shape)} does not fit error memory of {(self._numel,)}: "
                "it was saved by a model with other parameters"
            )
        self.version, self.torn = self.version + 1, ""
        self._forget()
        if not bool(residual_N.any()):
            return
        for rows, kept in zip(self._rows, self.server, strict=True):
            kept.sum_c.copy_(residual_N[rows.own])
        for rows, kept in zip(self._rows, self.replica, strict=False):
            if rows.replica is not None:
                kept.sum_c.copy_(residual_N[rows.replica.span])

    def _forget(self) -> None:
        self._worker = self._server = self._replica = None
        self._has_sums = self.is_behind = False
        if self.outliers is not None:
            self.outliers.forget()

    def held(self) -> Held:
        """All that this rank holds, as it is: errors, not sums. Local; modifies nothing; new tensors."""
        self.refuse_torn()
        server, served = torch.cat(self._server_errors()), tuple((one.own.start, one.own.stop) for one in self._rows)
        moves, none = in_place(self._numel), nothing(self._like)
        return Held(
            self._numel, self.worker_N, server, served, moves, self._replica_errors(), none, exact=self._exact()
        )

    def _exact(self) -> dict[str, Exact] | None:
        """Sums in few bits and their scales, from which alone the next exchange is the one that would have been."""
        if not (self.is_narrow and self._has_sums):
            return None
        replica = [] if self.is_behind else self.replica
        worker = self._in_place(self.worker), self._in_place(self._tables_of_worker())
        sides = worker, (self.server, self._tables_of_server()), (replica, self._tables_of_replica()[: len(replica)])
        return {name: _exact(self._like, *side) for name, side in zip(EXACT, sides, strict=True)}

    def _in_place(self, of_bucket: Sequence[Any]) -> list[Any]:
        """What there is of each bucket, in the order in which the buckets lie in the vector."""
        starts = [rows.span.start for rows in self._rows]
        return [of_bucket[k] for k in sorted(range(len(starts)), key=starts.__getitem__)]

    def hold(self, held: Held) -> bool:
        """Hold what held() of this rank of as many ranks gave; ErrorMemory.hold. Local. Raises: ValueError.

        The errors become sums of which nothing was sent, but where sums in few bits were held and are to be here.
        What was received last no longer counts as the result.
        """
        mine = self.held()
        held.refuse_other_size(mine)
        self.version += 1
        behind = self._keeps_replicas and not held.replica_r.numel()
        if behind:  # they were when it was saved
            held = replace(held, replica_r=torch.zeros_like(mine.replica_r))
        fits = held.as_laid_out(mine)
        self._forget()
        if fits and held.exact is not None and self._take_exact(held.exact):
            self.is_behind = behind
            return True
        if fits:
            _copy(held.server_c, [kept.sum_c for kept in self.server])
            _copy(held.replica_r, [kept.sum_c for kept in self.replica])
        worker_N = held.worker_M if fits else held.part(self._group.size) * self._group.size
        for rows, kept in zip(self._rows, self.worker, strict=True):
            kept.sum_c.copy_(worker_N[rows.span])
        self.is_behind = behind
        return fits

    def _take_exact(self, exact: dict[str, Exact]) -> bool:
        """Hold these sums and scales, where they are of the same blocks and exchanges here keep such."""
        workers = self._in_place(self._tables_of_worker())
        every = workers, self._tables_of_server(), self._tables_of_replica()
        if not self.is_narrow or not all(
            exact[name].size_b.equal(_sizes(tables)) for name, tables in zip(EXACT, every, strict=True)
        ):
            return False
        made = [self._made(tables, self._sums) for tables in (self._tables_of_worker(), *every[1:])]
        for name, kept in zip(EXACT, (self._in_place(made[0]), *made[1:]), strict=True):
            _copy(exact[name].sum_c, [one.sum_c for one in kept])
            _copy(exact[name].scale_b, [one.scale_b for one in kept])
        self._worker, self._server, self._replica = made
        self._has_sums = True
        return True

    def exchanged_sums(self) -> tuple[list[Kept], list[Kept]]:
        """Copies of the worker's and the server's sums and scales: those of an exchange that is about to be undone."""
        return (
            [Kept(one.sum_c.clone(), one.scale_b.clone()) for one in self.worker],
            [Kept(one.sum_c.clone(), one.scale_b.clone()) for one in self.server],
        )

    def swap(self, sums: tuple[list[Kept], list[Kept]]) -> tuple[list[Kept], list[Kept]]:
        """Hold these from here on. Returns what was held."""
        held = self.worker, self.server
        self._worker, self._server = sums
        return held

    def _replica_errors(self) -> Tensor:
        kept = zip(self._rows, () if self.is_behind else self.replica, strict=False)
        errors = [one.error(rows.replica.table) for rows, one in kept if rows.replica is not None]
        return torch.cat([nothing(self._like), *errors])


EXACT = ("worker", "server", "replica")


def _sizes(tables: Sequence[BlockTable]) -> Tensor:
    """Elements of each block: int64[b], on the host."""
    return torch.cat([torch.zeros(0, dtype=torch.int64), *(table.on_host.starts.diff() for table in tables)])


def _exact(like: Tensor, kept: Sequence[Kept], tables: Sequence[BlockTable]) -> Exact:
    none, starts = nothing(like), [0, *accumulate(table.numel for table in tables)]
    dead = [table.on_host.dead + start for table, start in zip(tables, starts, strict=False)]
    return Exact(
        torch.cat([none.to(torch.bfloat16), *(one.sum_c for one in kept)]),
        torch.cat([none, *(one.scale_b for one in kept)]),
        _sizes(tables),
        torch.cat([torch.zeros(0, dtype=torch.int64), *dead]),
    )


def _copy(from_c: Tensor, to: Sequence[Tensor]) -> None:
    """Adjoining parts of one vector <- each its part."""
    for part, into in zip(torch.split(from_c, [one.numel() for one in to]), to, strict=True):
        into.copy_(part)
