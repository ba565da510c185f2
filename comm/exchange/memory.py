"""What compression left out, kept for the next step, and carried across any change of the number of ranks.

Rank i keeps the worker error d_i of what it gives and the server error E_i of what it serves. Only

    R = mean_i d_i + concat_i E_i

has meaning: a step gives out + R' = mean_i x_i + R, however R is split over d and E. It alone is saved, and neither the
number of ranks nor the cut into buckets is in it: residual() and restore() serve saving, loss, shrink, grow and cold
start alike. Both together also change the live run (worker errors move to the server errors), so the run that saved and
goes on is bit-equal to one that loads what it saved.

A coder of signs does not keep the error of an element, but the sum that was to be sent and the scale that was:

    e = c - s sgn(c)      c: kept sum of an element, s: scale of its block; s = 0: nothing was sent, e = c

Sums may be kept in bfloat16, half the memory, where everything else is float32. An exchange rounds each at random so
that it is right on average (kernels/bf16.py), and sends of what it keeps: e = c - s sgn(c) as ever. What comes from
elsewhere, R that is restored or errors that were written, stays in float32 until the next exchange begins.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from thinwire.comm.exchange.held import Exact, Held, Move, in_place, nothing
from thinwire.comm.exchange.outliers import Outliers
from thinwire.comm.kernels.bf16 import Noise, noise_of
from thinwire.comm.kernels.blocks import BlockTable
from thinwire.comm.kernels.choose import narrow
from thinwire.comm.kernels.kept import left_out_
from thinwire.comm.protocol import Group

WORKER, SERVER, RESTORED = range(3)
"""What numbers are drawn for: the two encodings of an exchange, and sums in float32 that it begins with."""


def noise_for(draw: int, what: int, rank: int = 0) -> Noise:
    """What exchange number `draw` draws. rank: of whose vector; what a chunk's server draws is the same on all."""
    return noise_of(draw, what, rank)


