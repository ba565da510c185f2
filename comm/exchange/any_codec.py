"""Rows of any Codec, with error feedback: means in 8 or 16 bits, and codecs that nobody has fused.  [Tang et al. 2021]

    launch    encode a row of x + worker error for each rank, and keep what that leaves out; all-to-all
    serve     encode the mean of the decoded rows, added up in full, + server error, and keep what that leaves out;
              all-gather
    receive   x <- the decoded rows, a bucket behind; or the rows stay, as the result
    keep      errors <- what was kept        out + R' = mean_i x_i + R

Every rank decodes the same bytes, so the result is bit-identical on all. What both encodings leave out is kept beside
the error memory, and takes its place when the exchange counts, which costs nothing: one that failed need not be undone.
Without an error memory what the encodings leave out is dropped. Wire memory is made at the first begin() and let go of
by release(): 3 bytes an element with 8 bits, twice that with 16, 4 for what is left out, and 4 / ranks for what is
served. What the fused exchange of signs is held against.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from thinwire.comm.codecs.int8 import Int8Codec
from thinwire.comm.exchange.coder import Coder, Given, Values
from thinwire.comm.exchange.memory import ErrorMemory, Errors, Place, Served, Whole
from thinwire.comm.kernels.blocks import HEADER_BYTES
from thinwire.comm.kernels.choose import int8_launcher
from thinwire.comm.kernels.cuda.int8 import CudaInt8
from thinwire.comm.kernels.cuda.launch import Launcher
from thinwire.comm.layout import Bucket, Buckets, round_up
from thinwire.comm.protocol import Codec, Group, LeavingRow, Pending, RowCodec
from thinwire.comm.signals import deferred


class CodecRows:
    """The rows of one bucket on one rank. sent, collected: one for each rank; served: one.

    left_c: what encoding what this rank serves leaves out; without error memory what it serves. Becomes error memory.
    """

    def __init__(self, bucket: Bucket, buckets: Buckets, codec: Codec, rank: int, size: int, like: Tensor) -> None:
        self.span = slice(bucket.start, bucket.stop)
        self.chunks = [slice(*bucket.chunk(owner, size)) for owner in range(size)]
        self.own = self.chunks[rank]
        self.codecs = [leaving(codec.row(buckets.layout, at.start, at.stop, like)) for at in self.chunks]
        self.codec = self.codecs[rank]
        row_bytes = HEADER_BYTES + round_up(max(one.wire_bytes for one in self.codecs), HEADER_BYTES)
        self.sent_nB = torch.zeros((size, row_bytes), dtype=torch.uint8, device=like.device)
        self.collected_nB = torch.zeros_like(self.sent_nB)
        self.served_B = torch.zeros_like(self.sent_nB[0])
        self.left_c = torch.zeros(self.own.stop - self.own.start, dtype=like.dtype, device=like.device)

    def encode(self, x_b: Tensor) -> None:
        """sent <- x, a row for each rank's chunk. x: of the bucket."""
        for codec, at, row_B in zip(self.codecs, self._inside, self.sent_nB, strict=True):
            row_B[0] = codec.encode(x_b[at], row_B[HEADER_BYTES:])

    def encode_left(self, x_b: Tensor, error_b: Tensor, left_b: Tensor) -> None:
        """sent <- x + error; left <- what that leaves out. All of the bucket."""
        for codec, at, row_B in zip(self.codecs, self._inside, self.sent_nB, strict=True):
            row_B[0] = codec.encode_left(x_b[at], error_b[at], left_b[at], row_B[HEADER_BYTES:])

    def refuse(self, flag: int) -> None:
        """sent <- rows that hold nothing."""
        self.sent_nB.zero_()
        self.sent_nB[:, 0] = flag

    def serve(self, error_c: Tensor | None) -> None:
        """served <- the mean of what was collected, in rank order, + the error; left <- what that leaves out."""
        collected_nB = self.collected_nB[:, HEADER_BYTES:]
        finite = self.codec.mean_left(collected_nB, error_c, self.left_c, self.served_B[HEADER_BYTES:])
        self.served_B[0] = finite & (self.collected_nB[:, 0] == 1).all()

    def decode_(self, rows_nB: Tensor, out_b: Tensor) -> None:
        """out <- what these gathered rows say. out: of the bucket."""
        for codec, at, row_B in zip(self.codecs, self._inside, rows_nB, strict=True):
            codec.decode(row_B[HEADER_BYTES:], out_b[at])

    @property
    def _inside(self) -> list[slice]:
        """The chunks, counted from the start of the bucket."""
        start = self.span.start
        return [slice(at.start - start, at.stop - start) for at in self.chunks]


