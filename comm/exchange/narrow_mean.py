"""The mean of a gradient in fewer bits, bucket by bucket: for warm-ups and dense optimizers.

    begin(memory)    launch(0, x) ... launch(K-1, x)    finish()

The exchange of plain.py with a codec of 8 or 16 bits, in the two phases of bucketed.py, in place of the ring of
full_mean.py:

    launch    encode a row of x + worker error for each rank, and keep what that leaves out; all-to-all
    serve     encode the mean of the decoded rows, added up in full, + server error, and keep what that leaves out;
              all-gather
    receive   x <- the decoded rows, a bucket behind
    finish    errors <- what was kept        out + R' = mean_i x_i + R

Every rank decodes the same bytes, so the result is bit-identical on all. What both encodings leave out is kept beside
the error memory, and takes its place when the last collective has succeeded, which costs nothing: a mean that failed
need not be undone. x is undefined then, R is as before. Without a memory what the encodings leave out is dropped. Wire
memory is made at the first begin() and let go of by release(): 3 bytes an element with 8 bits, twice that with 16, 4
for what is left out, and 4 / ranks for what is served.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from thinwire.comm.codecs.bf16 import Bf16Codec
from thinwire.comm.codecs.int8 import Int8Codec
from thinwire.comm.errors import CommError, NonFiniteInput
from thinwire.comm.exchange.full_mean import FullMean
from thinwire.comm.exchange.pipeline import Pipeline, settle
from thinwire.comm.exchange.stepwise import REFUSED, gather_flags, leave, non_finite, whole_or_left
from thinwire.comm.kernels.blocks import HEADER_BYTES
from thinwire.comm.kernels.choose import int8_launcher, warm_up_int8
from thinwire.comm.kernels.cuda.int8 import CudaInt8
from thinwire.comm.kernels.cuda.launch import Launcher
from thinwire.comm.layout import Bucket, Buckets, round_up
from thinwire.comm.protocol import Codec, ErrorMemory, Errors, FullMeans, FullWire, Group, LeavingRow, Pending
from thinwire.comm.signals import deferred

CODECS: dict[str, Callable[[], Codec]] = {"bf16": Bf16Codec, "int8": Int8Codec}
"""How a mean may be sent, beside fp32."""


class NarrowRows:
    """The rows of one bucket on one rank: as BucketRows, of a codec that is not of signs.

    left_c: what encoding what this rank serves leaves out; without error memory what it serves. Becomes error memory.
    """

    def __init__(self, bucket: Bucket, buckets: Buckets, codec: Codec, rank: int, size: int, like: Tensor) -> None:
        self.span = slice(bucket.start, bucket.stop)
        self.chunks = [slice(*bucket.chunk(owner, size)) for owner in range(size)]
        self.own = self.chunks[rank]
        self.codecs: list[LeavingRow] = [codec.row(buckets.layout, at.start, at.stop, like) for at in self.chunks]  # type: ignore[misc]
        self.codec = self.codecs[rank]
        row_bytes = HEADER_BYTES + round_up(max(one.wire_bytes for one in self.codecs), HEADER_BYTES)
        self.sent_nB = torch.zeros((size, row_bytes), dtype=torch.uint8, device=like.device)
        self.collected_nB, self.gathered_nB = torch.zeros_like(self.sent_nB), torch.zeros_like(self.sent_nB)
        self.served_B = torch.zeros_like(self.sent_nB[0])
        self.left_c = torch.zeros(self.own.stop - self.own.start, dtype=like.dtype, device=like.device)

    def encode(self, x_N: Tensor) -> None:
        """sent <- x, a row for each rank's chunk."""
        for codec, at, row_B in zip(self.codecs, self.chunks, self.sent_nB, strict=True):
            row_B[0] = codec.encode(x_N[at], row_B[HEADER_BYTES:])

    def encode_left(self, x_N: Tensor, error_b: Tensor, left_b: Tensor) -> None:
        """sent <- x + error; left <- what that leaves out. error, left: of the bucket."""
        start = self.span.start
        for codec, chunk, row_B in zip(self.codecs, self.chunks, self.sent_nB, strict=True):
            at = slice(chunk.start - start, chunk.stop - start)
            row_B[0] = codec.encode_left(x_N[chunk], error_b[at], left_b[at], row_B[HEADER_BYTES:])

    def fuse(self) -> Tensor:
        """What makes what this rank serves unusable, spoilt: the flag of the first collected row."""
        return self.collected_nB[0, :1]

    def refuse(self, flag: int) -> None:
        """sent <- rows that hold nothing."""
        self.sent_nB.zero_()
        self.sent_nB[:, 0] = flag

    def serve(self, error_c: Tensor | None) -> None:
        """served <- the mean of what was collected, in rank order, + the error; left <- what that leaves out."""
        collected_nB = self.collected_nB[:, HEADER_BYTES:]
        finite = self.codec.mean_left(collected_nB, error_c, self.left_c, self.served_B[HEADER_BYTES:])
        self.served_B[0] = finite & (self.collected_nB[:, 0] == 1).all()

    def decode_(self, out_N: Tensor) -> None:
        """out <- the result."""
        for codec, at, row_B in zip(self.codecs, self.chunks, self.gathered_nB, strict=True):
            codec.decode(row_B[HEADER_BYTES:], out_N[at])