@dataclass(frozen=True, slots=True, eq=False)
class Errors:
    """What a rank holds of an error memory, written in place: of each bucket the worker and the server error."""

    worker: Sequence[Tensor]
    server: Sequence[Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Served:
    """Elements [at) of the vector whose server error is kept. table: their blocks, where sums are. rank: who serves."""

    at: slice
    table: BlockTable | None
    rank: int

    @property
    def numel(self) -> int:
        """Elements."""
        return int(self.at.stop - self.at.start)


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """One bucket in the error memory of one rank. worker, own: what it gives and serves.

    replica: what the rank before it serves, where its server error is kept here too.
    """

    worker: Served
    own: Served
    replica: Served | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """Views of a chunk, or of all chunks of a bucket: kept sums float[c] and the scales that were sent float[b].

    Without blocks (no table) sums are errors.
    """

    sum_c: Tensor
    scale_b: Tensor
    table: BlockTable | None

    def sent(self) -> Tensor:
        """s sgn(c), 0 where dead: what was sent of the sum. A new tensor."""
        assert self.table is not None
        scale_c = torch.repeat_interleave(self.scale_b, self.table.starts.diff(), output_size=self.table.numel)
        sent_c = torch.where(self.sum_c >= 0, scale_c, -scale_c)
        sent_c[self.table.dead] = 0
        return sent_c

    def error(self) -> Tensor:
        """c - s sgn(c). A new tensor, in the type of the scales."""
        return self.error_(torch.empty_like(self.sum_c, dtype=self.scale_b.dtype))

    def error_(self, out_c: Tensor) -> Tensor:
        """out <- c - s sgn(c). out may be c. Returns it."""
        if self.table is None:
            return out_c if out_c is self.sum_c else out_c.copy_(self.sum_c)
        return left_out_(self.sum_c, self.scale_b, self.table, out_c)

    def copy(self) -> Kept:
        """The same in memory of its own."""
        return Kept(self.sum_c.clone(), self.scale_b.clone(), self.table)


class Where(Protocol):
    """Which elements of the model's vector, of N, the exchanged one of this rank has, of M; and who holds the rest.

    group: all ranks. workers: how many hold a worker error of an element. moves: as in Held.
    """

    numel: int
    group: Group
    workers: int
    moves: tuple[Move, ...]

    def take(self, x_N: Tensor) -> Tensor:
        """What of x is exchanged by this rank, float[M]: x itself, or new."""

    def put(self, x_M: Tensor, out_N: Tensor | None) -> Tensor:
        """out <- x in its place, 0 elsewhere; None: x itself where it is all, else new."""

    def holders(self, holders: int, missing: Collection[int]) -> int:
        """Of so many ranks that are left, how many hold a worker error of the elements of this one."""


class Whole:
    """All of the vector, on all ranks of a group."""

    def __init__(self, group: Group, numel: int) -> None:
        self.group, self.numel, self.workers = group, numel, group.size
        self.moves = in_place(numel)

    def take(self, x_N: Tensor) -> Tensor:
        """x itself."""
        return x_N

    def put(self, x_M: Tensor, out_N: Tensor | None) -> Tensor:
        """x itself, or a copy of it in out."""
        return x_M if out_N is None or out_N is x_M else out_N.copy_(x_M)

    def holders(self, holders: int, missing: Collection[int]) -> int:
        """All of them."""
        return holders


class ErrorMemory:
    """The error memory of one exchanged vector. Made by new_memory() of a reducer.

    Each side has memory from when it is first asked for, which an exchange does: in a warm-up, after restore() of the
    worker's, and of one rank that has given all out, all is zero and takes none.
    version: changes whenever it is written from outside of an exchange. torn: what was raised while it was being
    written, and where, after which nobody knows what it holds; "" where it is whole.
    sums: the type that exchanges keep sums in, float32's or bfloat16; None: that of the vector. outliers: the largest
    server errors of all ranks, where they are sent.
    """

    def __init__(
        self,
        places: Sequence[Place],
        where: Where,
        like: Tensor,
        *,
        sums: torch.dtype | None = None,
        outliers: Outliers | None = None,
    ) -> None:
        self._places, self._where = places, where
        self._like = like.new_empty(0)
        self._sums = sums or like.dtype
        self.version, self.torn = 0, ""
        self._has_sums = self._replica_is_behind = False
        self._numel = max(place.worker.at.stop for place in places)
        self._worker: list[Kept] | None = None
        self._server: list[Kept] | None = None
        self._replica: list[Kept] | None = None
        self.outliers = outliers
        self._rest_N: Tensor | None = None
        """Of R what this rank has loaded and other ranks own, until restore(); None: nothing."""

    @property
    def places(self) -> Sequence[Place]:
        """Of each bucket, where it is kept."""
        return self._places

    @property
    def is_narrow(self) -> bool:
        """Do exchanges keep sums in fewer bits than the vector has?"""
        return self._sums != self._like.dtype

    @property
    def is_behind(self) -> bool:
        """Is something here that other ranks hold now, or not here that should be? restore() of residual() mends it.

        Replicas of server errors that are not those of the errors now, or R of other ranks that was loaded here. The
        former is the same on every rank.
        """
        return self._replica_is_behind or self._rest_N is not None

    @property
    def workers(self) -> int:
        """How many hold a worker error of an element: the ranks, or with topology node_first the boxes."""
        return self._where.workers

    @property
    def is_empty(self) -> bool:
        """Has nothing been kept since the beginning, or since the last restore() of zeros? Else it may be zero, too."""
        return self._worker is None and self._server is None and self._rest_N is None

    @property
    def worker(self) -> list[Kept]:
        """What goes to the servers, of each bucket."""
        if self._worker is None:
            self._worker = self._made(self._of_worker(), self._like.dtype)
        return self._worker

    @property
    def server(self) -> list[Kept]:
        """What this rank serves, of each bucket."""
        if self._server is None:
            self._server = self._made(self._of_own(), self._like.dtype)
        return self._server

    @property
    def replica(self) -> list[Kept]:
        """What the rank before this one serves, bit-equal to that rank's: of each bucket, or of none."""
        if self._replica is None:
            self._replica = self._made(self._of_replica(), self._like.dtype)
        return self._replica

    def take_room(self, draw: int) -> None:
        """Have memory for sums, before an exchange writes sums and scales to it. draw: its number, where it rounds."""
        rank = self._where.group.rank
        self._worker = self._with_room(self._worker, self._of_worker(), noise_for(draw, RESTORED, 1 + rank))
        self._server = self._with_room(self._server, self._of_own(), noise_for(draw, RESTORED))
        self._replica = self._with_room(self._replica, self._of_replica(), noise_for(draw, RESTORED))
        self._has_sums = True

    def _with_room(self, kept: list[Kept] | None, of: Sequence[Served], noise: Noise) -> list[Kept]:
        """The same in the type that exchanges keep; where there was none, zeros."""
        if kept is None:
            return self._made(of, self._sums)
        if all(one.sum_c.dtype == self._sums for one in kept):
            return kept
        made = self._made(of, self._sums)
        for one, wide, served in zip(made, kept, of, strict=True):  # nothing was sent of them: scales are 0
            narrow(wide.sum_c, noise.at(served.at.start), one.sum_c)
        return made

    def _of_worker(self) -> list[Served]:
        return [place.worker for place in self._places]

    def _of_own(self) -> list[Served]:
        return [place.own for place in self._places]

    def _of_replica(self) -> list[Served]:
        return [place.replica for place in self._places if place.replica is not None]

    def _made(self, of: Sequence[Served], dtype: torch.dtype) -> list[Kept]:
        """Zeros of one piece of memory, and of another the scales."""
        sizes = [served.numel for served in of]
        blocks = [0 if served.table is None else served.table.num_blocks for served in of]
        sums = torch.split(self._like.new_zeros(sum(sizes), dtype=dtype), sizes) if of else ()
        scales = torch.split(self._like.new_zeros(sum(blocks)), blocks) if of else ()
        return [Kept(sum_c, scale_b, one.table) for sum_c, scale_b, one in zip(sums, scales, of, strict=True)]

    def errors(self) -> Errors:
        """The errors, in the place of the sums, of which nothing was sent: to be read and written. Local.

        Replicas do not follow what is written there, and are not kept_of() any more until restore().
        """
        self.refuse_torn()
        self._refuse_rest()
        if self._has_sums:
            self._worker, self._server = self._as_errors(self.worker), self._as_errors(self.server)
        self._has_sums, self._replica = False, None
        self.version += 1
        self._replica_is_behind = any(place.replica is not None for place in self._places)
        self._forget_outliers()
        return self.kept_errors()

    def kept_errors(self) -> Errors:
        """The same where a coder that keeps errors writes them at the end of its exchange. Local."""
        return Errors([kept.sum_c for kept in self.worker], [kept.sum_c for kept in self.server])

    def swap_errors(self, errors: Errors, at: range) -> Errors:
        """Hold these tensors, of the shapes of errors(), which was called and nothing sent since. Returns those.

        at: the buckets that they are of.
        """
        before = self.kept_errors()
        for side, given in ((self.worker, errors.worker), (self.server, errors.server)):
            for k, x_c in zip(at, given, strict=True):
                side[k] = replace(side[k], sum_c=x_c)
        return Errors(*(held[at.start : at.stop] for held in (before.worker, before.server)))

    def add_(self, x_N: Tensor) -> None:
        """Keep x, which this rank does not send: its worker error <- that + x. Local. x: float[N], 0 where dead.

        R grows by its share of it; it leaves with what is sent later. One rank may do so alone: server errors, replicas
        of them, version and the last result stay. Raises: RuntimeError with topology node_first, where boxes have
        worker errors and ranks have none.
        """
        if self._where.workers != self._where.group.size:
            raise RuntimeError("errors of a box's mean, with topology node_first: one rank cannot add to them")
        self.refuse_torn()
        if self._has_sums:
            self._worker = self._as_errors(self.worker)
        for place, kept in zip(self._places, self.worker, strict=True):
            kept.sum_c.add_(x_N[place.worker.at])

    def give_out(self, buckets: Collection[int]) -> None:
        """Hold nothing of these: their part of R is in the result. Local; a part of an exchange."""
        if len(buckets) == len(self._places):
            self._worker = self._server = None
        for k in buckets if self._worker is not None or self._server is not None else ():
            self.worker[k].sum_c.zero_()
            self.server[k].sum_c.zero_()

    def _as_errors(self, kept: list[Kept]) -> list[Kept]:
        """In place, unless the sums have fewer bits than errors have."""
        made = kept
        if any(one.sum_c.dtype != self._like.dtype for one in kept):
            made = [replace(one, sum_c=torch.empty_like(one.sum_c, dtype=self._like.dtype)) for one in kept]
        for one, to in zip(kept, made, strict=True):
            one.error_(to.sum_c)
            one.scale_b.zero_()
        return made

    def scale_(self, factor_N: Tensor) -> None:
        """R <- factor R, an element each, as where the unit of what is exchanged changes. Local. factor: float[N]."""
        if self.is_empty:
            return
        rest_N, self._rest_N = self._rest_N, None
        errors, factor_M = self.errors(), self._where.take(factor_N)
        for place, worker_c, server_c in zip(self._places, errors.worker, errors.server, strict=True):
            worker_c.mul_(factor_M[place.worker.at])
            server_c.mul_(factor_M[place.own.at])
        self._rest_N = None if rest_N is None else rest_N.mul_(factor_N)

    def refuse_torn(self) -> None:
        """Raises: RuntimeError where something was raised while the sums were written. restore() makes them whole."""
        if self.torn:
            raise RuntimeError(
                f"the error memory of this rank is half written: {self.torn}. Make the optimizer anew and load a "
                "checkpoint, or let this process end: the others go on without it"
            )

    def _refuse_rest(self) -> None:
        if self._rest_N is not None:
            raise RuntimeError("error memory of other ranks was loaded here: restore(residual()) first")

    @property
    def worker_N(self) -> Tensor:
        """This rank's compression error, the whole vector, 0 where others own it: a new tensor."""
        return self._where.put(self._worker_error_(self._like.new_empty(self._numel)), None)

    def _worker_error_(self, out_M: Tensor) -> Tensor:
        if self._worker is None:
            return out_M.zero_()
        for place, kept in zip(self._places, self._worker, strict=True):
            kept.error_(out_M[place.worker.at])
        return out_M

    @property
    def server_c(self) -> Tensor:
        """The error of encoding what this rank serves, chunk after chunk in the order of the vector: a new tensor."""
        return torch.cat(self._server_errors()[::-1])

    def _server_errors(self) -> list[Tensor]:
        if self._server is None:
            return [self._like.new_zeros(place.own.numel) for place in self._places]
        return [kept.error() for kept in self._server]

    def squares(self) -> Tensor:
        """float[2]: the squared norms of the worker error and of the server error, a bucket at a time. Local."""
        found = self._like.new_zeros(2)
        for side, kept in enumerate((self._worker, self._server)):
            for one in kept or ():
                found[side] += torch.linalg.vector_norm(one.error()) ** 2
        return found

    @property
    def largest(self) -> float:
        """The largest |c| that is kept here now: what the rounding of an undone exchange is measured by."""
        kept = [one.sum_c for one in (*(self._worker or ()), *(self._server or ())) if one.sum_c.numel()]
        return max((float(one.abs().max()) for one in kept), default=0.0)

    def residual(self, out_N: Tensor | None = None) -> Tensor:
        """R, float[N], bit-identical on every rank. Collective; modifies nothing but out. Raises: PeerLost.

        out: float[N], written and returned; undefined where a peer is lost. None: new.
        """
        group = self._where.group
        residual_N = self.share(group.size, (), out_N)
        group.start_sum_(residual_N).wait()
        return residual_N

    def share(self, holders: int, missing: Collection[int] = (), out_N: Tensor | None = None) -> Tensor:
        """worker error / holders + server error, float[N]: what this rank holds of R. Local; modifies nothing but out.

        Summed over all ranks, holders being their number, it is R. Where a rank is gone, the sum over the others,
        holders being theirs, imputes its worker error (their mean), and has its server error only where another keeps
        it too. missing: the ranks that are gone. out: float[N], written and returned; None: new.
        """
        self.refuse_torn()
        own = out_N if out_N is not None and out_N.numel() == self._numel else self._like.new_empty(self._numel)
        part_M = self._worker_error_(own)
        part_M.div_(part_M.new_full((), self._where.holders(holders, missing)))
        for place, kept in zip(self._places, self._replica or (), strict=False):
            if place.replica is not None and place.replica.rank in missing:
                part_M[place.replica.at] += kept.error()
        for place, kept in zip(self._places, self._server or (), strict=False):
            part_M[place.own.at] += kept.error()
        part_N = self._where.put(part_M, out_N)
        return part_N if self._rest_N is None else part_N.add_(self._rest_N)

    def kept_of(self, rank: int) -> bool:
        """Is the server error of this rank kept here, as this one's own is?"""
        here = any(place.replica is not None and place.replica.rank == rank for place in self._places)
        return rank == self._where.group.rank or (here and not self._replica_is_behind)

    def restore(self, residual_N: Tensor) -> None:
        """Hold R: all of it in the server's sums, each rank its own chunks; nothing sent. Local; R is not modified.

        Exact for any number of ranks and any buckets on either side, until an exchange rounds it. It leaves through the
        codec, a little each step. What was received last no longer counts as the result (Exchange.last).
        Raises: ValueError where R is of another length.
        """
        if residual_N.shape != (self._where.numel,):
            raise ValueError(
                f"residual of {tuple(residual_N.shape)} does not fit error memory of {(self._where.numel,)}: "
                "it was saved by a model with other parameters"
            )
        residual_M = self._where.take(residual_N)
        self.version, self.torn = self.version + 1, ""
        self._forget()
        if not bool(residual_M.any()):
            return
        for place, kept in zip(self._places, self.server, strict=True):
            kept.sum_c.copy_(residual_M[place.own.at])
        for served, kept in zip(self._of_replica(), self.replica, strict=True):
            kept.sum_c.copy_(residual_M[served.at])

    def _forget(self) -> None:
        self._worker = self._server = self._replica = self._rest_N = None
        self._has_sums = self._replica_is_behind = False
        self._forget_outliers()

    def _forget_outliers(self) -> None:
        if self.outliers is not None:
            self.outliers.forget()

    def held(self) -> Held:
        """All that this rank holds, as it is: errors, not sums. Local; modifies nothing; new tensors.

        Of errors that others own, which were loaded here, this rank's part of R.
        """
        self.refuse_torn()
        none, numel, where = nothing(self._like), self._where.numel, self._where
        if self._rest_N is not None:
            part_N = self.share(where.group.size)
            return Held(numel, part_N, none, (), in_place(numel), none, workers=1)
        worker_M = self._worker_error_(self._like.new_empty(self._numel))
        server_c, served = torch.cat(self._server_errors()), [place.own.at for place in self._places]
        replica = () if self._replica_is_behind else self.replica
        replica_r = torch.cat([none, *(one.error() for one in replica)])
        spans = tuple((at.start, at.stop) for at in served)
        workers = 0 if where.workers == where.group.size else where.workers
        return Held(numel, worker_M, server_c, spans, where.moves, replica_r, workers, exact=self._exact())

    def _exact(self) -> dict[str, Exact] | None:
        """Sums in few bits and their scales, from which alone the next exchange is the one that would have been."""
        if not (self.is_narrow and self._has_sums) or any(one.sum_c.dtype != self._sums for one in self.worker):
            return None
        replica = [] if self._replica_is_behind else self.replica
        sides = self._in_place(self.worker), self.server, replica
        return {name: _exact(self._like, side) for name, side in zip(EXACT, sides, strict=True)}

    def _in_place(self, of_bucket: Sequence[Any]) -> list[Any]:
        """What there is of each bucket, in the order in which the buckets lie in the vector."""
        starts = [place.worker.at.start for place in self._places]
        return [of_bucket[k] for k in sorted(range(len(starts)), key=starts.__getitem__)]

    def hold(self, held: Held) -> bool:
        """Hold what held() of this rank of as many ranks gave. Local. Returns whether errors are where they were.

        Then the next exchange is bit-equal to the one that would have followed held(). Else, as after another cut into
        buckets, what this rank holds of R is in its worker error, and R is as it was to rounding; what it does not own
        with topology node_first waits for restore() (is_behind). The errors become sums of which nothing was sent, but
        where sums in few bits were held and are to be here. Raises: ValueError where it is of another length.
        """
        self._rest_N = None
        mine = self.held()
        held.refuse_other_size(mine)
        self.version += 1
        behind = any(place.replica is not None for place in self._places) and not held.replica_r.numel()
        room = self._like.new_zeros(sum(served.numel for served in self._of_replica()))
        mine = replace(mine, replica_r=room)  # also where this one's are behind
        if behind:  # they were when it was saved
            held = replace(held, replica_r=room)
        fits = held.as_laid_out(mine)
        self._forget()
        if fits and held.exact is not None and self._take_exact(held.exact):
            self._replica_is_behind = behind
            return True
        if not fits and self._where.workers != self._where.group.size:
            self._rest_N = held.part(self._where.group.size)
            return False
        if fits:
            _copy(held.server_c, [kept.sum_c for kept in self.server])
            _copy(held.replica_r, [kept.sum_c for kept in self.replica])
        size = self._where.group.size
        worker_M = held.worker_M if fits else held.part(size) * size
        for place, kept in zip(self._places, self.worker, strict=True):
            kept.sum_c.copy_(worker_M[place.worker.at])
        self._replica_is_behind = behind
        return fits

    def _take_exact(self, exact: dict[str, Exact]) -> bool:
        """Hold these sums and scales, where they are of the same blocks and exchanges here keep such."""
        sides = self._of_worker(), self._of_own(), self._of_replica()
        in_order = self._in_place(sides[0]), *sides[1:]
        if not self.is_narrow or not all(
            exact[name].size_b.equal(_sizes([one.table for one in of]))
            for name, of in zip(EXACT, in_order, strict=True)
        ):
            return False
        worker, server, replica = (self._made(of, self._sums) for of in sides)
        for name, kept in zip(EXACT, (self._in_place(worker), server, replica), strict=True):
            _copy(exact[name].sum_c, [one.sum_c for one in kept])
            _copy(exact[name].scale_b, [one.scale_b for one in kept])
        self._worker, self._server, self._replica = worker, server, replica
        self._has_sums = True
        return True

    def copies(self) -> tuple[list[Kept], list[Kept]]:
        """The worker's and the server's sums and scales: those of an exchange that is about to be undone."""
        return [one.copy() for one in self.worker], [one.copy() for one in self.server]

    def swap(self, sums: tuple[list[Kept], list[Kept]]) -> tuple[list[Kept], list[Kept]]:
        """Hold these from here on. Returns what was held."""
        held = self.worker, self.server
        self._worker, self._server = sums
        return held


EXACT = ("worker", "server", "replica")


def _sizes(tables: Sequence[BlockTable | None]) -> Tensor:
    """Elements of each block: int64[b], on the host."""
    known = [table.on_host.starts.diff() for table in tables if table is not None]
    return torch.cat([torch.zeros(0, dtype=torch.int64, device="cpu"), *known])


def _exact(like: Tensor, kept: Sequence[Kept]) -> Exact:
    none, tables = nothing(like), [one.table for one in kept if one.table is not None]
    starts = [0, *accumulate(table.numel for table in tables)]
    dead = [table.on_host.dead + start for table, start in zip(tables, starts, strict=False)]
    return Exact(
        torch.cat([none.to(torch.bfloat16), *(one.sum_c for one in kept)]),
        torch.cat([none, *(one.scale_b for one in kept)]),
        _sizes(tables),
        torch.cat([torch.zeros(0, dtype=torch.int64, device="cpu"), *dead]),
    )


def _copy(from_c: Tensor, to: Sequence[Tensor]) -> None:
    """Adjoining parts of one vector <- each its part."""
    for part, into in zip(torch.split(from_c, [one.numel() for one in to]), to, strict=True):
        into.copy_(part)
