"""Where do the bytes of one bucket stand? Its chunks, their block tables, and the rows that are sent and received.

    sent       one row for each rank, its chunk of what this rank gives     -> collected of that rank   all-to-all
    collected  one row from each rank, all of this rank's own chunk
    served     the mean of those, encoded                                   -> gathered of every rank   all-gather
    gathered   one row from each rank, its chunk of the result; two sets: the last result, and the one that is made
    shadow     where it is asked for: the same as sent and collected, of the chunk of the rank before this one

A row is [8-byte header: byte 0 is 1 where all of it is finite | scales of the chunk's blocks | signs]: plain.py's.
Everything is made once; a step makes no tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.comm.kernels.blocks import BlockTable
from thinwire.comm.layout import BYTE, Bucket, Span, VectorLayout, round_up

HEADER_BYTES = 8
"""One flag (1: all values finite), padded so that scales of any dtype are aligned."""


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """Views into a row, or into n rows of one chunk. flag: uint8[] or [n]; scale: float[b]; bits: uint8[c/8]."""

    flag: Tensor
    scale_b: Tensor
    bits_B: Tensor

    @classmethod
    def of(cls, wire_B: Tensor, table: BlockTable, dtype: torch.dtype) -> Row:
        """The views into rows of this table's chunk. wire: uint8[..., B]."""
        end = HEADER_BYTES + table.num_blocks * dtype.itemsize
        return cls(
            wire_B[..., 0],
            wire_B[..., HEADER_BYTES:end].view(dtype),
            wire_B[..., end : end + table.numel // BYTE],
        )

    def refuse(self) -> None:
        """Say that nothing was written: flag 0, every scale NaN."""
        self.flag.zero_()
        self.scale_b.fill_(torch.nan)


class ShadowWire:
    """Buffers for what the rank before this one serves, to know its server error too. before: that rank.

    Rank i sends to rank j what it sends to rank j - 1 as well. served: scratch.
    """

    def __init__(self, wire: BucketWire, rank: int, size: int, dtype: torch.dtype) -> None:
        self.before = (rank - 1) % size
        self.table = wire.tables[self.before]
        self.sent_nB, self.collected_nB = torch.zeros_like(wire.sent_nB), torch.zeros_like(wire.sent_nB)
        self.collected = Row.of(self.collected_nB, self.table, dtype)
        self.served = Row.of(torch.zeros_like(wire.served_B), self.table, dtype)

    def take(self, wire: BucketWire) -> None:
        """Sent <- the rows that are sent to the ranks before."""
        self.sent_nB[0].copy_(wire.sent_nB[-1])
        self.sent_nB[1:].copy_(wire.sent_nB[:-1])


class BucketWire:
    """The buffers of one bucket on one rank, and the views into them.

    chunks: the elements that each rank serves, counted from the start of the vector. tables: their blocks.
    sent_nB, collected_nB, served_B, gathered_nB[0 and 1]: uint8 buffers. sent, collected, served, gathered: their rows.
    shadow: None unless it is asked for.
    """

    def __init__(
        self, bucket: Bucket, layout: VectorLayout, block: int, rank: int, size: int, like: Tensor, *, shadow: bool
    ) -> None:
        self.bucket = bucket
        self.chunks: list[Span] = [bucket.chunk(owner, size) for owner in range(size)]
        self.tables = [BlockTable.of(layout, start, stop, block, like) for start, stop in self.chunks]
        self.own = slice(*self.chunks[rank])
        self.own_table = self.tables[rank]
        payload = max(t.num_blocks * like.element_size() + t.numel // BYTE for t in self.tables)
        row_bytes = HEADER_BYTES + round_up(payload, HEADER_BYTES)

        def rows(*shape: int) -> Tensor:
            return torch.zeros((*shape, row_bytes), dtype=torch.uint8, device=like.device)

        self.sent_nB, self.collected_nB, self.served_B = rows(size), rows(size), rows()
        self.gathered_nB = rows(size), rows(size)
        self.sent = self._rows(self.sent_nB, like.dtype)
        self.collected = Row.of(self.collected_nB, self.own_table, like.dtype)
        self.served = Row.of(self.served_B, self.own_table, like.dtype)
        self.gathered = tuple(self._rows(gathered_nB, like.dtype) for gathered_nB in self.gathered_nB)
        self.gathered_flags = tuple(gathered_nB[:, 0] for gathered_nB in self.gathered_nB)
        for row in (*self.sent, self.served):
            row.flag.fill_(1)  # a chunk without elements is never written, and finite
        self.shadow = ShadowWire(self, rank, size, like.dtype) if shadow else None

    def _rows(self, wire_nB: Tensor, dtype: torch.dtype) -> list[Row]:
        return [Row.of(wire_B, table, dtype) for wire_B, table in zip(wire_nB, self.tables, strict=True)]
