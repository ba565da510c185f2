"""Which runs of a chunk are encoded at a time? Whole chunks, or cut where a tensor may lie in memory of its own.

    chunk    |....tensor a....|..tensor b..|bias, norm, bias|
    parts    |--- a's grad ---|- b's grad -|---- vector ----|

A gradient that is read where backward left it need not be copied into the flat vector. That works for tensors that are
a segment by themselves and whole bytes of signs: then no block reaches across, and no dead element lies behind them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from thinwire.comm.bucket_wire import BucketWire, Row
from thinwire.comm.kept_sums import Kept
from thinwire.comm.kernels.blocks import BlockTable
from thinwire.comm.layout import BYTE, VectorLayout


@dataclass(frozen=True, slots=True, eq=False)
class Given:
    """What a bucket was launched with. vector: x, or g of a momentum with this beta1; None: nothing (abandoned).

    runs: what was read in place of parts of g.
    """

    vector_N: Tensor | None
    beta1: float | None = None
    runs: Sequence[Tensor | None] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Elements [start, stop) of the vector, in one chunk. run: the live run that they are of, where it stands alone.

    offset: of start in that run. row, momentum: their views in the row that is sent, and in both sets of received rows.
    """

    start: int
    stop: int
    run: int | None
    offset: int
    owner: int
    here: slice
    blocks: slice
    table: BlockTable
    row: Row
    momentum: tuple[Row, Row]

    def of_kept(self, kept: Kept) -> tuple[Tensor, Tensor]:
        """The sums and scales of these elements, of the chunk's."""
        return kept.sum_c[self.here], kept.scale_b[self.blocks]

    def given(self, vector_N: Tensor, runs: Sequence[Tensor | None]) -> Tensor:
        """What is encoded of these elements: of the run's own memory where it is given, else of the vector."""
        own = runs[self.run] if self.run is not None and runs else None
        return vector_N[self.start : self.stop] if own is None else own[self.offset : self.offset + self.table.numel]


def whole_chunks(wire: BucketWire) -> list[Part]:
    """One part a chunk that has elements."""
    return [
        Part(
            start,
            stop,
            None,
            0,
            owner,
            slice(0, table.numel),
            slice(0, table.num_blocks),
            table,
            wire.sent[owner],
            (wire.gathered[0][owner], wire.gathered[1][owner]),
        )
        for owner, ((start, stop), table) in enumerate(zip(wire.chunks, wire.tables, strict=True))
        if start < stop
    ]


def by_run(wire: BucketWire, layout: VectorLayout) -> list[Part]:
    """The chunks, cut around every run that stands alone."""
    alone = {layout.live[i]: i for i in layout.alone()}
    stops = [stop for _, stop in layout.segments]
    found = []
    for part in whole_chunks(wire):
        starts = [part.start + start for start in part.table.starts.tolist()[:-1]]
        runs = [alone.get(layout.segments[bisect_right(stops, start)]) for start in starts]
        for run, numbers in groupby(range(len(runs)), key=runs.__getitem__):
            blocks = list(numbers)
            found.append(_cut(part, slice(blocks[0], blocks[-1] + 1), run, layout, part.table))
    return found


def _cut(chunk: Part, blocks: slice, run: int | None, layout: VectorLayout, table: BlockTable) -> Part:
    bounds = table.starts.tolist()
    low, high = bounds[blocks.start], bounds[blocks.stop]
    dead_low, dead_high = table.dead_starts.tolist()[blocks.start], table.dead_starts.tolist()[blocks.stop]
    spans = [(bounds[b] - low, bounds[b + 1] - low) for b in range(blocks.start, blocks.stop)]
    dead = [at - low for at in table.dead[dead_low:dead_high].tolist()]
    like = torch.empty(0, dtype=table.live.dtype, device=table.live.device)
    return Part(
        chunk.start + low,
        chunk.start + high,
        run,
        0 if run is None else chunk.start + low - layout.live[run][0],
        chunk.owner,
        slice(low, high),
        blocks,
        BlockTable.from_spans(spans, dead, like),
        _rows(chunk.row, blocks, low, high),
        (_rows(chunk.momentum[0], blocks, low, high), _rows(chunk.momentum[1], blocks, low, high)),
    )


def _rows(row: Row, blocks: slice, low: int, high: int) -> Row:
    return Row(row.flag, row.scale_b[blocks], row.bits_B[low // BYTE : high // BYTE])