class KernelRows(CodecRows):
    """The same in 8 bits on a GPU: a launch does all rows of the bucket."""

    def __init__(
        self,
        launcher: Launcher,
        run: int,
        bucket: Bucket,
        buckets: Buckets,
        codec: Codec,
        rank: int,
        size: int,
        like: Tensor,
    ) -> None:
        super().__init__(bucket, buckets, codec, rank, size, like)
        bounds = [(at.start - self.span.start, at.stop - self.span.start) for at in self.chunks]
        self._all = CudaInt8(launcher, bounds, run, like.device)
        self._own = CudaInt8(launcher, [(0, self.own.stop - self.own.start)], run, like.device)
        self._served_1B = self.served_B.view(1, -1)

    def encode(self, x_b: Tensor) -> None:
        """sent <- x, a row for each rank's chunk."""
        self._all.encode(x_b, self.sent_nB)

    def encode_left(self, x_b: Tensor, error_b: Tensor, left_b: Tensor) -> None:
        """sent <- x + error; left <- what that leaves out. All of the bucket."""
        self._all.encode_left(x_b, error_b, left_b, self.sent_nB)

    def serve(self, error_c: Tensor | None) -> None:
        """served <- the mean of what was collected, in rank order, + the error; left <- what that leaves out."""
        self._own.serve(self.collected_nB, error_c, self.left_c, self._served_1B)

    def decode_(self, rows_nB: Tensor, out_b: Tensor) -> None:
        """out <- what these gathered rows say."""
        self._all.decode(rows_nB, out_b)


def rows_of(bucket: Bucket, buckets: Buckets, codec: Codec, rank: int, size: int, like: Tensor) -> CodecRows:
    """The rows of one bucket, by kernels where there are some."""
    launcher = int8_launcher(like.device, like.dtype) if isinstance(codec, Int8Codec) else None
    if launcher is None or not isinstance(codec, Int8Codec):
        return CodecRows(bucket, buckets, codec, rank, size, like)
    return KernelRows(launcher, codec.block, bucket, buckets, codec, rank, size, like)


class CodecCoder(Coder):
    """Rows of one codec, of vectors of one layout over one group. second: its second communicator, or the group itself.

    keeps_results: the result stays until the next exchange but one; else it takes the place of what was launched.
    """

    serves_on = True
    takes_ranges = True

    def __init__(
        self, group: Group, second: Group, buckets: Buckets, codec: Codec, like: Tensor, *, keeps_results: bool
    ) -> None:
        super().__init__(buckets, like)
        self.keeps_results = keeps_results
        self._group, self._second, self._codec = group, second, codec
        rank, size = group.rank, group.size
        self._places = [
            Place(
                Served(slice(bucket.start, bucket.stop), None, rank),
                Served(slice(*bucket.chunk(rank, size)), None, rank),
            )
            for bucket in buckets
        ]
        self._rows: list[CodecRows] = []
        self._received: list[list[Tensor]] = []
        """Sets of gathered rows, of each bucket uint8[n, B]: one, or two that take turns as results do."""
        self._memory: ErrorMemory | None = None
        self._errors: Errors | None = None
        self._decoded: list[Values] = []
        self._left: list[Tensor] = []
        """Of each bucket, what its encoding leaves out; becomes error memory, whose place it takes."""

    def new_memory(self) -> ErrorMemory:
        """Error memory for one exchanged vector, empty: errors."""
        return ErrorMemory(self._places, Whole(self._group, self.buckets.layout.numel), self.like)

    def owns(self, memory: ErrorMemory) -> bool:
        """Was it made here? Means keep errors in memories of the exchange that is compressed, too."""
        return memory.places is self._places or not self.keeps_results

    def begin(self, memory: ErrorMemory | None, draw: int) -> None:
        """Make rows, where there are none, and find the errors."""
        if not self._rows:
            rank, size = self._group.rank, self._group.size
            self._rows = [rows_of(one, self.buckets, self._codec, rank, size, self.like) for one in self.buckets]
            sets = 2 if self.keeps_results else 1
            self._received = [[torch.zeros_like(one.sent_nB) for one in self._rows] for _ in range(sets)]
            if self.keeps_results:
                self._decoded = [Values(partial(self._decode, received)) for received in self._received]
                self.results = self._decoded
        if self.keeps_results:
            self._decoded[1 - self.turn].forget()  # of some buckets, which may have been read since they were kept
        self._memory, self._errors = memory, None
        if memory is not None:
            self._errors = memory.kept_errors() if self.keeps_results else memory.errors()
            if not self._left:
                sizes = [rows.span.stop - rows.span.start for rows in self._rows]
                self._left = list(torch.split(self.like.new_empty(sum(sizes)), sizes))

    def release(self) -> None:
        """Let go of wire memory; results stay."""
        if not self.results:
            self._rows, self._received, self._left = [], [], []

    def encode(self, k: int, given: Given, formed_b: Tensor | None) -> None:
        """A row for each rank."""
        assert formed_b is not None
        if self._errors is None:
            self._rows[k].encode(formed_b)
        else:
            self._rows[k].encode_left(formed_b, self._errors.worker[k], self._left[k])

    def encode_nothing(self, k: int) -> None:
        """What the codec makes of zeros; the errors are what is left out."""
        rows = self._rows[k]
        rows.encode(self.like.new_zeros(rows.span.stop - rows.span.start))
        if self._errors is not None:
            self._left[k].copy_(self._errors.worker[k])

    def refuse(self, k: int, flag: int) -> None:
        """Rows of zeros, with this flag."""
        self._rows[k].refuse(flag)

    def send(self, k: int) -> Sequence[Pending]:
        """The rows to their servers."""
        rows = self._rows[k]
        return (self._group.start_all_to_all(rows.collected_nB, rows.sent_nB),)

    def fuse(self, k: int) -> Tensor | None:
        """The flag of the first collected row."""
        return self._rows[k].collected_nB[0, :1]

    def serve(self, k: int, given: Given) -> None:
        """Encode the mean of what was collected."""
        self._rows[k].serve(None if self._errors is None else self._errors.server[k])

    def pass_on(self, k: int) -> Pending | None:
        """What is served, to all."""
        return self._second.start_all_gather(self._gathered(k), self._rows[k].served_B)

    def receive(self, k: int, given: Given) -> None:
        """x <- the result."""
        if given.vector_N is not None:
            rows = self._rows[k]
            rows.decode_(self._gathered(k), given.vector_N[rows.span])

    def finite(self) -> Tensor:
        """Could every server write all of its rows?"""
        flags = torch.stack([self._gathered(k)[:, 0] for k in self.at])
        return (flags == 1).all()

    def own_flag(self, given: Sequence[Given]) -> Tensor:
        """Of the rows that were sent."""
        return torch.stack([self._rows[k].sent_nB[:, 0].amin() for k in self.at]).amin()

    def keep(self) -> None:
        """What was left out and the errors take each other's place."""
        if self._memory is not None:
            self._exchange_errors(self._memory)
        self._memory = self._errors = None
        if self.keeps_results:
            self._decoded[self.turn].forget()  # nobody reads it any more: its floats are not kept

    def merge(self) -> None:
        """Their rows."""
        for k in self.at:
            self._received[self.turn][k].copy_(self._gathered(k))

    def remember(self) -> object | None:
        """What was left out is still here."""
        return "left"

    @contextmanager
    def redone(self, memory: ErrorMemory | None, given: Sequence[Given], remembered: object) -> Iterator[bool]:
        """What was left out is the error memory, inside."""
        if memory is None:
            yield True
            return
        counts = False
        try:
            with deferred(to_the_end=True):
                self._exchange_errors(memory)
                counts = True
            yield True
        finally:  # also where a peer is lost inside: the next attempt begins from the same
            if counts:
                self._exchange_errors(memory)

    def undo(self, given: Sequence[Given], num_served: int, *, lost: bool) -> None:
        """Nothing was written but a result that nobody has."""
        self._memory = self._errors = None
        if self.keeps_results:
            self._decoded[1 - self.turn].forget()

    def _gathered(self, k: int) -> Tensor:
        """Of the exchange under way."""
        return self._received[-1 - self.turn][k]

    def _decode(self, received: Sequence[Tensor]) -> Tensor:
        out_N = self.like.new_zeros(self.buckets.layout.numel)
        is_made = received is self._received[1 - self.turn]  # of the exchange, not of all that came before
        for k in self.at if is_made else range(len(self._rows)):
            self._rows[k].decode_(received[k], out_N[self._rows[k].span])
        return out_N

    def _exchange_errors(self, memory: ErrorMemory) -> None:
        at = self.at
        rows = self._rows[at.start : at.stop]
        left = Errors(self._left[at.start : at.stop], [one.left_c for one in rows])
        before = memory.swap_errors(left, at)
        self._left[at.start : at.stop] = before.worker
        for one, left_c in zip(rows, before.server, strict=True):
            one.left_c = left_c