class KernelRows(NarrowRows):
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

    def encode(self, x_N: Tensor) -> None:
        """sent <- x, a row for each rank's chunk."""
        self._all.encode(x_N[self.span], self.sent_nB)

    def encode_left(self, x_N: Tensor, error_b: Tensor, left_b: Tensor) -> None:
        """sent <- x + error; left <- what that leaves out. error, left: of the bucket."""
        torch.add(x_N[self.span], error_b, out=left_b)
        self._all.encode(left_b, self.sent_nB)
        self._all.left_out(self.sent_nB, left_b, left_b)

    def serve(self, error_c: Tensor | None) -> None:
        """served <- the mean of what was collected, in rank order, + the error; left <- what that leaves out."""
        self._own.mean(self.collected_nB, error_c, self.left_c)
        self._own.encode(self.left_c, self._served_1B, self.collected_nB)
        if error_c is not None:
            self._own.left_out(self._served_1B, self.left_c, self.left_c)

    def decode_(self, out_N: Tensor) -> None:
        """out <- the result."""
        self._all.decode(self.gathered_nB, out_N[self.span])


def rows_of(bucket: Bucket, buckets: Buckets, codec: Codec, rank: int, size: int, like: Tensor) -> NarrowRows:
    """The rows of one bucket, by kernels where there are some."""
    launcher = int8_launcher(like.device, like.dtype) if isinstance(codec, Int8Codec) else None
    if launcher is None or not isinstance(codec, Int8Codec):
        return NarrowRows(bucket, buckets, codec, rank, size, like)
    return KernelRows(launcher, codec.block, bucket, buckets, codec, rank, size, like)


