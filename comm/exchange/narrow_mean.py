"""The mean of a gradient in fewer bits, bucket by bucket: for warm-ups and dense optimizers.

    begin(memory)    launch(0, x) ... launch(K-1, x)    finish()

The exchange of plain.py with a codec of 8 or 16 bits, in the two phases of bucketed.py, in place of the ring of
full_mean.py:

    launch    x <- x + worker error; encode a row for each rank; all-to-all
    serve     b <- mean of the decoded rows, added up in full, + server error; encode; all-gather
    finish    errors <- what both encodings left out;  x <- the decoded rows        out + R' = mean_i x_i + R

Every rank decodes the same bytes, so the result is bit-identical on all. Nothing is written into error memory before
the last collective has succeeded, so that a mean that failed need not be undone: x is undefined then, R is as before.
Without a memory what the encodings leave out is dropped. Wire memory is made at the first begin() and let go of by
release(): 3 bytes an element with 8 bits, twice that with 16, and 4 / ranks for what is served.
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
from thinwire.comm.protocol import AddingRow, Codec, ErrorMemory, Errors, FullMeans, FullWire, Group, Pending

CODECS: dict[str, Callable[[], Codec]] = {"bf16": Bf16Codec, "int8": Int8Codec}
"""How a mean may be sent, beside fp32."""


class NarrowRows:
    """The rows of one bucket on one rank: as BucketRows, of a codec that is not of signs."""

    def __init__(self, bucket: Bucket, buckets: Buckets, codec: Codec, rank: int, size: int, like: Tensor) -> None:
        self.span = slice(bucket.start, bucket.stop)
        self.chunks = [slice(*bucket.chunk(owner, size)) for owner in range(size)]
        self.own = self.chunks[rank]
        self.codecs: list[AddingRow] = [codec.row(buckets.layout, at.start, at.stop, like) for at in self.chunks]  # type: ignore[misc]
        self.codec = self.codecs[rank]
        row_bytes = HEADER_BYTES + round_up(max(one.wire_bytes for one in self.codecs), HEADER_BYTES)
        self.sent_nB = torch.zeros((size, row_bytes), dtype=torch.uint8, device=like.device)
        self.collected_nB, self.gathered_nB = torch.zeros_like(self.sent_nB), torch.zeros_like(self.sent_nB)
        self.served_B = torch.zeros_like(self.sent_nB[0])
        self.sum_c = torch.zeros(self.own.stop - self.own.start, dtype=like.dtype, device=like.device)

    def encode(self, x_N: Tensor) -> None:
        """sent <- x, a row for each rank's chunk."""
        for codec, at, row_B in zip(self.codecs, self.chunks, self.sent_nB, strict=True):
            row_B[0] = codec.encode(x_N[at], row_B[HEADER_BYTES:])

    def fuse(self) -> Tensor:
        """What makes what this rank serves unusable, spoilt: the flag of the first collected row."""
        return self.collected_nB[0, :1]

    def refuse(self, flag: int) -> None:
        """sent <- rows that hold nothing."""
        self.sent_nB.zero_()
        self.sent_nB[:, 0] = flag

    def serve(self, error_c: Tensor | None) -> None:
        """served <- the mean of what was collected, in rank order, + the error."""
        self.sum_c.zero_()
        for row_B in self.collected_nB:
            self.codec.add(row_B[HEADER_BYTES:], self.sum_c)
        self.sum_c.div_(self.sum_c.new_full((), len(self.collected_nB)))
        if error_c is not None:
            self.sum_c.add_(error_c)
        finite = self.codec.encode(self.sum_c, self.served_B[HEADER_BYTES:])
        self.served_B[0] = finite & (self.collected_nB[:, 0] == 1).all()

    def keep_errors(self, x_N: Tensor, errors: Errors, k: int) -> None:
        """Errors <- what was left out of x, which is what was encoded, and of what was served."""
        x_b, worker_b, start = x_N[self.span], errors.worker[k], self.span.start
        for codec, chunk, row_B in zip(self.codecs, self.chunks, self.sent_nB, strict=True):
            at = slice(chunk.start - start, chunk.stop - start)
            codec.left_out(row_B[HEADER_BYTES:], x_b[at], worker_b[at])
        self.codec.left_out(self.served_B[HEADER_BYTES:], self.sum_c, errors.server[k])

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

    def serve(self, error_c: Tensor | None) -> None:
        """served <- the mean of what was collected, in rank order, + the error."""
        self._own.mean(self.collected_nB, error_c, self.sum_c)
        self._own.encode(self.sum_c, self._served_1B, self.collected_nB)

    def keep_errors(self, x_N: Tensor, errors: Errors, k: int) -> None:
        """Errors <- what was left out of x, which is what was encoded, and of what was served."""
        self._all.left_out(self.sent_nB, x_N[self.span], errors.worker[k])
        self._own.left_out(self._served_1B, self.sum_c, errors.server[k])

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
        self._errors: Errors | None = None
        self._error: BaseException | None = None
        self._num_served = 0
        self._refuses = False
        self._lost: tuple[Errors | None, tuple[Tensor | None, ...]] | None = None
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
        self._errors = None if memory is None else memory.errors()
        self._lost, self.is_open = None, True

    def release(self) -> None:
        """Let go of wire memory; the next begin() makes it anew."""
        if not self.is_open:
            self._rows, self._phase_1, self._phase_2, self._lost = [], [], [], None

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
            if self._errors is not None:
                x_N[rows.span].add_(self._errors.worker[k])
            rows.encode(x_N)
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
        errors, launched = self._lost or (None, ())
        if errors is None or len(launched) < len(self._rows):
            yield self._lost is not None and errors is None and len(launched) == len(self._rows)
            return
        every = [*errors.worker, *errors.server]
        before = [error_c.clone() for error_c in every]
        for k, (rows, x_N) in enumerate(zip(self._rows, launched, strict=True)):
            assert x_N is not None
            rows.keep_errors(x_N, errors, k)
        try:
            yield True
        finally:  # also where a peer is lost inside: the next attempt begins from the same
            for error_c, kept_c in zip(every, before, strict=True):
                error_c.copy_(kept_c)

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

    def _finish(self, *, keep: bool) -> None:
        launched, complete = self._launched, self.is_open and len(self._launched) == len(self._rows)
        began = time.perf_counter()
        self._settle()
        is_finite = complete and self._error is None and self._all_finite()
        self._stats.waited_s += time.perf_counter() - began
        error, errors, refuses, num_served = self._error, self._errors, self._refuses, self._num_served
        self._close()
        if error is not None:
            if isinstance(error, CommError):
                served = self._pipeline.admitted(num_served)
                whole = served == len(self._rows) and all(x_N is not None for x_N in launched)
                self._lost = errors, tuple(launched) if whole else ()
            raise error
        if not complete:
            raise RuntimeError(f"{len(launched)} of {len(self._rows)} buckets launched: launch every bucket first")
        if not is_finite:
            own = torch.stack([rows.sent_nB[:, 0].amin() for rows in self._rows]).amin()
            raise non_finite(gather_flags(self._group, own.fill_(REFUSED) if refuses else own))
        if not keep:
            return
        for k, (rows, x_N) in enumerate(zip(self._rows, launched, strict=True)):
            assert x_N is not None
            if errors is not None:
                rows.keep_errors(x_N, errors, k)
            rows.decode_(x_N)

    def _settle(self) -> None:
        """Wait until no collective touches a buffer. The first error stays in _error; later ones follow from it."""
        raised = settle(self._pipeline, self._phase_1, self._phase_2)
        self._error = self._error or raised

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
        self._launched, self._errors, self._error, self._num_served = [], None, None, 0
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