def leaving(codec: RowCodec) -> LeavingRow:
    """The codec itself where it says what it leaves out in the pass that encodes; else one that decodes it again."""
    return codec if isinstance(codec, LeavingRow) else _Leaving(codec)


class _Leaving:
    """Error feedback around a codec that has none of its own."""

    def __init__(self, codec: RowCodec) -> None:
        self.wire_bytes, self.encode, self.decode = codec.wire_bytes, codec.encode, codec.decode

    def encode_left(self, x_c: Tensor, error_c: Tensor, left_c: Tensor, row_B: Tensor) -> Tensor:
        """As encode of x + error. left: modified: x + error - what the row says."""
        torch.add(x_c, error_c, out=left_c)
        return self._sent(left_c, row_B)

    def mean_left(self, rows_nB: Tensor, error_c: Tensor | None, left_c: Tensor, row_B: Tensor) -> Tensor:
        """As encode of the mean of rows, added up in their order, + error. left: as of encode_left."""
        left_c.zero_()
        decoded_c = torch.empty_like(left_c)
        for one_B in rows_nB:
            self.decode(one_B, decoded_c)
            left_c.add_(decoded_c)
        left_c.div_(left_c.new_full((), len(rows_nB)))
        if error_c is None:
            return self.encode(left_c, row_B)
        left_c.add_(error_c)
        return self._sent(left_c, row_B)

    def _sent(self, left_c: Tensor, row_B: Tensor) -> Tensor:
        finite = self.encode(left_c, row_B)
        decoded_c = torch.empty_like(left_c)
        self.decode(row_B, decoded_c)
        left_c.sub_(decoded_c)
        return finite
