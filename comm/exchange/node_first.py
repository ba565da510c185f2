"""By node first: exact inside a box, one bit between boxes, rows back inside a box.

    bucket of x, on L ranks of a box    all-to-all: rank l has slice l of all L; their mean, added up in order of rank
    slice l, on the B boxes             an exchange of signs, with boxes in the place of ranks
    rows of slice l                     all-gather in the box: every rank has the rows of all slices, 1/32 of the floats

What is compressed is the mean of a box, so that boxes, not ranks, have worker errors:

    R = mean over boxes of worker errors + server errors, on each slice

An error memory of slices takes (4 + 4 / boxes) / L bytes an element of the whole vector, in fp32. Every rank decodes
the same bytes, and the rows are the result, as in sign.py. Between boxes a rank sends 1/L of what it would, for its own
slice alone. The last all-gather says on every rank of a box, and so on every rank, whether all slices are there: until
then everything can be undone, and a rank that has it knows that all ranks have served.

A vector is cut so that rank l of every box owns slice l of every bucket:

    vector    |---------------- bucket 1 ----------------|---- bucket 0 ----|
    slices    |--- 0 ---|--- 1 ---|--- 2 ---|--- 3 ---   |- 0 |- 1 |- 2 |- 3|    equal, whole bytes of signs
    of rank 1           |--- 1 ---|                            |- 1 |           lie end to end, as a vector of their own

All slices of a bucket are of one size, so that they cross in equal rows; where it does not divide the bucket, the last
ones reach beyond its end, and what is there is dead. Scales keep to segments, which end where a slice does.

The structure is that of hierarchical all-reduces, which do the same with sums in full, as here the mean of a gradient
in fp32 does (sums.py). In bf16 it goes from every rank to every other.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from thinwire.comm.codecs.sign import SignCodec
from thinwire.comm.errors import NonFiniteInput
from thinwire.comm.exchange.coder import Coder, Given
from thinwire.comm.exchange.exchange import Exchange
from thinwire.comm.exchange.fidelity import Fidelity
from thinwire.comm.exchange.held import Move
from thinwire.comm.exchange.memory import ErrorMemory
from thinwire.comm.exchange.pipeline import pipeline_for
from thinwire.comm.exchange.rows import Received
from thinwire.comm.exchange.sign import SignCoder
from thinwire.comm.groups.nodes import Nodes
from thinwire.comm.kernels.blocks import BlockTable, RowMemory
from thinwire.comm.kernels.choose import kernels_for
from thinwire.comm.kernels.fused_reference import Kernels
from thinwire.comm.layout import Buckets, Partition, Span, VectorLayout
from thinwire.comm.protocol import Pending


class NodeCoder(Coder):
    """Vectors of one layout over boxes of as many ranks each.

    buckets: multiples of as many bytes of signs as a box has ranks, so that slices need no copy.
    """

    sits_out = False

    def __init__(self, nodes: Nodes, buckets: Buckets, codec: SignCodec, like: Tensor, *, threads: int = 1) -> None:
        super().__init__(buckets, like)
        self._nodes, self._numel = nodes, buckets.layout.numel
        self._slices = Slices(buckets, nodes.box.size)
        rows = SliceRows(self._slices, nodes.peers.size, codec.block, like)
        peers, second, slices = nodes.peers, nodes.peers.second_communicator(), self._slices.buckets(nodes.number)
        self._signs = SignCoder(
            peers,
            second,
            slices,
            codec,
            like,
            threads=threads,
            row_bytes=rows.row_bytes,
            where=OfSlices(nodes, self._slices, self._numel),
        )
        self._between = Exchange(peers, self._signs, pipeline_for(peers, second, like, len(slices)))
        kernels = kernels_for(like.device, like.dtype, threads)
        self.results = [rows.assembled(self._numel, kernels, like) for _ in range(2)]
        self._failed_B = torch.zeros(rows.ends[-1], dtype=torch.uint8, device=like.device)
        self._own_M = like.new_zeros(self._slices.numel)
        """Of what was launched, the mean of the box on this rank's slices."""
        self._start_M: Tensor | None = None
        self._runs = torch.tensor(self._slices.runs(nodes.number), dtype=torch.int64, device=like.device)
        """Of each live run of these slices, which run of the vector it is of."""
        self._staged: list[tuple[Tensor, Tensor] | None] = [None] * len(buckets)
        """Of each bucket a row for each rank of the box, sent and collected, while they are on their way."""
        self._rooms: list[Tensor] = []
        self._taken: list[list[Tensor]] = [[] for _ in range(len(buckets))]
        """Scratch that is free, and that of each bucket on its way inside the box."""

    def new_memory(self) -> ErrorMemory:
        """Error memory for one exchanged vector, empty: of this rank's slices."""
        return self._signs.new_memory()

    def owns(self, memory: ErrorMemory) -> bool:
        """Was it made here?"""
        return self._signs.owns(memory)

    def begin(self, memory: ErrorMemory | None, draw: int) -> None:
        """Open the exchange between boxes."""
        self._between.draw = draw
        self._between.begin(memory)
        self._start_M = None

    def form(self, k: int, given: Given) -> Tensor | None:
        """Bucket k of what crosses the box. Of a lerp that is x: r is the same on all ranks, and the mean is exact."""
        if given.form is not None:
            return given.form(slice(*self.buckets.spans[k]))
        parts = self.parts_of(k, given)
        return parts[0] if len(parts) == 1 else torch.cat([part.to(self.like.dtype) for part in parts])

    def encode(self, k: int, given: Given, formed_b: Tensor | None) -> None:
        """A row for each rank of the box: what was formed itself, where it is just that."""
        assert formed_b is not None
        if given.start_N is not None and self._start_M is None:
            self._start_M = self._slices.take(given.start_N, self._nodes.number)
        cut, rows_Lc = self._slices.cuts[k], formed_b
        if formed_b.numel() == cut.size * self._slices.parts:
            rows_Lc = formed_b.view(self._slices.parts, cut.size)
        else:
            rows_Lc = self._room(k)
            rows_Lc.view(-1)[: formed_b.numel()].copy_(formed_b)
            rows_Lc.view(-1)[formed_b.numel() :].zero_()
        self._staged[k] = rows_Lc, self._room(k)

    def encode_nothing(self, k: int) -> None:
        """Not to be had. Raises: RuntimeError."""
        raise RuntimeError("a rank of a box cannot give nothing alone")

    def refuse(self, k: int, flag: int) -> None:
        """NaN."""
        self._staged[k] = self._room(k).fill_(torch.nan), self._room(k)

    def send(self, k: int) -> Sequence[Pending]:
        """The slices of the other ranks of the box."""
        staged = self._staged[k]
        assert staged is not None
        sent_Lc, collected_Lc = staged
        return (self._nodes.box.start_all_to_all(collected_Lc.view(torch.uint8), sent_Lc.view(torch.uint8)),)

    def fuse(self, k: int) -> Tensor | None:
        """The first collected row."""
        staged = self._staged[k]
        assert staged is not None
        return staged[1][0]

    def serve(self, k: int, given: Given) -> None:
        """The mean of the box on this rank's slice of bucket k, and its exchange with other boxes begun."""
        staged = self._staged[k]
        assert staged is not None
        own_c = self._own_M[self._slices.cuts[k].own]
        first, second, *others = staged[1]
        torch.add(first, second, out=own_c)
        for row in others:
            own_c.add_(row)
        own_c.div_(own_c.new_full((), self._slices.parts))
        self._free(k)
        if given.weight is None:
            self._between.launch_sum(k, self._own_M)
            return
        start_M = None if given.start_N is None else self._start_M
        factor_r = given.factor_r
        if factor_r is not None:  # slices beyond the end of a tiny vector have no run
            factor_r = factor_r[self._runs] if len(self._runs) else None
        self._between.launch_lerp(k, self._own_M, given.weight, (), start_M, factor_r)

    def finite(self) -> Tensor:
        """Wait for the exchange with other boxes, and gather the rows of all slices. Collective. Raises: PeerLost."""
        own_B = self._failed_B
        try:
            self._between.finish()
            own_B = self._signs_made(1 - self._signs.turn).wire.bytes_B
        except NonFiniteInput:
            pass  # all peers of this rank alike
        made = self.results[1 - self.turn]
        assert isinstance(made, Received)
        self._nodes.box.all_gather(made.wire.bytes_B.view(self._slices.parts, -1), own_B)
        return made.finite()

    def own_flag(self, given: Sequence[Given]) -> Tensor:
        """As far as it can be seen here."""
        flag = torch.ones((), dtype=torch.uint8, device=self.like.device)
        for k, one in enumerate(given):
            if not one.usable:
                return flag.zero_()
            formed_b = self.form(k, one)
            assert formed_b is not None
            flag.logical_and_(torch.isfinite(torch.linalg.vector_norm(formed_b).square()))
        return flag

    def undo(self, given: Sequence[Given], num_served: int, *, lost: bool) -> None:
        """Undo the exchange between boxes: where a peer was lost so that redone() counts what was served."""
        for k in range(len(self._staged)):
            self._free(k)
        if lost:
            self._between.break_off()
        else:
            self._between.abandon()

    def keep(self) -> None:
        """That of the exchange between boxes."""
        self._between.commit()

    def remember(self) -> object | None:
        """The exchange between boxes does, as its mean is still here."""
        return "between"

    @contextmanager
    def redone(self, memory: ErrorMemory | None, given: Sequence[Given], remembered: object) -> Iterator[bool]:
        """A rank that has a whole result has it from ranks that have all served."""
        with self._between.redone() as counts:
            yield counts

    def fidelity(self, memory: ErrorMemory) -> Fidelity | None:
        """The mean over slices."""
        found = self._signs.fidelity(memory)
        densities: tuple[float | None, ...] = (None, None, None)
        if found is not None:
            densities = (found.worker_density, found.server_density, found.residual_ratio)
        known = self.like.new_tensor([[0.0, 0.0] if one is None else [one, 1.0] for one in densities]).flatten()
        self._nodes.whole.mean_(known)
        means = [total / count if count else None for total, count in known.view(3, 2).tolist()]
        return Fidelity(*means)

    def _signs_made(self, slot: int) -> Received:
        found = self._signs.results[slot]
        assert isinstance(found, Received)
        return found

    def _room(self, k: int) -> Tensor:
        """Scratch for bucket k, float[L, c], until _free(k)."""
        cut = self._slices.cuts[k]
        needed = cut.size * self._slices.parts
        at = next((i for i, room in enumerate(self._rooms) if room.numel() >= needed), None)
        room = self.like.new_empty(needed) if at is None else self._rooms.pop(at)
        self._taken[k].append(room)
        return room[:needed].view(self._slices.parts, cut.size)

    def _free(self, k: int) -> None:
        """Nothing reads or writes the scratch of bucket k any more."""
        self._staged[k] = None
        self._rooms += self._taken[k]
        self._taken[k] = []


