"""Where the blocks of a bucket lie, in its vector and in wire memory, for every fused kernel.

    bucket   |------- chunk 0 -------|------- chunk 1 -------|--- chunk 2 ---|     elements, whole bytes of signs each
    wire     |--------- row 0 ---------|--------- row 1 ---------|--------- row 2 ---------|     row_bytes each
    row      |header|scales of the chunk's blocks|signs, 1 bit a value|nothing, to the next row|

Byte 0 of the header is the row's flag: 1 where all of the row is finite. Scales are in the dtype of the vector.
What is exchanged may be a vector times a factor for each live run. Runs that share a block cut it in pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from thinwire.comm.layout import BYTE, Span, VectorLayout, round_up

HEADER_BYTES = 8
"""The flag, padded so that scales of any dtype are aligned; rows are multiples of it for the same reason."""


@dataclass(frozen=True, slots=True, eq=False)
class RowMemory:
    """Memory of rows, contiguous.  bytes_B: uint8[W].  values_V: the same memory in a vector's dtype [W / itemsize]."""

    bytes_B: Tensor
    values_V: Tensor

    @classmethod
    def of(cls, bytes_B: Tensor, dtype: torch.dtype) -> RowMemory:
        """These bytes, seen in both ways. Raises: ValueError where they are no contiguous uint8[W] of whole eights."""
        whole = bytes_B.dim() == 1 and bytes_B.is_contiguous() and bytes_B.numel() % HEADER_BYTES == 0
        if not whole or bytes_B.dtype != torch.uint8:
            raise ValueError(
                f"wire memory of {bytes_B.dtype}{list(bytes_B.shape)} must be one contiguous vector of torch.uint8, a "
                f"multiple of {HEADER_BYTES} long"
            )
        return cls(bytes_B, bytes_B.view(dtype))


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class BlockTable:
    """The blocks of a bucket, or of one chunk of it; made once, on the device of the vector.

    Positions count from the table's first element.
    starts: int64[b+1], multiples of 8, from 0 to the last element's end; block i is [starts[i], starts[i+1]).
    live: float[b], live elements of a block, at least 1: a block without any then has scale 0, not 0 / 0.
    dead: int64[d], positions of dead elements, ascending.  dead_starts: int64[b+1], where each block's begin in dead.
    scale_at: int64[b], a block's scale in values_V.  bits_at: int64[b], its first byte of signs in bytes_B.
    row_starts: int64[r+1], number of the first block of each row.  flag_at: int64[r], the byte of each row's flag.
    largest: elements of the largest block.  numel: elements of all.
    row_bytes: bytes of a row; 0 where the table has no rows.  wire_bytes: the least that a RowMemory must have.
    host: the same in the host's memory, where the device has another, so that nobody waits for the device to know it.
    """

    starts: Tensor
    live: Tensor
    dead: Tensor
    dead_starts: Tensor
    scale_at: Tensor
    bits_at: Tensor
    row_starts: Tensor
    flag_at: Tensor
    largest: int
    numel: int
    row_bytes: int
    wire_bytes: int
    host: BlockTable | None = None

    @classmethod
    def of(
        cls, layout: VectorLayout, start: int, stop: int, block: int, like: Tensor, row_bytes: int | None = None
    ) -> BlockTable:
        """Of the elements [start, stop) in one row that begins at byte 0; arguments as of of_rows."""
        return cls.of_rows(layout, [(start, stop)], block, like, row_bytes)

    @classmethod
    def of_rows(
        cls, layout: VectorLayout, chunks: Sequence[Span], block: int, like: Tensor, row_bytes: int | None = None
    ) -> BlockTable:
        """Blocks of at most `block` values of adjoining chunks, one row each; the last chunks may be empty.

        like: the vector's dtype and device. row_bytes: of a row that is longer than its largest chunk needs, such as
        one chunk's in a bucket of several.
        """
        first, stop = chunks[0][0], chunks[-1][1]
        rows = [[(a - first, b - first) for a, b in layout.blocks(block, *chunk)] for chunk in chunks]
        return cls.from_spans(rows, [i - first for i in layout.dead(first, stop)], like, row_bytes)

    @classmethod
    def from_spans(
        cls, rows: Sequence[Sequence[Span]], dead: Sequence[int], like: Tensor, row_bytes: int | None = None
    ) -> BlockTable:
        """From the blocks of each row, which adjoin and begin at 0, and the ascending positions of dead elements.

        Raises: ValueError where spans leave a gap, overlap, are empty or are not whole bytes of signs, and where
        row_bytes is too little or not whole eights.
        """
        spans = [span for row in rows for span in row]
        bounds = [0, *(stop for _, stop in spans)]
        if any(span != (low, high) or high <= low for span, (low, high) in zip(spans, pairwise(bounds), strict=True)):
            raise ValueError(f"spans {spans} must adjoin, begin at 0 and hold something")
        if any(bound % BYTE for bound in bounds):
            raise ValueError(f"spans {spans} must begin and end at multiples of {BYTE}")
        starts = torch.tensor(bounds, dtype=torch.int64, device="cpu")
        row_starts = torch.tensor([0, *accumulate(len(row) for row in rows)], dtype=torch.int64, device="cpu")
        scale_bytes_r = row_starts.diff() * like.element_size()
        least = HEADER_BYTES + round_up(int((scale_bytes_r + starts[row_starts].diff() // BYTE).max()), HEADER_BYTES)
        row_bytes = least if row_bytes is None else row_bytes
        if row_bytes < least or row_bytes % HEADER_BYTES:
            raise ValueError(f"row_bytes = {row_bytes}: must be a multiple of {HEADER_BYTES}, at least {least}")
        flag_at = torch.arange(len(rows), dtype=torch.int64, device="cpu") * row_bytes
        row_b = torch.repeat_interleave(row_starts.diff())
        first_b, begin_b = row_starts[row_b], flag_at[row_b] + HEADER_BYTES
        return cls._made(
            starts,
            torch.tensor(dead, dtype=torch.int64, device="cpu"),
            begin_b // like.element_size() + torch.arange(len(spans), dtype=torch.int64, device="cpu") - first_b,
            begin_b + scale_bytes_r[row_b] + (starts[:-1] - starts[first_b]) // BYTE,
            row_starts,
            flag_at,
            row_bytes,
            len(rows) * row_bytes,
            like,
        )

    @classmethod
    def over(cls, parts: Sequence[tuple[BlockTable, int, int]], start: int, stop: int) -> BlockTable:
        """Of the elements [start, stop) of a vector that these tables make up: for reading only.

        parts: (table, at, wire_at), in any order: the table's elements begin at `at` of the vector, and its wire memory
        at byte `wire_at` of a larger RowMemory, a multiple of 8. Positions count from `start`. A cut block keeps
        its scale; its bits begin later, and `live` counts what is inside. There are no rows: row_starts is [0],
        flag_at is empty. Raises: ValueError for bounds inside a byte or outside of the parts.
        """
        like = parts[0][0].live
        parts = sorted(((table.on_host, at, wire_at) for table, at, wire_at in parts), key=lambda part: part[1])
        begin_b = torch.cat([table.starts[:-1] + at for table, at, _ in parts])
        end_b = torch.cat([table.starts[1:] + at for table, at, _ in parts])
        scale_at = torch.cat([table.scale_at + wire_at // like.element_size() for table, _, wire_at in parts])
        bits_at = torch.cat([table.bits_at + wire_at for table, _, wire_at in parts])
        dead = torch.cat([table.dead + at for table, at, _ in parts])
        low_b, high_b = begin_b.clamp(min=start), end_b.clamp(max=stop)
        inside_b = low_b < high_b
        bounds = [start, *high_b[inside_b].tolist()]
        if start % BYTE or stop % BYTE or bounds != [*low_b[inside_b].tolist(), stop]:
            end = max(at + table.numel for table, at, _ in parts)
            raise ValueError(f"span [{start}, {stop}): must be multiples of {BYTE} inside a vector of {end}")
        return cls._made(
            torch.tensor(bounds, dtype=torch.int64, device="cpu") - start,
            dead[(dead >= start) & (dead < stop)] - start,
            scale_at[inside_b],
            (bits_at + (low_b - begin_b) // BYTE)[inside_b],
            torch.zeros(1, dtype=torch.int64, device="cpu"),
            torch.zeros(0, dtype=torch.int64, device="cpu"),
            0,
            max(wire_at + table.wire_bytes for table, _, wire_at in parts),
            like,
        )

    @classmethod
    def _made(
        cls,
        starts: Tensor,
        dead: Tensor,
        scale_at: Tensor,
        bits_at: Tensor,
        row_starts: Tensor,
        flag_at: Tensor,
        row_bytes: int,
        wire_bytes: int,
        like: Tensor,
    ) -> BlockTable:
        """On the device of `like`, with what follows from the positions."""
        sizes_b, dead_starts = starts.diff(), torch.searchsorted(dead, starts)
        live = (sizes_b - dead_starts.diff()).clamp_(min=1).to(like.dtype)
        tensors = starts, live, dead, dead_starts, scale_at, bits_at, row_starts, flag_at
        numbers = max(sizes_b.tolist(), default=0), int(starts[-1]), row_bytes, wire_bytes
        host = cls(*tensors, *numbers)
        if like.device.type == "cpu":
            return host
        starts, live, dead, dead_starts, scale_at, bits_at, row_starts, flag_at = (
            on_device(x, like.device) for x in tensors
        )
        return cls(starts, live, dead, dead_starts, scale_at, bits_at, row_starts, flag_at, *numbers, host)

    @property
    def on_host(self) -> BlockTable:
        """The same in the host's memory."""
        return self if self.host is None else self.host

    @property
    def num_blocks(self) -> int:
        """Blocks, and scales of all rows."""
        return self.live.numel()


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Pieces:
    """The blocks of a table, cut where one live run ends and the next one begins: all of a piece has one factor.

    starts: int64[q+1], multiples of 8; piece i is [starts[i], starts[i+1]), from the table's first element on.
    first: int64[b+1], number of each block's first piece.  run: int64[q], the live run that each is of.
    num_runs: live runs of the layout. numel: elements of all.
    """

    starts: Tensor
    first: Tensor
    run: Tensor
    num_runs: int
    numel: int

    @classmethod
    def of(cls, table: BlockTable, start: int, layout: VectorLayout) -> Pieces:
        """Of a table whose first element is `start` of the vector. Dead elements are of the run before them."""
        at = table.on_host.starts
        begin_r = torch.tensor([low for low, _ in layout.live], dtype=torch.int64, device="cpu") - start
        bounds = {*at.tolist(), *begin_r[(begin_r > 0) & (begin_r < table.numel)].tolist()}
        starts = torch.tensor(sorted(bounds), dtype=torch.int64, device="cpu")
        run = torch.searchsorted(begin_r, starts[:-1], right=True).sub_(1).clamp_(min=0)
        first = torch.searchsorted(starts, at)
        device = table.starts.device
        places = on_device(starts, device), on_device(first, device), on_device(run, device)
        return cls(*places, len(layout.live), table.numel)

    def spread(self, factor_r: Tensor) -> Tensor:
        """Each element's factor: float[c]. factor: float[live runs]."""
        return torch.repeat_interleave(factor_r[self.run], self.starts.diff(), output_size=self.numel)


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A host's tensor in the memory of the device. Does not wait for it: what is copied from need not stay."""
    return tensor.to(device, non_blocking=True)


def spread(factor_r: Tensor, layout: VectorLayout, start: int = 0, stop: int | None = None) -> Tensor:
    """The factors of elements [start, stop) of the vector, float[stop - start]. factor: float[live runs].

    Dead elements have that of the run before them.
    """
    stop = layout.numel if stop is None else stop
    begins = [0, *(low for low, _ in layout.live[1:]), layout.numel]
    inside = [min(max(at, start), stop) for at in begins]
    lengths_r = on_device(
        torch.tensor([high - low for low, high in pairwise(inside)], dtype=torch.int64, device="cpu"), factor_r.device
    )
    return torch.repeat_interleave(factor_r, lengths_r, output_size=stop - start)
