"""One scale for all of a vector, whichever ranks serve it: how the papers and DeepSpeed share scales.

    flat vector        |a....|b..|c.......|            as optim.engine.flat lays it, with dead elements in between
    vectors            a b | c                         lists of its runs, end to end; each has a scale of its own
    exchanged vector   |chunk 0 of ab|chunk 0 of c| |chunk 1 of ab|chunk 1 of c| ...

Our own layout keeps a scale inside one rank's chunk, so that a chunk is encoded by itself. Here a vector has one scale
on the way to the servers, sent in every row, and one a chunk on the way back: rank j serves chunk j of every vector.
DeepSpeed pads each vector to a multiple of n lcm(n, 8), and its padding counts: it is in the scales and has errors.
The exchange is that of comm.exchange.plain, on the exchanged vector; error memory speaks of the flat one, for any n.

Source: Tang et al. 2021, Alg. 1; DeepSpeed 0.19.6, runtime/comm/nccl.py and runtime/fp16/onebit.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.comm.codecs import SignCodec
from thinwire.comm.default import given_or_default
from thinwire.comm.exchange.error_feedback import ErrorFeedback
from thinwire.comm.exchange.held import Held
from thinwire.comm.exchange.plain import CompressedAllReduce
from thinwire.comm.exchange.solo import SoloReducer
from thinwire.comm.kernels.blocks import HEADER_BYTES
from thinwire.comm.layout import BYTE, Partition, Span, VectorLayout, round_up
from thinwire.comm.protocol import ErrorMemory, Group, Reducer, RowCodec

Runs = Sequence[Span]
"""One vector: runs of live elements of a flat vector, laid end to end in this order."""


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Where the live elements of a flat vector stand in the exchanged one.

    layout: of the exchanged vector, a segment for each piece that has a scale. moves: (start, stop, to) of each run.
    num_vectors: scales in a row. keep_padding: what came back for the padding goes into the next exchange.
    """

    layout: VectorLayout
    moves: tuple[tuple[int, int, int], ...]
    num_vectors: int
    keep_padding: bool = False

    @classmethod
    def whole(cls, runs: Runs) -> Arrangement:
        """The papers': one vector, padded to a whole byte at its end with elements that are not live."""
        moves, at = [], 0
        for start, stop in runs:
            moves.append((start, stop, at))
            at += stop - start
        numel = round_up(at, BYTE)
        return cls(VectorLayout(numel, ((0, at),), ((0, numel),)), tuple(moves), 1)

    @classmethod
    def deepspeed(cls, vectors: Sequence[Runs], size: int, *, keep_padding: bool = False) -> Arrangement:
        """DeepSpeed's for `size` ranks: every vector padded by itself, with elements that are live."""
        multiple = size * lcm(size, BYTE)
        chunks = [round_up(sum(stop - start for start, stop in runs), multiple) // size for runs in vectors]
        row = sum(chunks)
        moves: list[tuple[int, int, int]] = []
        for index, (runs, chunk) in enumerate(zip(vectors, chunks, strict=True)):
            offset, at = sum(chunks[:index]), 0
            for start, stop in runs:
                while start < stop:
                    rank, inside = divmod(at, chunk)
                    length = min(stop - start, chunk - inside)
                    moves.append((start, start + length, rank * row + offset + inside))
                    start, at = start + length, at + length
        segments, at = [], 0
        for chunk in chunks * size:
            segments.append((at, at + chunk))
            at += chunk
        return cls(VectorLayout(at, ((0, at),), tuple(segments)), tuple(moves), len(vectors), keep_padding)

    def padding(self) -> list[Span]:
        """The runs of the exchanged vector that no element of the flat one stands in."""
        taken = sorted((to, to + stop - start) for start, stop, to in self.moves)
        edges = [0, *(edge for run in taken for edge in run), self.layout.numel]
        return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]

    def scatter_(self, out_P: Tensor, x_N: Tensor) -> None:
        """out <- the live elements of x, each in its place; the rest of out stays."""
        torch._foreach_copy_(*self._views(out_P, x_N))

    def gather_(self, out_N: Tensor, x_P: Tensor) -> None:
        """out <- x, each live element in its place; dead elements of out stay."""
        arranged, flat = self._views(x_P, out_N)
        torch._foreach_copy_(flat, arranged)

    def _views(self, x_P: Tensor, x_N: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        arranged = [x_P[to : to + stop - start] for start, stop, to in self.moves]
        return arranged, [x_N[start:stop] for start, stop, _ in self.moves]


@dataclass(frozen=True, slots=True)
class VectorSignCodec:
    """SignCodec with a block a segment; its rows hold scales that VectorScaleAllReduce makes common to all rows."""

    arrangement: Arrangement
    name: ClassVar[str] = "vector_sign"

    def row(self, layout: VectorLayout, start: int, stop: int, like: Tensor) -> RowCodec:
        """The codec of one chunk."""
        return SignCodec(layout.numel).row(layout, start, stop, like)

    def fingerprint(self) -> int:
        """32 bits of name and arrangement."""
        return zlib.crc32(f"{self.name}:{self.arrangement}".encode())


class ArrangedErrors(ErrorFeedback):
    """Error memory of the exchanged vector, that is saved and loaded as R of the flat one.

    The padding's R, and what is kept of the padding, are not saved: together they came from nothing and are nothing.
    """

    __slots__ = ("_arrangement", "_numel", "padding_q")

    def __init__(self, arrangement: Arrangement, numel: int, group: Group, like: Tensor) -> None:
        super().__init__(arrangement.layout, group, like.dtype, like.device)
        self._arrangement, self._numel = arrangement, numel
        kept = sum(stop - start for start, stop in arrangement.padding()) if arrangement.keep_padding else 0
        self.padding_q = torch.zeros(kept, dtype=like.dtype, device=like.device)

    def share(self, holders: int, missing: Collection[int] = (), out_N: Tensor | None = None) -> Tensor:
        """As ErrorFeedback.share, of the flat vector."""
        part_P = super().share(holders, missing)
        part_N = part_P.new_zeros(self._numel) if out_N is None else out_N.zero_()
        self._arrangement.gather_(part_N, part_P)
        return part_N

    def restore(self, residual_N: Tensor) -> None:
        """Hold R, in the server errors. Local. Raises: ValueError where R is of another length."""
        if residual_N.shape != (self._numel,):
            raise ValueError(
                f"residual of {tuple(residual_N.shape)} does not fit error memory of ({self._numel},): it was saved by "
                "a model with other parameters"
            )
        residual_P = torch.zeros_like(self.worker_N)
        self._arrangement.scatter_(residual_P, residual_N)
        super().restore(residual_P)
        self.padding_q.zero_()

    def held(self) -> Held:
        """As ErrorFeedback.held, with what is kept of the padding."""
        held = super().held()
        return replace(held, numel=self._numel, moves=self._arrangement.moves, padding_q=self.padding_q.clone())

    def _take(self, held: Held) -> None:
        super()._take(held)
        self.padding_q.copy_(held.padding_q)

    def _take_part(self, worker_N: Tensor) -> None:
        worker_P = torch.zeros_like(self.worker_N)
        self._arrangement.scatter_(worker_P, worker_N)
        super()._take_part(worker_P)
        self.padding_q.zero_()


class VectorScaleAllReduce(CompressedAllReduce):
    """A CompressedAllReduce whose worker scales are those of whole vectors, and whose vectors are arranged for it.

    flat: the layout of what is launched. Collective, as CompressedAllReduce. Raises: WireMismatch, PeerLost.
    """

    def __init__(self, group: Group, flat: VectorLayout, arrangement: Arrangement, like: Tensor) -> None:
        layout = arrangement.layout
        super().__init__(group, layout, VectorSignCodec(arrangement), like, given=flat)
        self._arrangement = arrangement
        self._padding = arrangement.padding() if arrangement.keep_padding else []
        self._exchanged_P = like.new_zeros(layout.numel)
        chunks = [Partition(layout.numel, group.size).bounds(rank) for rank in range(group.size)]
        live = [
            [b - a - len(layout.dead(a, b)) for a, b in layout.blocks(layout.numel, start, stop)]
            for start, stop in chunks
            if start < stop
        ]
        self._live_rv = torch.tensor(live, dtype=like.dtype, device=like.device)  # r: rows that are not empty

    def new_memory(self) -> ArrangedErrors:
        """Error memory for one exchanged vector, empty."""
        return ArrangedErrors(self._arrangement, self.buckets.layout.numel, self._group, self._like)

    def begin(self, memory: ErrorMemory) -> None:
        """As CompressedAllReduce.begin."""
        if not isinstance(memory, ArrangedErrors):
            raise TypeError(f"memory is {type(memory).__name__}: must come from new_memory() of this reducer")
        super().begin(memory)

    def commit(self) -> None:
        """As CompressedAllReduce.commit; what came back for padding that is kept goes into the next exchange."""
        memory, result = self._open(), self.result
        super().commit()
        if self._padding and isinstance(memory, ArrangedErrors):
            self._decode_rows(result.wire_nB, self._exchanged_P)
            torch.cat([self._exchanged_P[start:stop] for start, stop in self._padding], out=memory.padding_q)

    def _arrange_(self, out_P: Tensor, x_N: Tensor, memory: ErrorFeedback) -> None:
        out_P.zero_()
        self._arrangement.scatter_(out_P, x_N)
        if self._padding and isinstance(memory, ArrangedErrors):
            lengths = [stop - start for start, stop in self._padding]
            for (start, stop), kept in zip(self._padding, torch.split(memory.padding_q, lengths), strict=True):
                out_P[start:stop] = kept

    def _decode_(self, wire_nB: Tensor, out_N: Tensor) -> None:
        self._decode_rows(wire_nB, self._exchanged_P)
        out_N.zero_()
        self._arrangement.gather_(out_N, self._exchanged_P)

    def _encode_rows(self, x_N: Tensor, wire_nB: Tensor) -> Tensor:
        """Rows whose scales are those of the whole vectors: a root of the mean square of their chunks' scales."""
        finite = super()._encode_rows(x_N, wire_nB)
        num_rows, num_vectors = self._live_rv.shape
        end = HEADER_BYTES + num_vectors * x_N.element_size()
        scales_rv = wire_nB[:num_rows, HEADER_BYTES:end].view(x_N.dtype)
        whole_v = (scales_rv.square() * self._live_rv).sum(0).div_(self._live_rv.sum(0)).sqrt_()
        scales_rv.copy_(whole_v.expand_as(scales_rv))
        return finite & torch.isfinite(whole_v).all()


def whole_vector_reducer(group: Group | None, layout: VectorLayout, runs: Runs, like: Tensor) -> Reducer:
    """The papers' exchange: one scale for all of `runs`, in this order. group, layout, like: as in default_reducer."""
    group = given_or_default(group)
    if group.size == 1:
        return SoloReducer(group, layout, like)
    return VectorScaleAllReduce(group, layout, Arrangement.whole(runs), like)


def deepspeed_reducer(
    group: Group | None, layout: VectorLayout, vectors: Sequence[Runs], like: Tensor, *, keep_padding: bool = False
) -> Reducer:
    """DeepSpeed's exchange, one scale for each of `vectors`. A group of one exchanges nothing.

    keep_padding: as 1-bit LAMB's fused buffer. group, layout, like: as in default_reducer. Collective.
    Raises: WireMismatch, PeerLost.
    """
    group = given_or_default(group)
    if group.size == 1:
        return SoloReducer(group, layout, like)
    arrangement = Arrangement.deepspeed(vectors, group.size, keep_padding=keep_padding)
    return VectorScaleAllReduce(group, layout, arrangement, like)
