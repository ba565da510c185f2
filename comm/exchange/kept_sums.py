"""What compression left out, kept as what was to be sent and the scale that was: the error is never written.

    e = c - s sgn(c)      c: kept sum of an element, s: scale of its block; s = 0: nothing was sent, e = c

Rank i keeps the worker's sums of the whole vector and the server's of its own chunk of every bucket. As in
error_feedback.py only R = mean_i e_i + server e has meaning; it alone is saved, and neither the number of ranks nor
the cut into buckets is in it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.comm.exchange.held import Held, in_place, nothing
from thinwire.comm.exchange.rows import BucketRows
from thinwire.comm.kernels.blocks import BlockTable
from thinwire.comm.protocol import Group


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
    they are kept, the server's sums of the rank before this one, bit-equal to that rank's; else empty.
    version: changes whenever the sums are written from outside of an exchange. torn: what was raised while they were
    being written, and where, after which nobody knows what they hold; "" where they are whole.
    """

    __slots__ = (
        "_group",
        "_rows",
        "_sum_N",
        "_sum_s",
        "replica",
        "server",
        "server_scale_b",
        "torn",
        "version",
        "worker",
        "worker_scale_b",
    )

    def __init__(self, rows: Sequence[BucketRows], group: Group, like: Tensor) -> None:
        self._rows = rows
        self._group = group
        self.version, self.torn = 0, ""
        numel = rows[0].layout.numel
        self._sum_N = torch.zeros(numel, dtype=like.dtype, device=like.device)
        self._sum_s = self._sum_N.new_zeros(sum(one.own_table.numel for one in rows))
        self.worker_scale_b = self._sum_N.new_zeros(sum(one.table.num_blocks for one in rows))
        self.server_scale_b = self._sum_N.new_zeros(sum(one.own_table.num_blocks for one in rows))
        scales = torch.split(self.worker_scale_b, [one.table.num_blocks for one in rows])
        self.worker = [Kept(self._sum_N[one.span], scale_b) for one, scale_b in zip(rows, scales, strict=True)]
        sums = torch.split(self._sum_s, [one.own_table.numel for one in rows])
        scales = torch.split(self.server_scale_b, [one.own_table.num_blocks for one in rows])
        self.server = [Kept(sum_c, scale_b) for sum_c, scale_b in zip(sums, scales, strict=True)]
        tables = [one.replica.table for one in rows if one.replica is not None]
        self.replica = [Kept(like.new_zeros(table.numel), like.new_zeros(table.num_blocks)) for table in tables]

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
        error_N = self._sum_N.clone()
        for rows, kept in zip(self._rows, self.worker, strict=True):
            error_N[rows.span] -= kept.sent(rows.table)
        return error_N

    @property
    def server_c(self) -> Tensor:
        """The error of encoding what this rank serves, chunk after chunk in the order of the vector: a new tensor."""
        errors = [kept.sum_c - kept.sent(rows.own_table) for rows, kept in zip(self._rows, self.server, strict=True)]
        return torch.cat(errors[::-1])

    @property
    def largest(self) -> float:
        """The largest |c| that is kept here now: what the rounding of an undone exchange is measured by."""
        served = self._sum_s.abs().max() if self._sum_s.numel() else self._sum_s.new_zeros(())
        return float(torch.maximum(self._sum_N.abs().max(), served))

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
        for rows, kept in zip(self._rows, self.replica, strict=False):
            if rows.replica is not None and rows.replica.before in missing:
                part_N[rows.replica.span] += kept.sum_c - kept.sent(rows.replica.table)
        for rows, kept in zip(self._rows, self.server, strict=True):
            part_N[rows.own] += kept.sum_c - kept.sent(rows.own_table)
        return part_N

    def kept_of(self, rank: int) -> bool:
        """Is the server error of this rank kept here?"""
        here = any(rows.replica is not None and rows.replica.before == rank for rows in self._rows)
        return rank == self._group.rank or here

    def restore(self, residual_N: Tensor) -> None:
        """Hold R: all of it in the server's sums, each rank its own chunks; nothing sent. Local; R is not modified.

        Exact for any number of ranks and any buckets on either side. What was received last no longer counts as the
        result (BucketedAllReduce.last). Raises: ValueError where R is of another length.
        """
        if residual_N.shape != self._sum_N.shape:
            raise ValueError(
                f"residual of {tuple(residual_N.shape)} does not fit error memory of {tuple(self._sum_N.shape)}: "
                "it was saved by a model with other parameters"
            )
        self.version, self.torn = self.version + 1, ""
        self._sum_N.zero_()
        self.worker_scale_b.zero_()
        self.server_scale_b.zero_()
        for rows, kept in zip(self._rows, self.server, strict=True):
            kept.sum_c.copy_(residual_N[rows.own])
        for rows, kept in zip(self._rows, self.replica, strict=False):
            if rows.replica is not None:
                kept.sum_c.copy_(residual_N[rows.replica.span])
                kept.scale_b.zero_()

    def held(self) -> Held:
        """All that this rank holds, as it is: errors, not sums. Local; modifies nothing; new tensors."""
        self.refuse_torn()
        numel, served = self._sum_N.numel(), tuple((one.own.start, one.own.stop) for one in self._rows)
        server = [kept.sum_c - kept.sent(one.own_table) for one, kept in zip(self._rows, self.server, strict=True)]
        none = nothing(self._sum_N)
        return Held(numel, self.worker_N, torch.cat(server), served, in_place(numel), self._replica_errors(), none)

    def hold(self, held: Held) -> bool:
        """Hold what held() of this rank of as many ranks gave; ErrorMemory.hold. Local. Raises: ValueError.

        The errors become sums of which nothing was sent. What was received last no longer counts as the result.
        """
        mine = self.held()
        held.refuse_other_size(mine)
        self.version += 1
        self.worker_scale_b.zero_()
        self.server_scale_b.zero_()
        for kept in self.replica:
            kept.sum_c.zero_()
            kept.scale_b.zero_()
        fits = held.as_laid_out(mine)
        if fits:
            self._sum_N.copy_(held.worker_M)
            self._sum_s.copy_(held.server_c)
            replicas = torch.split(held.replica_r, [kept.sum_c.numel() for kept in self.replica])
            for kept, error_c in zip(self.replica, replicas, strict=True):
                kept.sum_c.copy_(error_c)
        else:
            self._sum_N.copy_(held.part(self._group.size) * self._group.size)
            self._sum_s.zero_()
        return fits

    def _replica_errors(self) -> Tensor:
        kept = zip(self._rows, self.replica, strict=False)
        errors = [one.sum_c - one.sent(rows.replica.table) for rows, one in kept if rows.replica is not None]
        return torch.cat([nothing(self._sum_N), *errors])
