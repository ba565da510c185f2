"""What compression left out, kept as what was to be sent and the scale that was: the error is never written.

    e = c - s sgn(c)      c: kept sum of an element, s: scale of its block; s = 0: nothing was sent, e = c

Rank i keeps the worker's sums of the whole vector and the server's of its own chunk of every bucket. As in
error_feedback.py only R = mean_i e_i + server e has meaning; it alone is saved, and neither the number of ranks nor
the cut into buckets is in it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from thinwire.comm.exchange.held import Held, in_place, nothing
from thinwire.comm.exchange.outliers import Outliers
from thinwire.comm.exchange.rows import BucketRows
from thinwire.comm.kernels.blocks import BlockTable
from thinwire.comm.protocol import Errors, Group


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


class KeptSums:
    """Error memory of one exchanged vector, an ErrorMemory. Made by BucketedAllReduce.new_memory().

    worker[k]: of bucket k, what goes to the servers. server[k]: of this rank's own chunk of bucket k. replica[k]: where
    they are kept, the server's sums of the rank before this one, bit-equal to that rank's; else empty. Either side has
    memory from when it is first asked for, which an exchange does: in a warm-up, and after restore() of the worker's,
    all is zero and takes none. outliers: the largest server errors of all ranks, where they are sent.
    version: changes whenever the sums are written from outside of an exchange. torn: what was raised while they were
    being written, and where, after which nobody knows what they hold; "" where they are whole.
    is_behind: replicas are kept, and are not those of the errors now.
    """

    __slots__ = (
        "_group",
        "_has_sums",
        "_like",
        "_numel",
        "_replica",
        "_rows",
        "_server",
        "_worker",
        "is_behind",
        "outliers",
        "torn",
        "version",
    )

    def __init__(self, rows: Sequence[BucketRows], group: Group, like: Tensor) -> None:
        self._rows = rows
        self._group = group
        self._like = like.new_empty(0)
        self.version, self.torn = 0, ""
        self._has_sums = self.is_behind = False
        self._numel = rows[0].layout.numel
        self._worker: list[Kept] | None = None
        self._server: list[Kept] | None = None
        self._replica: list[Kept] | None = None
        self.outliers = Outliers(rows, group, like) if rows[0].last is not None else None

    @property
    def worker(self) -> list[Kept]:
        """Of each bucket."""
        if self._worker is None:
            sum_N, tables = self._like.new_zeros(self._numel), [one.table for one in self._rows]
            scales = self._scales(tables)
            self._worker = [Kept(sum_N[one.span], scale_b) for one, scale_b in zip(self._rows, scales, strict=True)]
        return self._worker

    @property
    def server(self) -> list[Kept]:
        """Of each bucket."""
        if self._server is None:
            tables = [one.own_table for one in self._rows]
            sums = torch.split(self._like.new_zeros(sum(table.numel for table in tables)), [t.numel for t in tables])
            self._server = [Kept(*pair) for pair in zip(sums, self._scales(tables), strict=True)]
        return self._server

    @property
    def replica(self) -> list[Kept]:
        """Of each bucket, or of none."""
        if self._replica is None:
            tables = [one.replica.table for one in self._rows if one.replica is not None]
            made = [(self._like.new_zeros(table.numel), self._like.new_zeros(table.num_blocks)) for table in tables]
            self._replica = [Kept(*pair) for pair in made]
        return self._replica

    @property
    def workers(self) -> int:
        """All ranks hold a worker error of every element."""
        return self._group.size

    def take_room(self) -> None:
        """Have memory for all, before an exchange writes sums and scales to it."""
        _ = self.worker, self.server, self.replica
        self._has_sums = True

    def errors(self) -> Errors:
        """The errors, in the place of the sums, of which nothing was sent: to be read and written. Local.

        Replicas do not follow what is written there, and are not kept_of() any more until restore().
        """
        self.refuse_torn()
        for rows, kept in zip(self._rows, self.worker if self._has_sums else (), strict=False):
            kept.sum_c.sub_(kept.sent(rows.table))
            kept.scale_b.zero_()
        for rows, kept in zip(self._rows, self.server if self._has_sums else (), strict=False):
            kept.sum_c.sub_(kept.sent(rows.own_table))
            kept.scale_b.zero_()
        self._has_sums, self._replica = False, None
        self.version, self.is_behind = self.version + 1, self._keeps_replicas
        if self.outliers is not None:
            self.outliers.forget()
        return Errors([kept.sum_c for kept in self.worker], [kept.sum_c for kept in self.server])

    def scale_(self, factor_N: Tensor) -> None:
        """R <- factor R. Local."""
        errors = self.errors()
        for rows, worker_c, server_c in zip(self._rows, errors.worker, errors.server, strict=True):
            worker_c.mul_(factor_N[rows.span])
            server_c.mul_(factor_N[rows.own])

    @property
    def _keeps_replicas(self) -> bool:
        return any(rows.replica is not None for rows in self._rows)

    def _scales(self, tables: Sequence[BlockTable]) -> Sequence[Tensor]:
        sizes = [table.num_blocks for table in tables]
        return torch.split(self._like.new_zeros(sum(sizes)), sizes)

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
        error_N = self._like.new_zeros(self._numel)
        for rows, kept in zip(self._rows, self._worker or (), strict=False):
            torch.sub(kept.sum_c, kept.sent(rows.table), out=error_N[rows.span])
        return error_N

    @property
    def server_c(self) -> Tensor:
        """The error of encoding what this rank serves, chunk after chunk in the order of the vector: a new tensor."""
        return torch.cat(self._server_errors()[::-1])

    def _server_errors(self) -> list[Tensor]:
        if self._server is None:
            return [self._like.new_zeros(one.own_table.numel) for one in self._rows]
        return [kept.sum_c - kept.sent(rows.own_table) for rows, kept in zip(self._rows, self._server, strict=True)]

    @property
    def largest(self) -> float:
        """The largest |c| that is kept here now: what the rounding of an undone exchange is measured by."""
        kept = [one.sum_c for one in (*(self._worker or ()), *(self._server or ())) if one.sum_c.numel()]
        return max((float(one.abs().max()) for one in kept), default=0.0)

    def residual(self) -> Tensor:
        """R, float[N] in flat order, bit-identical on every rank. Collective; modifies nothing. Raises: PeerLost."""
        residual_N = self.share(self._group.size)
        self._group.start_sum_(residual_N).wait()
        return residual_N

    def share(self, holders: int, missing: Collection[int] = ()) -> Tensor:
        """worker error / holders + server error, float[N], new: what this rank holds of R. Local; modifies nothing.

        missing: ranks that are gone: their server errors are added by those that keep them too.
        """
        self.refuse_torn()
        part_N = self.worker_N.div_(holders)
        for rows, kept in zip(self._rows, self._replica or (), strict=False):
            if rows.replica is not None and rows.replica.before in missing:
                part_N[rows.replica.span] += kept.sum_c - kept.sent(rows.replica.table)
        for rows, kept in zip(self._rows, self._server or (), strict=False):
            part_N[rows.own] += kept.sum_c - kept.sent(rows.own_table)
        return part_N

    def kept_of(self, rank: int) -> bool:
        """Is the server error of this rank kept here?"""
        here = any(rows.replica is not None and rows.replica.before == rank for rows in self._rows)
        return rank == self._group.rank or (here and not self.is_behind)

    def restore(self, residual_N: Tensor) -> None:
        """Hold R: all of it in the server's sums, each rank its own chunks; nothing sent. Local; R is not modified.

        Exact for any number of ranks and any buckets on either side. What was received last no longer counts as the
        result (BucketedAllReduce.last). Raises: ValueError where R is of another length.
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
        return Held(self._numel, self.worker_N, server, served, moves, self._replica_errors(), none)

    def hold(self, held: Held) -> bool:
        """Hold what held() of this rank of as many ranks gave; ErrorMemory.hold. Local. Raises: ValueError.

        The errors become sums of which nothing was sent. What was received last no longer counts as the result.
        """
        mine = self.held()
        held.refuse_other_size(mine)
        self.version += 1
        behind = self._keeps_replicas and not held.replica_r.numel()
        if behind:  # they were when it was saved
            held = replace(held, replica_r=torch.zeros_like(mine.replica_r))
        fits = held.as_laid_out(mine)
        self._forget()
        if fits:
            _copy(held.server_c, [kept.sum_c for kept in self.server])
            _copy(held.replica_r, [kept.sum_c for kept in self.replica])
        worker_N = held.worker_M if fits else held.part(self._group.size) * self._group.size
        for rows, kept in zip(self._rows, self.worker, strict=True):
            kept.sum_c.copy_(worker_N[rows.span])
        self.is_behind = behind
        return fits

    def _replica_errors(self) -> Tensor:
        kept = zip(self._rows, () if self.is_behind else self.replica, strict=False)
        errors = [one.sum_c - one.sent(rows.replica.table) for rows, one in kept if rows.replica is not None]
        return torch.cat([nothing(self._like), *errors])


def _copy(from_c: Tensor, to: Sequence[Tensor]) -> None:
    """Adjoining parts of one vector <- each its part."""
    for part, into in zip(torch.split(from_c, [one.numel() for one in to]), to, strict=True):
        into.copy_(part)
