"""The two-phase compressed all-reduce with error feedback, in two collectives, through any codec.  [Tang et al. 2021]

Fig. 3 of the paper, with scales in the same row as the signs; each row begins with a flag, so that all ranks decide
alike whether a step may be committed. The vector is exchanged as one bucket. Nothing is written into error memory
before commit(), so undoing a failed exchange is to not have written. What the fused exchange (bucketed.py) is held
against.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import sqrt

import torch
from torch import Tensor

from thinwire.comm.errors import CommError, NonFiniteInput
from thinwire.comm.exchange.error_feedback import ErrorFeedback
from thinwire.comm.exchange.fidelity import Fidelity, alignment, density, sampled_elements
from thinwire.comm.exchange.narrow_mean import means_of
from thinwire.comm.exchange.pipeline import InlinePipeline
from thinwire.comm.exchange.stepwise import REFUSED, Stepwise, leave, lerp_, non_finite, whole_or_left
from thinwire.comm.groups.fingerprint import agree, exchange_facts
from thinwire.comm.kernels.blocks import HEADER_BYTES, BlockTable, RowMemory, spread
from thinwire.comm.layout import Buckets, Partition, VectorLayout, round_up
from thinwire.comm.protocol import Codec, ErrorMemory, FullMeans, FullWire, Group, Pending, Reader, RowCodec


class CompressedAllReduce(Stepwise[ErrorFeedback, "Decoded"]):
    """A Reducer for vectors of one layout, over one group, through one codec.

    (1) x += worker error; encode a row for each rank        (2) all-to-all                            launch
    (3) decode, average, += server error; encode             (4) all-gather                            finish
    (5) the errors become what the two encodings left out                                              commit

    given: the layout of what is launched, where a subclass lays it out otherwise for the exchange (_arrange_).
    full: how the mean of a gradient is sent, in steps that send it in full (exchange/narrow_mean.py).
    Collective: every rank constructs it, with the same layout and codec. Raises: WireMismatch, PeerLost.
    """

    def __init__(
        self,
        group: Group,
        layout: VectorLayout,
        codec: Codec,
        like: Tensor,
        *,
        given: VectorLayout | None = None,
        full: FullWire = "fp32",
    ) -> None:
        agree(group, {**exchange_facts(layout, codec), "full exchange": full}, like)
        given = given or layout
        super().__init__(group, Buckets(given, ((0, given.numel),)), ErrorFeedback)
        self._layout = layout
        self.full_wire = full
        self._like = like.new_empty(0)
        partition = Partition(layout.numel, group.size)
        self._bounds = [partition.bounds(rank) for rank in range(group.size)]
        self._codecs: list[RowCodec] = [codec.row(layout, start, stop, like) for start, stop in self._bounds]
        row_bytes = HEADER_BYTES + round_up(max(row.wire_bytes for row in self._codecs), HEADER_BYTES)
        self._sent_nB = torch.zeros((group.size, row_bytes), dtype=torch.uint8, device=like.device)
        self._collected_nB = torch.zeros_like(self._sent_nB)
        self._served_B = torch.zeros(row_bytes, dtype=torch.uint8, device=like.device)
        self._results = [
            Decoded(torch.zeros_like(self._sent_nB), given.numel, self._like, self._decode_) for _ in range(2)
        ]
        self._sum_N = like.new_zeros(layout.numel)
        own = self._bounds[group.rank]
        self._server_c = like.new_empty(own[1] - own[0])
        self._decoded_c = torch.empty_like(self._server_c)
        self._pending: Pending | None = None
        self._error: CommError | None = None
        self._num_launched = 0
        self._has_served = False
        self._lost: ErrorFeedback | None = None
        self.means(full)
        self._sent_of: ErrorMemory | None = None
        """Of whose last exchange the sent and served rows are; None after one that failed."""

    def new_memory(self) -> ErrorFeedback:
        """Error memory for one exchanged vector, empty."""
        return ErrorFeedback(self._layout, self._group, self._like.dtype, self._like.device)

    def begin(self, memory: ErrorMemory) -> None:
        """As Stepwise.begin; what was lost before can no longer be redone."""
        super().begin(memory)
        self._lost = None

    def launch_sum(self, k: int, x_N: Tensor) -> None:
        """Encode x and send it. x: float[N], zero where dead; only read. A lost peer is told by finish()."""
        memory = self._expect(k, x_N)
        self._launch(memory, x_N)

    def launch_lerp(
        self,
        k: int,
        x_N: Tensor,
        weight: float,
        runs: Sequence[Tensor | None] = (),
        start_N: Tensor | None = None,
        factor_r: Tensor | None = None,
    ) -> None:
        """As Reducer.launch_lerp."""
        memory, layout = self._expect(k, x_N), self.buckets.layout
        z_N = torch.zeros_like(x_N)
        if start_N is not None:
            z_N.copy_(start_N)
        else:
            self._require_last(memory).decode_(z_N)
            if factor_r is not None:
                z_N.div_(spread(factor_r, layout))
        lerp_(z_N, x_N, weight, layout, runs, factor_r)
        self._launch(memory, z_N)

    def launch_formed(self, k: int, form: Callable[[slice], Tensor]) -> None:
        """As launch_sum of what form() makes, once: nothing is written that would have to be undone."""
        z_N = form(slice(0, self.buckets.layout.numel))
        self._launch(self._expect(k, z_N), z_N)

    def launch_refused(self, k: int) -> None:
        """Send that this rank takes no part: every rank raises Refused in finish()."""
        self._open()
        self._sent_nB[:, 0] = REFUSED
        self._send()

    def finish(self) -> None:
        """Wait for what was launched, serve this rank's chunk, and gather all. Waits for the device twice.

        Raises: PeerLost; NonFiniteInput, alike on every rank. Then nothing has changed and no exchange is open.
        """
        memory = self._open()
        if not self._num_launched or self._finished:
            raise RuntimeError(
                f"launched = {self._num_launched}, finished = {self._finished}: launch, then finish once"
            )
        with whole_or_left(self._group, self._close):
            try:
                self._finish(memory)
            except BaseException as error:
                self._lost = None if isinstance(error, NonFiniteInput) else memory
                self._close()
                raise
            self._finished = True

    def commit(self) -> None:
        """Keep it: the errors become what the encodings left out. Local; ends the exchange."""
        memory = self._require_finished()
        with whole_or_left(self._group, self._close):
            self._keep_errors(memory)
            self._keep(memory)
            self._sent_of = memory
            self._results[1 - self._last].changed()  # nobody reads it any more: its floats are not kept
            self._close()

    def abandon(self) -> None:
        """End the exchange as if it had not begun; nothing happens where none is open.

        Collective where it is not finished: what was not launched crosses the wire marked as unusable, so that ranks
        that have launched go on, with NonFiniteInput. Raises: PeerLost.
        """
        if self._memory is None:
            return
        if not self._finished:
            if not self._num_launched:
                self._sent_nB[:, 0] = 0
                self._send()
            try:
                self.finish()
            except NonFiniteInput:
                return
        self._close()

    def forget(self) -> None:
        """Close the exchange: nothing has been written yet. Where peers may wait for it, leave the group."""
        if self._num_launched:
            leave(self._group)
        self._close()
        self._forget_means()

    @contextmanager
    def redone(self) -> Iterator[bool]:
        """Inside, an exchange that lost a peer counts: another rank has its whole result.

        Local. Gives whether there was one of which this rank had served its chunk; where not, nothing is done.
        """
        if (means := self._lost_means()) is not None:
            with means.redone() as counts:
                yield counts
            return
        memory = self._lost
        if memory is None or not self._has_served:
            yield False
            return
        before = memory.worker_N.clone(), memory.server_c.clone()
        self._keep_errors(memory)
        try:
            yield True
        finally:
            memory.worker_N.copy_(before[0])
            memory.server_c.copy_(before[1])

    def fidelity(self, memory: ErrorMemory) -> Fidelity | None:
        """How well the last exchange carried what it was given; None where it was not one of `memory`.

        Collective: one mean of a few thousand numbers. Waits for the device, and decodes all rows once.
        Modifies nothing but scratch. Raises: PeerLost.
        """
        if self._sent_of is not memory or not isinstance(memory, ErrorFeedback):
            return None
        rank = self._group.rank
        own_start, own_stop = self._bounds[rank]
        self._codecs[rank].decode(self._served_B[HEADER_BYTES:], self._decoded_c)
        worker_sums, server_sums = self._worker_alignment(memory), alignment(self._server_c, self._decoded_c)
        at_k = sampled_elements(self._layout, self._like.device)
        own_k = (at_k >= own_start) & (at_k < own_stop)
        residual_k = memory.worker_N[at_k]
        residual_k[own_k] += self.size * memory.server_c[at_k[own_k] - own_start]
        given = self._decoded_c[at_k[own_k] - own_start].square().sum().view(1)
        told = torch.cat([worker_sums, server_sums, given, residual_k])
        self._group.mean_(told)
        length = float(torch.linalg.vector_norm(told[7:]))
        *sums, given_mean = told[:7].tolist()
        return Fidelity(
            density(sums[:3]), density(sums[3:]), length / sqrt(self.size * given_mean) if given_mean > 0 else None
        )

    def _make_means(self, wire: FullWire) -> FullMeans:
        return means_of(wire, self._group, self._group, self.buckets, self._like, InlinePipeline())

    def _decode_rows(self, wire_nB: Tensor, out_N: Tensor) -> None:
        """out <- what these rows say, one of each rank, as it is exchanged."""
        for row, (start, stop), wire in zip(self._codecs, self._bounds, wire_nB, strict=True):
            row.decode(wire[HEADER_BYTES:], out_N[start:stop])

    def _expect(self, k: int, x_N: Tensor) -> ErrorFeedback:
        memory = self._open()
        if k or self._num_launched:
            raise RuntimeError(f"bucket {k}: the only bucket is 0, and {self._num_launched} of 1 are launched")
        if x_N.shape != (self.buckets.layout.numel,) or x_N.dtype != self._like.dtype:
            raise ValueError(
                f"vector is {x_N.dtype}{list(x_N.shape)}: must be {self._like.dtype}[{self.buckets.layout.numel}], as "
                "the layout"
            )
        return memory

    def _arrange_(self, out_P: Tensor, x_N: Tensor, memory: ErrorFeedback) -> None:
        """out <- x, as it is exchanged."""
        out_P.copy_(x_N)

    def _decode_(self, wire_nB: Tensor, out_N: Tensor) -> None:
        """out <- what these rows say, as it was launched; 0 where dead."""
        self._decode_rows(wire_nB, out_N)

    def _launch(self, memory: ErrorFeedback, x_N: Tensor) -> None:
        with whole_or_left(self._group, self._close):
            began = time.perf_counter()
            self._arrange_(self._sum_N, x_N, memory)
            self._sum_N.add_(memory.worker_N)
            self._sent_nB[:, 0] = self._encode_rows(self._sum_N, self._sent_nB)
            self.stats.encode_s += time.perf_counter() - began
            self._send()

    def _send(self) -> None:
        self._num_launched, self._has_served, self._sent_of = 1, False, None
        try:
            self._pending = self._group.start_all_to_all(self._collected_nB, self._sent_nB)
        except CommError as error:
            self._error = error

    def _finish(self, memory: ErrorFeedback) -> None:
        pending, self._pending = self._pending, None
        if self._error is not None:
            raise self._error
        assert pending is not None
        with self._waiting():
            pending.wait()
        _refuse_non_finite(self._collected_nB[:, 0])
        served = self._codecs[self._group.rank]
        self._server_c.zero_()
        for wire in self._collected_nB:
            served.decode(wire[HEADER_BYTES:], self._decoded_c)
            self._server_c.add_(self._decoded_c)
        self._server_c.div_(self._server_c.new_full((), self.size)).add_(memory.server_c)
        self._served_B[0] = served.encode(self._server_c, self._served_B[HEADER_BYTES:])
        self._has_served = True
        result = self._results[1 - self._last]
        result.changed()
        with self._waiting():
            self._group.all_gather(result.wire_nB, self._served_B)
        _refuse_non_finite(result.wire_nB[:, 0])

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.stats.waited_s += time.perf_counter() - began

    def _keep_errors(self, memory: ErrorFeedback) -> None:
        self._decode_rows(self._sent_nB, memory.worker_N)
        memory.worker_N.neg_().add_(self._sum_N)
        self._codecs[self._group.rank].decode(self._served_B[HEADER_BYTES:], memory.server_c)
        memory.server_c.neg_().add_(self._server_c)

    def _worker_alignment(self, memory: ErrorFeedback) -> Tensor:
        """Of what this rank sent, its error added; zero where the error memory has been moved since."""
        sums = self._like.new_zeros(3)
        if not bool(memory.worker_N.any()):
            return sums
        for row, (start, stop), wire in zip(self._codecs, self._bounds, self._sent_nB, strict=True):
            sent_c = self._like.new_empty(stop - start)
            row.decode(wire[HEADER_BYTES:], sent_c)
            sums += alignment(sent_c + memory.worker_N[start:stop], sent_c)
        return sums

    def _encode_rows(self, x_N: Tensor, wire_nB: Tensor) -> Tensor:
        """A row for each rank's chunk. Returns a 0-dim bool: all that was written is finite."""
        flags = [
            row.encode(x_N[start:stop], wire[HEADER_BYTES:])
            for row, (start, stop), wire in zip(self._codecs, self._bounds, wire_nB, strict=True)
        ]
        return torch.stack(flags).all()

    def _close(self) -> None:
        self._memory, self._pending, self._error = None, None, None
        self._num_launched, self._finished = 0, False