class OfSlices:
    """The slices of one rank of every box, of a vector of N elements. A Where."""

    def __init__(self, nodes: Nodes, slices: Slices, numel: int) -> None:
        self.group, self.workers, self.numel = nodes.whole, nodes.peers.size, numel
        self.moves = slices.moves(nodes.number)
        self._nodes, self._slices = nodes, slices

    def take(self, x_N: Tensor) -> Tensor:
        """This rank's slices, new."""
        return self._slices.take(x_N, self._nodes.number)

    def put(self, x_M: Tensor, out_N: Tensor | None) -> Tensor:
        """Each in its place."""
        x_N = self._slices.put(x_M, self._nodes.number, self.numel)
        return x_N if out_N is None else out_N.copy_(x_N)

    def holders(self, holders: int, missing: Collection[int]) -> int:
        """Those that own the same slices."""
        return self._nodes.holders(tuple(missing))


class SliceRows:
    """The rows of the slices of all ranks of a box, among B boxes. tables[l][k]: of the slice of rank l of bucket k.

    All ranks of a box send rows of one length for a bucket, though segments end elsewhere in each slice: so the same
    collectives, of the same sizes, in every part of a group, and rows that an all-gather can bring together.
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


@dataclass(frozen=True, slots=True)
class Cut:
    """The slices of one bucket. start, stop: of it in the vector. at: where a slice begins among those of its rank.

    size: elements of a slice.
    """

    start: int
    stop: int
    at: int
    size: int

    def of(self, number: int) -> Span:
        """[start, stop) in the vector of slice `number`, without what lies beyond the bucket."""
        low = min(self.start + number * self.size, self.stop)
        return low, min(low + self.size, self.stop)

    @property
    def own(self) -> slice:
        """Of a slice among those of its rank."""
        return slice(self.at, self.at + self.size)


class Slices:
    """The slices of all buckets of a vector, among `parts` ranks. numel: M, elements of the slices of one rank."""

    def __init__(self, buckets: Buckets, parts: int) -> None:
        self.parts = parts
        self._layout = buckets.layout
        cuts: list[Cut] = []
        at = 0
        for start, stop in buckets.spans[::-1]:
            cuts.append(Cut(start, stop, at, Partition(stop - start, parts).chunk))
            at += cuts[-1].size
        self.cuts = cuts[::-1]
        """Of each bucket, in the order of exchange."""
        self.numel = at

    def buckets(self, number: int) -> Buckets:
        """Of the slices of rank `number` of a box."""
        return Buckets(self.layout(number), tuple((cut.at, cut.at + cut.size) for cut in self.cuts))

    def layout(self, number: int) -> VectorLayout:
        """Of the slices of rank `number` of a box, end to end."""
        live: list[Span] = []
        segments: list[Span] = []
        for cut in self.cuts[::-1]:
            low, high = cut.of(number)
            live += _inside(self._layout.live, low, high, cut.at)
            segments += _inside(self._layout.segments, low, high, cut.at)
            beyond = cut.at + high - low, cut.at + cut.size
            if beyond[0] < beyond[1]:
                segments.append(beyond)
        return VectorLayout(self.numel, tuple(live), tuple(segments))

    def runs(self, number: int) -> list[int]:
        """Of each live run of layout(number), which run of the vector it is of."""
        found: list[int] = []
        for cut in self.cuts[::-1]:
            low, high = cut.of(number)
            found += [i for i, (start, stop) in enumerate(self._layout.live) if max(start, low) < min(stop, high)]
        return found

    def moves(self, number: int) -> tuple[Move, ...]:
        """Where the slices of rank `number` stand in the vector, and among themselves."""
        found = ((*cut.of(number), cut.at) for cut in self.cuts[::-1])
        return tuple((low, high, at) for low, high, at in found if low < high)

    def take(self, x_N: Tensor, number: int) -> Tensor:
        """The slices of a vector that are of rank `number`: float[M], new, 0 beyond its end."""
        slices_M = x_N.new_zeros(self.numel)
        for low, high, at in self.moves(number):
            slices_M[at : at + high - low] = x_N[low:high]
        return slices_M

    def put(self, slices_M: Tensor, number: int, numel: int) -> Tensor:
        """The inverse: float[N], new, 0 where other slices are."""
        x_N = torch.zeros(numel, dtype=slices_M.dtype, device=slices_M.device)
        for low, high, at in self.moves(number):
            x_N[low:high] = slices_M[at : at + high - low]
        return x_N


def _inside(spans: tuple[Span, ...], low: int, high: int, to: int) -> Iterator[Span]:
    """What of ascending spans lies in [low, high), counted from `to` on."""
    first = bisect_right(spans, low, key=lambda span: span[1])
    last = bisect_left(spans, high, key=lambda span: span[0])
    for start, stop in spans[first:last]:
        cut = max(start, low), min(stop, high)
        if cut[0] < cut[1]:
            yield cut[0] - low + to, cut[1] - low + to
