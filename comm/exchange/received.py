"""What do the received rows say? The result of the exchange that is being made, and of the last one committed.

Each rank holds the same rows: n of each bucket. They are the result in 1/32 of its size, and are decoded where it is
used: into a vector, into the parameters, or by the next encoding, whose momentum they are.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.comm.exchange.rows import BucketWire, Row
from thinwire.comm.kernels.blocks import BlockTable
from thinwire.comm.kernels.choose import Kernels
from thinwire.comm.layout import BYTE, VectorLayout


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Elements [start, stop) of the vector that lie in one row: the views of both sets of rows, and their blocks."""

    start: int
    stop: int
    scale_b: tuple[Tensor, Tensor]
    bits_B: tuple[Tensor, Tensor]
    table: BlockTable


class Received:
    """The two sets of gathered rows of all buckets. `last` is the index of the one that was committed last."""

    def __init__(self, wires: Sequence[BucketWire], layout: VectorLayout, block: int, kernels: Kernels) -> None:
        self.last = 0
        self._wires = wires
        self._layout = layout
        self._block = block
        self._kernels = kernels
        self._dtype = wires[0].own_table.live.dtype
        self._device = wires[0].own_table.live.device
        self._pieces: dict[tuple[int, int], list[Piece]] = {}
        self._finite_K = torch.ones(len(wires), dtype=torch.uint8, device=self._device)
        self._each_finite = list(self._finite_K.unbind())
        self._finite = torch.ones((), dtype=torch.uint8, device=self._device)

    @property
    def next(self) -> int:
        """The set that the exchange under way writes."""
        return 1 - self.last

    def rows(self, bucket: int) -> list[Row]:
        """Of the result committed last, by the rank that served them."""
        return self._wires[bucket].gathered[self.last]

    def all_finite(self) -> bool:
        """Whether every server could write all of its new rows: the same on every rank. Waits for the device."""
        for wire, finite in zip(self._wires, self._each_finite, strict=True):
            torch.amin(wire.gathered_flags[self.next], 0, out=finite)
        torch.amin(self._finite_K, 0, out=self._finite)
        return bool(self._finite)

    def decode_(self, out_N: Tensor, which: int) -> None:
        """Out <- the result in set `which`, 0 where dead."""
        for piece in self._cut(0, self._layout.numel):
            out_c = out_N[piece.start : piece.stop]
            self._kernels.decode(piece.scale_b[which], piece.bits_B[which], piece.table, out_c)

    def descend_(
        self, p_N: Tensor, divisor_N: Tensor, lr: float, decay: float, which: int, start: int, stop: int
    ) -> None:
        """P <- p (1 - decay) - lr m D in [start, stop), m being the result in set `which`."""
        for piece in self._cut(start, stop):
            at = slice(piece.start, piece.stop)
            scale_b, bits_B = piece.scale_b[which], piece.bits_B[which]
            self._kernels.descend(p_N[at], divisor_N[at], scale_b, bits_B, lr, decay, piece.table)

    def _cut(self, start: int, stop: int) -> list[Piece]:
        """The pieces of [start, stop) by bucket and owner; found once. Raises: ValueError for bounds inside a byte."""
        found = self._pieces.get((start, stop))
        if found is None:
            if start % BYTE or stop % BYTE or not 0 <= start <= stop <= self._layout.numel:
                raise ValueError(
                    f"span [{start}, {stop}): must be multiples of {BYTE} inside a vector of {self._layout.numel}"
                )
            found = [
                self._piece(wire, owner, max(start, low), min(stop, high))
                for wire in self._wires
                for owner, (low, high) in enumerate(wire.chunks)
                if max(start, low) < min(stop, high)
            ]
            self._pieces[start, stop] = found
        return found

    def _piece(self, wire: BucketWire, owner: int, start: int, stop: int) -> Piece:
        low, high = wire.chunks[owner]
        last, new = wire.gathered[0][owner], wire.gathered[1][owner]
        if (start, stop) == (low, high):
            return Piece(start, stop, (last.scale_b, new.scale_b), (last.bits_B, new.bits_B), wire.tables[owner])
        bounds = wire.tables[owner].starts.tolist()
        blocks = slice(bisect_right(bounds, start - low) - 1, bisect_left(bounds, stop - low))
        bits = slice((start - low) // BYTE, (stop - low) // BYTE)
        like = torch.empty(0, dtype=self._dtype, device=self._device)
        table = BlockTable.of(self._layout, start, stop, self._block, like)
        return Piece(
            start,
            stop,
            (last.scale_b[blocks], new.scale_b[blocks]),
            (last.bits_B[bits], new.bits_B[bits]),
            table,
        )
