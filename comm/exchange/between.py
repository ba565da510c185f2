"""One rank's slices between boxes: the exchange of bucketed.py over its peers, and what its rows are with the others'.

All ranks of a box send rows of one length for a bucket, though segments end elsewhere in each slice: so the same
collectives, of the same sizes, in every part of a group, and rows that an all-gather can bring together.
"""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from thinwire.comm.codecs.sign import SignCodec
from thinwire.comm.exchange.bucketed import BucketedAllReduce
from thinwire.comm.exchange.rows import BucketRows, Received
from thinwire.comm.exchange.slices import Slices
from thinwire.comm.keeps import Keeps
from thinwire.comm.kernels.blocks import BlockTable, RowMemory
from thinwire.comm.kernels.choose import Kernels
from thinwire.comm.protocol import Group


class SliceRows:
    """The rows of the slices of all ranks of a box, among B boxes. tables[l][k]: of the slice of rank l of bucket k.

    ends: where the rows of each bucket begin among those of one rank, and their end.
    """

    def __init__(self, slices: Slices, boxes: int, block: int, like: Tensor) -> None:
        self.slices = slices
        self.layouts = [slices.layout(number) for number in range(slices.parts)]
        buckets = slices.buckets(0)
        chunks = [[bucket.chunk(box, boxes) for box in range(boxes)] for bucket in buckets]
        tables = [[BlockTable.of_rows(one, at, block, like) for at in chunks] for one in self.layouts]
        self.row_bytes = [max(table.row_bytes for table in of_bucket) for of_bucket in zip(*tables, strict=True)]
        self.tables = [
            [
                table if table.row_bytes == most else BlockTable.of_rows(one, at, block, like, most)
                for table, at, most in zip(mine, chunks, self.row_bytes, strict=True)
            ]
            for one, mine in zip(self.layouts, tables, strict=True)
        ]
        self.ends = [0, *accumulate(boxes * most for most in self.row_bytes)]

    def assembled(self, numel: int, kernels: Kernels, like: Tensor) -> Received:
        """New memory for all rows, those of rank l in part l, as a result of N elements."""
        of_one = self.ends[-1]
        wire = torch.zeros(self.slices.parts * of_one, dtype=torch.uint8, device=like.device)
        parts, flags = [], []
        for number, mine in enumerate(self.tables):
            for cut, table, at in zip(self.slices.cuts, mine, self.ends, strict=False):
                low, high = cut.of(number)
                flags.append(table.flag_at + number * of_one + at)
                if low < high:
                    live = table if high - low == cut.size else BlockTable.over([(table, 0, 0)], 0, high - low)
                    parts.append((live, low, number * of_one + at))
        return Received(RowMemory.of(wire, like.dtype), parts, torch.cat(flags), numel, kernels)


class Between(BucketedAllReduce):
    """A BucketedAllReduce of the slices of one rank, over its peers. number: of the rank in its box."""

    def __init__(
        self, group: Group, codec: SignCodec, like: Tensor, rows: SliceRows, number: int, *, threads: int = 1
    ) -> None:
        self._row_bytes = rows.row_bytes
        slices, layout = rows.slices, rows.layouts[number]
        super().__init__(group, layout, codec, like, bucket_elements=slices.numel, cuts=slices.bounds, threads=threads)

    def received(self, slot: int) -> Tensor:
        """The rows of one of the two results, end to end: uint8[ends[-1]]."""
        return self._results[slot].wire.bytes_B

    def break_off(self) -> None:
        """Undo what is open, finished or not, because a peer was lost: redone() counts what was served. Local."""
        self._break_off()

    def _make_rows(self, block: int, like: Tensor, keeps: Keeps) -> list[BucketRows]:
        rank, size = self._group.rank, self.size
        return [
            BucketRows(bucket, self.buckets, block, rank, size, like, keeps=keeps, row_bytes=row_bytes)
            for bucket, row_bytes in zip(self.buckets, self._row_bytes, strict=True)
        ]
