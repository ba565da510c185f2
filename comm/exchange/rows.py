"""What is on the wire: the rows that are sent and received for each bucket, and what the received ones say.

    sent       one row for each rank, its chunk of what this rank gives     -> collected of that rank   all-to-all
    collected  one row from each rank, all of this rank's own chunk
    served     the mean of those, encoded                                   -> gathered of every rank   all-gather
    gathered   one row from each rank, its chunk of the result; two sets: the last result, and the one that is made,
               or one, where no exchange needs the last one

The replica, where it is asked for, has rows as sent and collected for the chunk of the rank before this one. What was
sent and collected in the last exchange is kept where asked for: two sets take turns, and nothing is copied. A row is
[8-byte header: byte 0 is 1 where all of it is finite | scales of the chunk's blocks | signs]. The gathered rows of all
buckets lie in one piece of memory, so that one table says where each block of the vector is in it; they are the
result in 1/32 of its size, and are decoded where it is used. Everything is made once; a step makes no tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from thinwire.comm.keeps import Keeps
from thinwire.comm.kernels.blocks import HEADER_BYTES, BlockTable, RowMemory
from thinwire.comm.kernels.fused_reference import Kernels
from thinwire.comm.layout import Bucket, Buckets, Span, VectorLayout
from thinwire.comm.protocol import Reader, RowReader


class ReplicaRows:
    """Rows of what the rank before this one serves, to know its server error too. before: that rank.

    Rank i sends to rank j what it sends to rank j - 1 as well. served: scratch.
    """

    def __init__(self, rows: BucketRows, block: int, rank: int, like: Tensor) -> None:
        size = len(rows.chunks)
        self.before = (rank - 1) % size
        self.span = slice(*rows.chunks[self.before])
        self.table = BlockTable.of(rows.layout, self.span.start, self.span.stop, block, like, rows.table.row_bytes)
        self.sent_nB, self.collected_nB = torch.zeros_like(rows.sent_nB), torch.zeros_like(rows.sent_nB)
        self.collected = RowMemory.of(self.collected_nB.view(-1), like.dtype)
        self.served = RowMemory.of(torch.zeros_like(rows.served_B), like.dtype)

    def take(self, rows: BucketRows) -> None:
        """sent <- the rows that are sent to the ranks before."""
        self.sent_nB[0].copy_(rows.sent_nB[-1])
        self.sent_nB[1:].copy_(rows.sent_nB[:-1])


@dataclass(frozen=True, slots=True, eq=False)
class Crossing:
    """What crosses in phase 1 of one exchange of a bucket: rows uint8[n, B], and all of them as one RowMemory."""

    sent_nB: Tensor
    collected_nB: Tensor
    sent: RowMemory
    collected: RowMemory

    @classmethod
    def of(cls, size: int, row_bytes: int, like: Tensor) -> Crossing:
        """New memory. A chunk without elements is never written, and finite: flags are 1."""
        sent_nB = torch.zeros((size, row_bytes), dtype=torch.uint8, device=like.device)
        sent_nB[:, 0] = 1
        collected_nB = torch.zeros_like(sent_nB)
        both = (RowMemory.of(rows_nB.view(-1), like.dtype) for rows_nB in (sent_nB, collected_nB))
        return cls(sent_nB, collected_nB, *both)


class BucketRows:
    """The rows of one bucket on one rank.

    chunks: the elements that each rank serves, counted from the start of the vector. span: of the bucket; own: of this
    rank's chunk. table: the blocks of all chunks, in n rows; own_table: of the own one, in one row. *_nB: a row each.
    now: of the exchange under way; last: of the one committed last, None unless keeps_last, and before the first.
    gathered: the two sets, or one twice, once they have been placed. replica: None unless it is asked for.
    row_bytes: of a row that is longer than this bucket's need.
    """

    def __init__(
        self,
        bucket: Bucket,
        buckets: Buckets,
        block: int,
        rank: int,
        size: int,
        like: Tensor,
        *,
        keeps: Keeps = Keeps.NOTHING,
        row_bytes: int | None = None,
    ) -> None:
        self.layout = buckets.layout
        self.chunks: list[Span] = [bucket.chunk(owner, size) for owner in range(size)]
        self.span, self.own = slice(bucket.start, bucket.stop), slice(*self.chunks[rank])
        self.table = BlockTable.of_rows(self.layout, self.chunks, block, like, row_bytes)
        self.own_table = BlockTable.of(self.layout, self.own.start, self.own.stop, block, like, self.table.row_bytes)
        self.now = Crossing.of(size, self.table.row_bytes, like)
        self.keeps_last, self._like = keeps is Keeps.ROWS, like.new_empty(0)
        self.last: Crossing | None = None
        self.served_B = torch.zeros_like(self.sent_nB[0])
        self.served = RowMemory.of(self.served_B, like.dtype)
        self.gathered: list[RowMemory] = []
        self.gathered_nB: list[Tensor] = []
        self.replica = ReplicaRows(self, block, rank, like) if keeps is Keeps.REPLICA else None
        self._fuse: tuple[RowMemory, Tensor] | None = None
        """Of these collected rows, as fuse() gives it."""
        self._num_filled = int((self.table.on_host.row_starts.diff() > 0).sum())
        """Rows with elements; the others stand behind them."""
        self.served_B[0] = 1

    def fuse(self) -> Tensor:
        """What makes what this rank serves unusable, spoilt: the scales of the first collected row, or its own flag."""
        collected = self.collected
        if self._fuse is None or self._fuse[0] is not collected:
            start = HEADER_BYTES // collected.values_V.element_size()
            scales = collected.values_V[start : start + self.own_table.num_blocks]
            self._fuse = collected, scales if self.own_table.numel else self.served_B[:1]
        return self._fuse[1]

    @property
    def sent_nB(self) -> Tensor:
        """Of the exchange under way, as the three that follow."""
        return self.now.sent_nB

    @property
    def collected_nB(self) -> Tensor:
        """A row from each rank."""
        return self.now.collected_nB

    @property
    def sent(self) -> RowMemory:
        """All rows that are sent."""
        return self.now.sent

    @property
    def collected(self) -> RowMemory:
        """All rows that are collected."""
        return self.now.collected

    def take_room(self) -> None:
        """Have memory for the last exchange too, before one begins: none before, as a regroup holds two of all this."""
        if self.keeps_last and self.last is None:
            self.last = Crossing.of(len(self.chunks), self.table.row_bytes, self._like)

    def turn(self) -> None:
        """What has crossed is the last exchange from now on, where that is kept."""
        if self.last is not None:
            self.now, self.last = self.last, self.now

    def place(self, bytes_B: Tensor, dtype: torch.dtype, turns: int) -> None:
        """One more set of gathered rows, or two that are one: in this memory."""
        self.gathered += [RowMemory.of(bytes_B, dtype)] * turns
        self.gathered_nB += [bytes_B.view(self.sent_nB.shape)] * turns

    def least_flag(self, kernels: Kernels) -> Tensor:
        """0-dim uint8: 1 where all rows that are sent are finite, else 0. Their flags: modified."""
        kernels.flag(self.table, self.sent)
        return self.sent_nB[:, 0].amin()

    def refuse(self) -> None:
        """Say that nothing was encoded: the flag of every row with elements 0, every scale NaN."""
        self.sent.values_V[self.table.scale_at] = torch.nan
        self.sent_nB[: self._num_filled, 0] = 0  # by a mask on the device the host would wait for it


@dataclass(frozen=True, slots=True)
class Cut:
    """Where everything is in the rows of a result: the buckets, values that share a scale, ranks that serve.

    With it another rank, of any group, can hold the same rows.
    """

    buckets: Buckets
    block: int
    size: int

    def tables(self, like: Tensor) -> list[BlockTable]:
        """The blocks of each bucket, in a row for each rank that serves. like: the vector's dtype and device."""
        layout = self.buckets.layout
        chunks = [[bucket.chunk(owner, self.size) for owner in range(self.size)] for bucket in self.buckets]
        return [BlockTable.of_rows(layout, of_bucket, self.block, like) for of_bucket in chunks]

    def plain(self) -> dict[str, Any]:
        """For of_plain: numbers and lists."""
        return {"buckets": [list(span) for span in self.buckets.spans], "block": self.block, "size": self.size}

    @classmethod
    def of_plain(cls, layout: VectorLayout, plain: dict[str, Any]) -> Cut:
        """What plain() gave, of a vector of this layout. Raises: ValueError where the buckets are not of that."""
        return cls(Buckets(layout, tuple((a, b) for a, b in plain["buckets"])), plain["block"], plain["size"])