class NarrowMean:
    """Means of vectors of one layout through a codec, one at a time. Every rank calls alike.

    second: the group's second communicator, or the group itself. pipeline: what serves while others are encoded.
    """

    def __init__(
        self, group: Group, second: Group, buckets: Buckets, codec: Codec, like: Tensor, pipeline: Pipeline
    ) -> None:
        self._group, self._second, self._pipeline = group, second, pipeline
        self._stats = group.stats
        self._buckets, self._codec, self._like = buckets, codec, like.new_empty(0)
        self._rows: list[NarrowRows] = []
        self._phase_1: list[Pending | None] = []
        self._phase_2: list[Pending | None] = []
        self._launched: list[Tensor | None] = []
        """What was launched of each bucket; None: a refusal, or a bucket of a mean that was given up."""
        self._memory: ErrorMemory | None = None
        self._errors: Errors | None = None
        self._left: list[Tensor] = []
        """Of each bucket, what its encoding leaves out; becomes error memory, whose place it takes."""
        self._error: BaseException | None = None
        self._not_received: CommError | None = None
        self._num_served = 0
        self._refuses = False
        self._lost: tuple[ErrorMemory | None, bool] | None = None
        """The memory of a mean that was undone, and whether all of it was served."""
        self.is_open = False

    @property
    def num_launched(self) -> int:
        """Buckets launched; the next one to launch is of this number."""
        return len(self._launched)

    @property
    def has_lost(self) -> bool:
        """Was the last mean undone because a peer was lost?"""
        return self._lost is not None

    def begin(self, memory: ErrorMemory | None = None) -> None:
        """Open a mean that keeps in `memory` what it leaves out. Local. Raises: RuntimeError where one is open."""
        if self.is_open:
            raise RuntimeError("a mean is open: finish() or abandon() it before the next begin()")
        if not self._rows:
            rank, size = self._group.rank, self._group.size
            made = [rows_of(one, self._buckets, self._codec, rank, size, self._like) for one in self._buckets]
            self._rows, self._phase_1, self._phase_2 = made, [None] * len(made), [None] * len(made)
        self._memory, self._errors = memory, None if memory is None else memory.errors()
        if self._errors is not None and not self._left:
            sizes = [rows.span.stop - rows.span.start for rows in self._rows]
            self._left = list(torch.split(self._like.new_empty(sum(sizes)), sizes))
        self._lost, self.is_open = None, True

    def release(self) -> None:
        """Let go of wire memory; the next begin() makes it anew."""
        if not self.is_open:
            self._rows, self._phase_1, self._phase_2, self._left, self._lost = [], [], [], [], None

    def launch(self, k: int, x_N: Tensor) -> None:
        """Encode bucket k of x and send it, in order. x: float[N], contiguous; bucket k belongs to it until finish().

        Raises: RuntimeError, ValueError for a wrong call. A lost peer is told by finish().
        """
        self._expect(k)
        if x_N.shape != (self._buckets.layout.numel,) or not x_N.is_contiguous():
            raise ValueError(
                f"vector of {list(x_N.shape)}: must be contiguous, of {self._buckets.layout.numel} elements"
            )
        with whole_or_left(self._group, self._break_off), self._pipeline.fed():
            began, rows = time.perf_counter(), self._rows[k]
            if self._errors is None:
                rows.encode(x_N)
            else:
                rows.encode_left(x_N, self._errors.worker[k], self._left[k])
            self._stats.encode_s += time.perf_counter() - began
            self._send(k, x_N)

    def launch_refused(self, k: int) -> None:
        """Send in place of bucket k that this rank takes no part: every rank raises Refused in finish()."""
        self._expect(k)
        self._refuses = True
        with whole_or_left(self._group, self._break_off), self._pipeline.fed():
            self._rows[k].refuse(REFUSED)
            self._send(k, None)

    def finish(self) -> None:
        """Wait for all buckets; x is the mean then, and the errors are kept. Waits for the device once.

        Raises: PeerLost; NonFiniteInput, alike on every rank. Then x is undefined and the errors are as before. No mean
        is open after it.
        """
        with whole_or_left(self._group, self._break_off):
            self._finish(keep=True)

    def abandon(self) -> None:
        """End a mean that nobody will use; nothing happens where none is open. x is undefined, errors are as before.

        Collective: buckets not launched yet are sent as unusable, so that a rank that waits in finish() gets
        NonFiniteInput instead of waiting for ever. Raises: PeerLost.
        """
        if not self.is_open:
            return
        with whole_or_left(self._group, self._break_off):
            with self._pipeline.fed():
                for k in range(len(self._launched), len(self._rows)):
                    self._rows[k].refuse(0)
                    self._send(k, None)
            try:
                self._finish(keep=False)
            except NonFiniteInput:
                return

    def forget(self) -> None:
        """End a mean of which nothing was launched; where peers may wait for it, leave the group."""
        if self._launched:
            leave(self._group)
        self._break_off()

    @contextmanager
    def redone(self) -> Iterator[bool]:
        """Inside, a mean that lost a peer counts in its memory: another rank has its whole result.

        Local. Gives whether this rank had served all of it; where not, nothing is done, and no rank can have it.
        """
        memory, whole = self._lost or (None, False)
        if memory is None or not whole:
            yield whole
            return
        counts = False
        try:
            with deferred(to_the_end=True):
                self._keep(memory)
                counts = True
            yield True
        finally:  # also where a peer is lost inside: the next attempt begins from the same
            if counts:
                self._keep(memory)

    def _keep(self, memory: ErrorMemory) -> None:
        """What was left out and the errors take each other's place."""
        before = memory.swap_errors(Errors(self._left, [rows.left_c for rows in self._rows]))
        self._left = list(before.worker)
        for rows, left_c in zip(self._rows, before.server, strict=True):
            rows.left_c = left_c

    def _expect(self, k: int) -> None:
        if not self.is_open or k != len(self._launched):
            raise RuntimeError(f"bucket {k}: begin() first, then launch buckets in order; {len(self._launched)} are")

    def _send(self, k: int, x_N: Tensor | None) -> None:
        self._launched.append(x_N)
        if self._error is not None or self._pipeline.failed:
            return  # a peer is lost: nobody will answer
        rows = self._rows[k]
        try:
            self._phase_1[k] = self._group.start_all_to_all(rows.collected_nB, rows.sent_nB)
        except CommError as error:
            self._error = error
            return
        self._pipeline.submit(self._serve, k)

    def _serve(self, k: int) -> None:
        """The second half of bucket k. In the pipeline's thread, where it has one."""
        pending, rows = self._phase_1[k], self._rows[k]
        assert pending is not None
        self._pipeline.hold(pending)
        self._phase_1[k] = None
        self._pipeline.admit(k, rows.fuse)
        rows.serve(None if self._errors is None else self._errors.server[k])
        self._num_served = k + 1
        self._phase_2[k] = self._second.start_all_gather(rows.gathered_nB, rows.served_B)
        if k:
            self._receive(k - 1)

    def _receive(self, k: int) -> None:
        """The end of bucket k, which is there, or nearly, when the next one is served.

        Where it does not come this rank serves on: others may have it, and the whole result then.
        """
        x_N, pending = self._launched[k], self._phase_2[k]
        assert pending is not None
        self._phase_2[k] = None
        try:
            self._pipeline.hold(pending)
        except CommError as error:
            self._not_received = self._not_received or error
            return
        if x_N is not None:
            self._rows[k].decode_(x_N)

    def _finish(self, *, keep: bool) -> None:
        launched, complete = self._launched, self.is_open and len(self._launched) == len(self._rows)
        began = time.perf_counter()
        self._settle()
        is_finite = complete and self._error is None and self._all_finite()
        self._stats.waited_s += time.perf_counter() - began
        error, memory, refuses, num_served = self._error, self._memory, self._refuses, self._num_served
        self._close()
        if error is not None:
            if isinstance(error, CommError):
                served = self._pipeline.admitted(num_served)
                whole = served == len(launched) == len(self._rows) and all(x_N is not None for x_N in launched)
                self._lost = memory, whole
            raise error
        if not complete:
            raise RuntimeError(f"{len(launched)} of {len(self._rows)} buckets launched: launch every bucket first")
        if not is_finite:
            own = torch.stack([rows.sent_nB[:, 0].amin() for rows in self._rows]).amin()
            raise non_finite(gather_flags(self._group, own.fill_(REFUSED) if refuses else own))
        if not keep:
            return
        last_N = launched[-1]
        assert last_N is not None
        self._rows[-1].decode_(last_N)
        if memory is not None:
            self._keep(memory)

    def _settle(self) -> None:
        """Wait until no collective touches a buffer. The first error stays in _error; later ones follow from it."""
        raised = settle(self._pipeline, self._phase_1, self._phase_2)
        self._error = self._error or self._not_received or raised

    def _all_finite(self) -> bool:
        """Could every server write all of its rows? Waits for the device. A peer that is lost is noted in _error."""
        flags = torch.stack([rows.gathered_nB[:, 0] for rows in self._rows])
        try:
            return bool(self._pipeline.host((flags == 1).all()))
        except CommError as error:
            self._error = error
            return False

    def _break_off(self) -> None:
        """Close what this rank alone does not go on with. Where nothing is open, nothing."""
        if self.is_open:
            self._settle()
            self._close()

    def _close(self) -> None:
        self._launched, self._memory, self._errors, self._num_served = [], None, None, 0
        self._error = self._not_received = None
        self.is_open = self._refuses = False


def means_of(
    wire: FullWire, group: Group, second: Group, buckets: Buckets, like: Tensor, pipeline: Pipeline
) -> FullMeans:
    """Means over a group of several ranks that are sent so. Local. Raises: ValueError for a wire that is none."""
    if wire == "fp32":
        return FullMean(group, buckets, like, pipeline)
    if wire not in CODECS:
        raise ValueError(f'full exchange = {wire!r}: must be "fp32", "bf16" or "int8"')
    if wire == "int8" and like.device.type == "cpu":
        warm_up_int8(like.dtype)  # not in the first exchange, where peers would wait for it
    return NarrowMean(group, second, buckets, CODECS[wire](), like, pipeline)
