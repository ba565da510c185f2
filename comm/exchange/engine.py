"""How does one exchange go, bucket by bucket, and how is it taken back? The steps below BucketedAllReduce.

    bucket 0   encode | all-to-all | serve | all-gather |
    bucket 1            encode     | all-to-all         | serve | all-gather |
    bucket 2                         encode             | all-to-all  ...

The caller encodes and starts the all-to-all; a pipeline waits for it, serves and starts the all-gather on the group's
second communicator, so that on each all ranks have one order. Kept sums are written in place on the way, and undone
where the exchange fails: c <- c' - z, exact to rounding (4 ulp of the largest |c|). The result takes the place of the
last one only at commit().

    begin(slot)    launch_*(0) ... launch_*(K-1)    finish()    decode_ | descend_    commit()
                                                    raises: everything is undone, nothing is open
    abandon()      at any point: everything is undone
    redone()       after a lost peer: what this rank would keep if it counted, for another rank has the result
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from thinwire.comm.errors import CommError, NonFiniteInput
from thinwire.comm.exchange.error_feedback import ErrorMemory
from thinwire.comm.exchange.kept_sums import KeptSums
from thinwire.comm.exchange.parts import Given, Part, by_run
from thinwire.comm.exchange.pipeline import InlinePipeline, Pipeline, ThreadPipeline
from thinwire.comm.exchange.plain import gather_flags, non_finite
from thinwire.comm.exchange.received import Received
from thinwire.comm.exchange.rows import BucketWire, Row
from thinwire.comm.exchange.shadow import follow, followed
from thinwire.comm.kernels.choose import kernels_for, warm_up
from thinwire.comm.layout import Buckets
from thinwire.comm.protocol import Group, Pending


class BucketExchange:
    """Exchanges of one vector in buckets, one at a time. Every rank calls alike; construction is collective.

    buckets: the cut, also for readers. threads: cores that a kernel may use.
    """

    def __init__(
        self, group: Group, buckets: Buckets, block: int, like: Tensor, threads: int = 1, *, shadow: bool = False
    ) -> None:
        self.buckets = buckets
        self._group = group
        self._lane = group.second_communicator()
        self._like = like.new_empty(0)
        self._kernels = kernels_for(like.device, like.dtype, threads)
        if like.device.type == "cpu":
            warm_up(like.dtype)  # not in the first exchange, where peers would wait for it
        layout = buckets.layout
        self._wires = [
            BucketWire(bucket, layout, block, group.rank, group.size, like, shadow=shadow) for bucket in buckets
        ]
        self._received = Received(self._wires, layout, block, self._kernels)
        self._parts: list[list[list[Part]]] = [[] for _ in self._wires]
        """Of each bucket, of each chunk, where some of the gradient may lie elsewhere; made when it first does."""
        self._pipeline = self._make_pipeline()
        self._first: list[Pending | None] = [None] * len(buckets)
        self._shadowed: list[Pending | None] = [None] * len(buckets)
        self._second: list[Pending | None] = [None] * len(buckets)
        self._given: list[Given] = []
        self._num_served = 0
        self._error: Exception | None = None
        self._slot: KeptSums | None = None
        self._finished = False
        self._last: tuple[KeptSums, int] | None = None
        self._lost: tuple[KeptSums, tuple[Given, ...], int] | None = None

    @property
    def is_open(self) -> bool:
        """Has begin() been called, and neither commit(), nor abandon(), nor anything that raised a CommError?"""
        return self._slot is not None

    @property
    def num_launched(self) -> int:
        """Buckets launched in the open exchange; the next one to launch is of this number."""
        return len(self._given)

    def new_slot(self) -> KeptSums:
        """Error memory for one exchanged vector, empty."""
        return KeptSums(self._wires, self._group, self._like)

    def begin(self, slot: ErrorMemory) -> None:
        """Open an exchange that keeps in `slot` what it leaves out. Local. Raises: RuntimeError where one is open."""
        if self._slot is not None:
            raise RuntimeError(
                "an exchange is open: finish() and commit() it, or abandon() it, before the next begin()"
            )
        if not isinstance(slot, KeptSums):
            raise TypeError(f"slot is {type(slot).__name__}: must come from new_slot() of this reducer")
        self._slot = slot
        self._lost = None

    def has_momentum(self, slot: ErrorMemory) -> bool:
        """Is the last committed result one of `slot`, untouched since, so that launch_momentum may use it as m?

        False before the first commit and after slot.restore(): then form z from m and g and use launch_sum.
        """
        return self._last is not None and self._last[0] is slot and self._last[1] == self._last[0].version

    def launch_sum(self, k: int, x_N: Tensor) -> None:
        """Encode bucket k of x and send it. Buckets are launched in order, the same on every rank.

        x: float[N], the whole vector, of which only bucket k is read, now and if the exchange is undone: it must not
        change before commit(). Raises: RuntimeError, ValueError for a wrong call. A lost peer is told by finish().
        """
        self._encode_sum(self._expect(k, x_N), k, x_N)
        self._flag(k)
        self._send(k, Given(x_N))

    def launch_momentum(self, k: int, g_N: Tensor, beta1: float, runs: Sequence[Tensor | None] = ()) -> None:
        """As launch_sum of m + (1 - beta1) (g - m), m being the last committed result of this slot.

        g: float[N]; must not change before commit(). runs: for each live run of the layout float[run], contiguous, to
        be read in place of that part of g, or None; what is not in buckets.layout.alone() is read of g all the same.
        Raises: RuntimeError where has_momentum(slot) is false.
        """
        slot = self._expect(k, g_N)
        if not self.has_momentum(slot):
            raise RuntimeError("no result of this slot has been committed since restore(): use launch_sum")
        self._encode_momentum(slot, k, g_N, beta1, runs)
        self._flag(k)
        self._send(k, Given(g_N, beta1, runs))

    def finish(self) -> None:
        """Wait for all buckets, and see that every rank could write all of its rows. Waits for the device once.

        Raises: PeerLost; NonFiniteInput, alike on every rank. Then all is undone: the slot's R is as before to rounding
        (4 ulp of the largest |c|), what was committed last is as before, bit for bit, and no exchange is open.
        """
        slot = self._open()
        if len(self._given) < len(self.buckets) or self._finished:
            raise RuntimeError(
                f"{len(self._given)} of {len(self.buckets)} buckets launched, finished = {self._finished}: launch "
                "every bucket, then finish() once"
            )
        self._settle()
        if self._error is not None:
            error = self._error
            self._lost = (slot, tuple(self._given), self._num_served)
            self._undo(slot)
            raise error
        if not self._received.all_finite():
            own = torch.stack([row.flag for wire in self._wires for row in wire.sent]).amin()
            self._undo(slot)
            raise non_finite(gather_flags(self._group, own))
        self._finished = True

    def decode_(self, out_N: Tensor) -> None:
        """Out <- the result of the exchange that was finished, 0 where dead. out may be what was launched as x.

        After that abandon() cannot undo: commit().
        """
        self._require_finished()
        self._received.decode_(out_N, self._received.next)

    def descend_(
        self, p_N: Tensor, divisor_N: Tensor, lr: float, decay: float, start: int = 0, stop: int | None = None
    ) -> None:
        """P <- p (1 - decay) - lr m D in [start, stop), m being the result of the exchange that was finished.

        p, divisor: float[N]; bounds are multiples of 8 and may lie anywhere, such as those of a parameter group.
        divisor: D = 1 / (sqrt v + eps). decay: lr x weight decay. Modifies p only.
        """
        self._require_finished()
        stop = p_N.numel() if stop is None else stop
        self._received.descend_(p_N, divisor_N, lr, decay, self._received.next, start, stop)

    def commit(self) -> None:
        """Keep it: the result is the momentum from now on, and x or g may change. Local; ends the exchange."""
        slot = self._require_finished()
        follow(self._wires, slot, self._kernels)
        self._received.last = self._received.next
        self._last = (slot, slot.version)
        self._close()

    def abandon(self) -> None:
        """Undo what was launched; nothing happens where no exchange is open. Ends the exchange.

        Collective where buckets are not launched or not finished yet: the rest cross the wire marked as unusable, so
        that ranks that have launched more, or wait in finish(), go on (with NonFiniteInput) instead of waiting for
        ever. Raises: PeerLost, after undoing.
        """
        slot = self._slot
        if slot is None:
            return
        if self._finished:
            self._undo(slot)
            return
        for k in range(len(self._given), len(self.buckets)):
            for row, table in zip(self._wires[k].sent, self._wires[k].tables, strict=True):
                if table.numel:
                    row.refuse()
            self._send(k, Given(None))
        try:
            self.finish()
        except NonFiniteInput:
            return
        self._undo(slot)

    @contextmanager
    def redone(self) -> Iterator[bool]:
        """Inside, an exchange that was undone because a peer was lost counts: another rank has its whole result.

        What the slot keeps is then what was left out of what was sent, to rounding (4 ulp of the largest |c|); signs
        and scales are those that were sent. x or g must be as at the launch. Local. Gives whether there was one of
        which this rank had served every bucket; where not, nothing is done, and no rank can have the result.
        """
        if self._lost is None or len(self._lost[1]) < len(self.buckets) or self._lost[2] < len(self.buckets):
            yield False
            return
        slot, given, num_served = self._lost
        for k, one in enumerate(given):
            assert one.vector_N is not None
            if one.beta1 is None:
                self._encode_sum(slot, k, one.vector_N)
            else:
                self._encode_momentum(slot, k, one.vector_N, one.beta1, one.runs)
            self._serve_rows(slot, k)
        with followed(self._wires, slot, self._kernels):
            yield True
        self._undo_kept(slot, given, num_served)

    def momentum_(self, slot: ErrorMemory, out_N: Tensor) -> None:
        """Out <- the last committed result of this slot. Raises: RuntimeError where has_momentum(slot) is false.

        Call it before slot.restore(), which state_dict() does: after that the rows are no longer taken for m.
        """
        if not self.has_momentum(slot):
            raise RuntimeError("no result of this slot has been committed since restore(): m is where you keep it")
        self._received.decode_(out_N, self._received.last)

    def _make_pipeline(self) -> Pipeline:
        if self._lane is self._group:
            return InlinePipeline()  # one communicator: one order for both phases
        if self._like.device.type == "cpu":
            return ThreadPipeline()
        return InlinePipeline(lag=1)  # waiting is the device's; the host runs ahead of it anyway

    def _open(self) -> KeptSums:
        if self._slot is None:
            raise RuntimeError("no exchange is open: begin(slot) first")
        return self._slot

    def _require_finished(self) -> KeptSums:
        slot = self._open()
        if not self._finished:
            raise RuntimeError("the exchange is not finished: finish() first")
        return slot

    def _expect(self, k: int, x_N: Tensor) -> KeptSums:
        slot = self._open()
        if k != len(self._given):
            raise RuntimeError(f"bucket {k}: the next to launch is {len(self._given)} of {len(self.buckets)}")
        numel = self.buckets.layout.numel
        if x_N.shape != (numel,) or x_N.dtype != self._like.dtype or not x_N.is_contiguous():
            raise ValueError(
                f"vector is {x_N.dtype}{list(x_N.shape)}: must be contiguous {self._like.dtype}[{numel}], as the layout"
            )
        return slot

    def _send(self, k: int, given: Given) -> None:
        self._given.append(given)
        if self._error is not None or self._pipeline.failed:
            return  # a peer is lost: nobody will answer
        try:
            wire = self._wires[k]
            self._first[k] = self._group.start_all_to_all(wire.collected_nB, wire.sent_nB)
            if wire.shadow is not None:
                wire.shadow.take(wire)
                self._shadowed[k] = self._group.start_all_to_all(wire.shadow.collected_nB, wire.shadow.sent_nB)
        except CommError as error:
            self._error = error
            return
        self._pipeline.submit(self._serve, k)

    def _serve(self, k: int) -> None:
        """The second half of bucket k. In the pipeline's thread, where it has one."""
        pending, slot = self._first[k], self._slot
        assert pending is not None
        assert slot is not None
        pending.wait()
        self._first[k] = None
        if (shadowed := self._shadowed[k]) is not None:  # before phase 2: who has the result knows that all have these
            shadowed.wait()
            self._shadowed[k] = None
        self._serve_rows(slot, k)
        self._num_served = k + 1
        wire = self._wires[k]
        self._second[k] = self._lane.start_all_gather(wire.gathered_nB[self._received.next], wire.served_B)

    def _serve_rows(self, slot: KeptSums, k: int) -> None:
        """Average what was collected, and encode it for all."""
        wire = self._wires[k]
        kept, row = slot.server[k], wire.served
        if wire.own_table.numel:
            collected = wire.collected
            self._kernels.serve(
                kept.sum_c, kept.scale_b, collected.scale_b, collected.bits_B, wire.own_table, row.scale_b, row.bits_B
            )
            # A row that its sender could not write has scales that are NaN, so this flag is also that of all rows.
            _write_flag(row.flag, self._kernels.all_finite(row.scale_b))

    def _encode_sum(self, slot: KeptSums, k: int, x_N: Tensor) -> None:
        wire = self._wires[k]
        for chunk, table, kept, row in zip(wire.chunks, wire.tables, slot.worker[k], wire.sent, strict=True):
            if table.numel:
                x_c = x_N[slice(*chunk)]
                self._kernels.encode_sum(kept.sum_c, kept.scale_b, x_c, table, row.scale_b, row.bits_B)

    def _encode_momentum(
        self, slot: KeptSums, k: int, g_N: Tensor, beta1: float, runs: Sequence[Tensor | None]
    ) -> None:
        wire, last = self._wires[k], self._rows_of_m(k)
        gradients = self._gradients(k, g_N, runs)
        for g_c, table, kept, m, row in zip(gradients, wire.tables, slot.worker[k], last, wire.sent, strict=True):
            if table.numel:
                kept_c, out = (kept.sum_c, kept.scale_b), (row.scale_b, row.bits_B)
                self._kernels.encode_momentum(*kept_c, g_c, beta1, m.scale_b, m.bits_B, table, table, *out)

    def _rows_of_m(self, k: int) -> list[Row]:
        return self._wires[k].gathered[self._received.last]

    def _gradients(self, k: int, g_N: Tensor, runs: Sequence[Tensor | None]) -> list[list[Tensor]]:
        """Of each chunk of bucket k: the gradient, in tensors that lie end to end."""
        wire = self._wires[k]
        if not runs:
            return [[g_N[slice(*chunk)]] for chunk in wire.chunks]
        if not self._parts[k]:
            layout = self.buckets.layout
            self._parts[k] = [
                by_run(start, table, layout) for (start, _), table in zip(wire.chunks, wire.tables, strict=True)
            ]
        return [[part.of(g_N, runs) for part in parts] for parts in self._parts[k]]

    def _settle(self) -> None:
        """Wait until no collective touches a buffer. The first error stays in _error; later ones follow from it."""
        raised = self._pipeline.drain()
        self._error = self._error or raised
        for pendings in (self._first, self._shadowed, self._second):
            for k, pending in enumerate(pendings):
                if pending is not None:
                    try:
                        pending.wait()
                    except CommError as error:
                        self._error = self._error or error
                    pendings[k] = None

    def _undo(self, slot: KeptSums) -> None:
        self._undo_kept(slot, self._given, self._num_served)
        self._close()

    def _undo_kept(self, slot: KeptSums, given: Sequence[Given], num_served: int) -> None:
        for k in range(num_served):
            wire, kept = self._wires[k], slot.server[k]
            if wire.own_table.numel:
                rows = wire.collected
                self._kernels.undo_serve(
                    kept.sum_c, kept.scale_b, rows.scale_b, rows.bits_B, wire.served.scale_b, wire.own_table
                )
        for k, one in enumerate(given):
            if one.vector_N is not None:
                self._undo_worker(slot, k, one, one.vector_N)

    def _undo_worker(self, slot: KeptSums, k: int, given: Given, vector_N: Tensor) -> None:
        wire = self._wires[k]
        gradients = self._gradients(k, vector_N, given.runs)
        chunks = zip(gradients, wire.tables, slot.worker[k], self._rows_of_m(k), wire.sent, strict=True)
        for x_c, table, kept, m, row in chunks:
            if not table.numel:
                continue
            if given.beta1 is None:
                (vector_c,) = x_c  # a sum is always read of its vector
                self._kernels.undo_sum(kept.sum_c, kept.scale_b, vector_c, row.scale_b, table)
            else:
                momentum = x_c, given.beta1, m.scale_b, m.bits_B
                self._kernels.undo_momentum(kept.sum_c, kept.scale_b, *momentum, row.scale_b, table)

    def _flag(self, k: int) -> None:
        """Say in each row of bucket k whether all of it is finite."""
        for row, table in zip(self._wires[k].sent, self._wires[k].tables, strict=True):
            if table.numel:
                _write_flag(row.flag, self._kernels.all_finite(row.scale_b))

    def _close(self) -> None:
        self._slot, self._error, self._finished, self._num_served = None, None, False, 0
        self._given.clear()


def _write_flag(flag: Tensor, finite: Tensor | bool) -> None:
    if isinstance(finite, Tensor):
        flag.copy_(finite)
    else:
        flag.fill_(bool(finite))