class Received:
    """One set of gathered rows, as a Result.

    wire: the memory of all of them. parts: (table, at, wire_at) as BlockTable.over takes them. flag_at: int64[r], the
    byte of each row's flag. numel: N, elements of the vector. cut: where everything is; None where that is not known.
    """

    def __init__(
        self,
        wire: RowMemory,
        parts: Sequence[tuple[BlockTable, int, int]],
        flag_at: Tensor,
        numel: int,
        kernels: Kernels,
        cut: Cut | None = None,
    ) -> None:
        self.wire, self.cut = wire, cut
        self._parts, self._numel, self._kernels = parts, numel, kernels
        self._tables: dict[Span, BlockTable] = {}
        self._flag_at = flag_at
        self._flags = torch.ones_like(flag_at, dtype=torch.uint8)
        self._finite = torch.ones((), dtype=torch.uint8, device=flag_at.device)

    @classmethod
    def of(cls, rows: Sequence[BucketRows], kernels: Kernels, like: Tensor, cut: Cut, turns: int = 1) -> Received:
        """Of all buckets, in one piece of memory, in which each is given its place: in so many turns."""
        made = cls._laid_out([one.table for one in rows], kernels, like, cut)
        ends = [0, *accumulate(one.sent_nB.numel() for one in rows)]
        for one, (low, high) in zip(rows, pairwise(ends), strict=True):
            one.place(made.wire.bytes_B[low:high], like.dtype, turns)
        return made

    @classmethod
    def room_for(cls, cut: Cut, kernels: Kernels, like: Tensor) -> Received:
        """New memory for rows that another rank has. like: the vector's dtype and device."""
        return cls._laid_out(cut.tables(like), kernels, like, cut)

    @classmethod
    def _laid_out(cls, tables: Sequence[BlockTable], kernels: Kernels, like: Tensor, cut: Cut) -> Received:
        ends = [0, *accumulate(cut.size * one.row_bytes for one in tables)]
        bytes_B = torch.zeros(ends[-1], dtype=torch.uint8, device=like.device)
        parts = [(one, low, at) for one, (low, _), at in zip(tables, cut.buckets.spans, ends, strict=False)]
        flag_at = torch.cat([one.flag_at + at for one, at in zip(tables, ends, strict=False)])
        return cls(RowMemory.of(bytes_B, like.dtype), parts, flag_at, cut.buckets.layout.numel, kernels, cut)

    def finite(self) -> Tensor:
        """0-dim uint8: 1 where every server could write all of its rows, the same on every rank. Until the next call.

        Waits for nothing.
        """
        torch.index_select(self.wire.bytes_B, 0, self._flag_at, out=self._flags)
        torch.amin(self._flags, 0, out=self._finite)
        return self._finite

    def decode_(self, out_N: Tensor, start: int = 0, stop: int | None = None) -> None:
        """out <- elements [start, stop) of the result, 0 where dead."""
        self._kernels.decode(self.wire, self._table(start, self._numel if stop is None else stop), out_N)

    def read(self, reader: Reader, start: int = 0, stop: int | None = None) -> None:
        """Hand elements [start, stop) to the reader. Raises: ValueError for bounds inside a byte."""
        stop = self._numel if stop is None else stop
        if start == stop:
            return
        at, table = slice(start, stop), self._table(start, stop)
        if isinstance(reader, RowReader):
            reader.rows(at, self.wire, table)
            return
        values = self.wire.values_V.new_empty(table.numel)
        self._kernels.decode(self.wire, table, values)
        reader.values(at, values)

    def _table(self, start: int, stop: int) -> BlockTable:
        found = self._tables.get((start, stop))
        if found is None:
            found = self._tables[start, stop] = BlockTable.over(self._parts, start, stop)
        return found