class Decoded:
    """Received rows of any codec, as a Result: decoded before they are read. wire: uint8[n, B]; like: of the vector."""

    def __init__(self, wire_nB: Tensor, numel: int, like: Tensor, decode: Callable[[Tensor, Tensor], None]) -> None:
        self.wire_nB = wire_nB
        self._numel, self._like, self._decode = numel, like, decode
        self._values_N: Tensor | None = None

    def changed(self) -> None:
        """The rows are received anew, or nobody reads them any more."""
        self._values_N = None

    def decode_(self, out_N: Tensor, start: int = 0, stop: int | None = None) -> None:
        """out <- elements [start, stop) of the result, 0 where dead."""
        stop = self._numel if stop is None else stop
        if (start, stop) == (0, self._numel):
            self._decode(self.wire_nB, out_N)
        else:
            self.read(_Copy(out_N), start, stop)

    def read(self, reader: Reader, start: int = 0, stop: int | None = None) -> None:
        """Hand elements [start, stop) to the reader, as floats."""
        if self._values_N is None:
            self._values_N = self._like.new_zeros(self._numel)
            self.decode_(self._values_N)
        at = slice(start, self._numel if stop is None else stop)
        reader.values(at, self._values_N[at])


def _refuse_non_finite(flags: Tensor) -> None:
    # One host synchronisation: a rank that went on alone would leave its peers waiting in the next collective.
    if not bool((flags == 1).all()):
        raise non_finite(flags)


class _Copy:
    """A Reader that writes what it reads to `out`."""

    def __init__(self, out: Tensor) -> None:
        self._out = out

    def rows(self, at: slice, rows: RowMemory, table: BlockTable) -> None:
        """Results of any codec are read as floats."""
        raise TypeError("rows of signs, where floats were decoded: a defect of thinwire; please report it")

    def values(self, at: slice, values: Tensor) -> None:
        """Copy them."""
        self._out.copy_(values)
