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

from thinwire.comm.exchange.rows import BucketWire
from thinwire.comm.kernels.blocks import BlockTable
from thinwire.comm.protocol import Group


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """Views of one chunk: its kept sums float[c] and the scales that were sent float[b]."""

    sum_c: Tensor
    scale_b: Tensor

    def sent(self, table: BlockTable) -> Tensor:
        """s sgn(c), 0 where dead: what was sent of the sum. A new tensor."""
        scale_c = torch.repeat_interleave(self.scale_b, table.starts.diff(), output_size=table.numel)
        sent_c = torch.where(self.sum_c >= 0, scale_c, -scale_c)
        sent_c[table.dead] = 0
        return sent_c


class KeptSums:
    """Error memory of one exchanged vector, an ErrorMemory. Made by BucketedAllReduce.new_slot().

    worker[k][rank]: of bucket k, what goes to this rank. server[k]: of this rank's own chunk of bucket k. shadow[k]:
    where they are kept, those of the server's sums of the rank before this one, bit-equal to that rank's; else empty.
    version: changes whenever the sums are written from outside of an exchange.
    """

    __slots__ = (
        "_group",
        "_sum_N",
        "_sum_s",
        "_wires",
        "server",
        "server_scale_b",
        "shadow",
        "version",
        "worker",
        "worker_scale_b",
    )

    def __init__(self, wires: Sequence[BucketWire], group: Group, like: Tensor) -> None:
        self._wires = wires
        self._group = group
        self.version = 0
        numel = sum(wire.bucket.stop - wire.bucket.start for wire in wires)
        self._sum_N = torch.zeros(numel, dtype=like.dtype, device=like.device)
        self._sum_s = self._sum_N.new_zeros(sum(wire.own_table.numel for wire in wires))
        self.worker_scale_b = self._sum_N.new_zeros(sum(t.num_blocks for wire in wires for t in wire.tables))
        self.server_scale_b = self._sum_N.new_zeros(sum(wire.own_table.num_blocks for wire in wires))
        self.worker: list[list[Kept]] = []
        self.server: list[Kept] = []
        at = own_at = served = 0
        for wire in wires:
            found = []
            for (start, stop), table in zip(wire.chunks, wire.tables, strict=True):
                found.append(Kept(self._sum_N[start:stop], self.worker_scale_b[at : at + table.num_blocks]))
                at += table.num_blocks
            self.worker.append(found)
            own = wire.own_table
            scale_b = self.server_scale_b[own_at : own_at + own.num_blocks]
            self.server.append(Kept(self._sum_s[served : served + own.numel], scale_b))
            own_at, served = own_at + own.num_blocks, served + own.numel
        tables = [wire.shadow.table for wire in wires if wire.shadow is not None]
        self.shadow = [Kept(like.new_zeros(table.numel), like.new_zeros(table.num_blocks)) for table in tables]

    @property
    def worker_N(self) -> Tensor:
        """This rank's compression error, the whole vector: a new tensor."""
        error_N = self._sum_N.clone()
        for wire, chunks in zip(self._wires, self.worker, strict=True):
            for (start, stop), table, kept in zip(wire.chunks, wire.tables, chunks, strict=True):
                error_N[start:stop] -= kept.sent(table)
        return error_N

    @property
    def server_c(self) -> Tensor:
        """The error of encoding what this rank serves, chunk after chunk in the order of the vector: a new tensor."""
        errors = [kept.sum_c - kept.sent(wire.own_table) for wire, kept in zip(self._wires, self.server, strict=True)]
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
        part_N = self.worker_N.div_(holders)
        for wire, kept in zip(self._wires, self.shadow, strict=False):
            if wire.shadow is not None and wire.shadow.before in missing:
                part_N[slice(*wire.chunks[wire.shadow.before])] += kept.sum_c - kept.sent(wire.shadow.table)
        server_s, at = self.server_c, 0
        for start, stop in self._served_spans(self._group.rank):
            part_N[start:stop] += server_s[at : at + stop - start]
            at += stop - start
        return part_N

    def kept_of(self, rank: int) -> bool:
        """Is the server error of this rank kept here?"""
        here = any(wire.shadow is not None and wire.shadow.before == rank for wire in self._wires)
        return rank == self._group.rank or here

    def restore(self, residual_N: Tensor) -> None:
        """Hold R: all of it in the server's sums, each rank its own chunks; nothing sent. Local; R is not modified.

        Exact for any number of ranks and any buckets on either side. What was received last is no longer known as the
        momentum (BucketedAllReduce.has_momentum). Raises: ValueError where R is of another length.
        """
        if residual_N.shape != self._sum_N.shape:
            raise ValueError(
                f"residual of {tuple(residual_N.shape)} does not fit error memory of {tuple(self._sum_N.shape)}: "
                "it was saved by a model with other parameters"
            )
        self.version += 1
        self._sum_N.zero_()
        self.worker_scale_b.zero_()
        self.server_scale_b.zero_()
        for wire, kept in zip(self._wires, self.server, strict=True):
            kept.sum_c.copy_(residual_N[wire.own])
        for wire, kept in zip(self._wires, self.shadow, strict=False):
            if wire.shadow is not None:
                kept.sum_c.copy_(residual_N[slice(*wire.chunks[wire.shadow.before])])
                kept.scale_b.zero_()

    def _served_spans(self, rank: int) -> list[tuple[int, int]]:
        """What a rank serves, in the order of the vector."""
        return [wire.chunks[rank] for wire in self._wires[::-1]]
