"""The compressed all-reduce by node first: exact inside a box, one bit between boxes, rows back inside a box.

    bucket of x, on L ranks of a box    all-to-all: rank l has slice l of all L; their mean, added up in order of rank
    slice l, on the B boxes             the exchange of bucketed.py, with boxes in the place of ranks
    rows of slice l                     all-gather in the box: every rank has the rows of all slices, 1/32 of the floats

What is compressed is the mean of a box, so that boxes, not ranks, have worker errors (slice_errors.py). Every rank
decodes the same bytes, and the rows are the momentum, as in bucketed.py. Between boxes a rank sends 1/L of what it
would, for its own slice alone. The last all-gather tells every rank of a box, and so every rank, whether all slices are
there: until then everything can be undone, and who has it knows that all ranks have served.

The structure is that of hierarchical all-reduces, which do the same with sums in full, as here the mean of a gradient
in fp32 does (node_sums.py). In bf16 it goes from every rank to every other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from thinwire.comm.codecs.sign import SignCodec
from thinwire.comm.errors import CommError, NonFiniteInput
from thinwire.comm.exchange.between import Between, SliceRows
from thinwire.comm.exchange.bucketed import Given
from thinwire.comm.exchange.fidelity import Fidelity
from thinwire.comm.exchange.full_mean import FullMean
from thinwire.comm.exchange.narrow_mean import means_of
from thinwire.comm.exchange.node_sums import sums_of
from thinwire.comm.exchange.parts import Part, by_segment
from thinwire.comm.exchange.pipeline import InlinePipeline, settle
from thinwire.comm.exchange.rows import Received
from thinwire.comm.exchange.side import staged
from thinwire.comm.exchange.slice_errors import SliceErrors
from thinwire.comm.exchange.slices import Slices
from thinwire.comm.exchange.stepwise import REFUSED, Stepwise, gather_flags, leave, non_finite, whole_or_left
from thinwire.comm.groups.fingerprint import agree, exchange_facts
from thinwire.comm.groups.nodes import Nodes
from thinwire.comm.kernels.choose import kernels_for
from thinwire.comm.layout import BYTE, DEFAULT_BUCKET, Buckets, VectorLayout
from thinwire.comm.protocol import ErrorMemory, FullMeans, FullWire, Pending
from thinwire.comm.signals import deferred


class NodeFirst(Stepwise[SliceErrors, Received]):
    """A Reducer for vectors of one layout, over boxes of as many ranks each, through SignCodec with scale "l2".

    bucket_elements, cuts, threads, full: as in BucketedAllReduce; full cannot be "int8".
    Collective: every rank constructs it, alike. Raises: ValueError; WireMismatch, PeerLost.
    """

    def __init__(
        self,
        nodes: Nodes,
        layout: VectorLayout,
        codec: SignCodec,
        like: Tensor,
        *,
        bucket_elements: int = DEFAULT_BUCKET,
        cuts: Iterable[int] = (),
        threads: int = 1,
        full: FullWire = "fp32",
    ) -> None:
        if full == "int8":
            raise ValueError(
                'full = "int8": must be "fp32" or "bf16" with topology node_first, which keeps errors of slices only'
            )
        buckets = Buckets.cut(layout, bucket_elements, cuts, BYTE * nodes.box.size)  # slices without a copy
        self.topology = f"node_first, {nodes.peers.size} boxes of {nodes.box.size} ranks"
        facts = {**exchange_facts(layout, codec, buckets), "full exchange": full, "topology": self.topology}
        agree(nodes.whole, facts, like)
        super().__init__(nodes.whole, buckets, SliceErrors)
        self.full_wire = full
        self._nodes, self._like = nodes, like.new_empty(0)
        self._second = nodes.whole if full == "fp32" else nodes.whole.second_communicator()
        self._slices = Slices(buckets, nodes.box.size)
        rows = SliceRows(self._slices, nodes.peers.size, codec.block, like)
        self._between = Between(nodes.peers, codec, like, rows, nodes.number, threads=threads)
        kernels = kernels_for(like.device, like.dtype, threads)
        self._results = [rows.assembled(layout.numel, kernels, like) for _ in range(2)]
        self._failed_B = torch.zeros(rows.ends[-1], dtype=torch.uint8, device=like.device)
        self._own_M = like.new_zeros(self._slices.numel)
        """Of what was launched, the mean of the box on this rank's slices."""
        self._start_M: Tensor | None = None
        self._runs = torch.tensor(self._slices.runs(nodes.number), dtype=torch.int64, device=like.device)
        """Of each live run of these slices, which run of the vector it is of."""
        self._pipeline = staged(nodes.whole, like, len(buckets))
        self._inside: list[Pending | None] = [None] * len(buckets)
        self._staged: list[tuple[Tensor, Tensor] | None] = [None] * len(buckets)
        self._rooms: list[Tensor] = []
        self._taken: dict[int, list[Tensor]] = {}
        """Scratch that is free, and that of each bucket on its way inside the box."""
        self._parts: list[list[Part]] = [[] for _ in range(len(buckets))]
        self._given: list[Given] = []
        self._error: BaseException | None = None
        self.means(full)

    @property
    def is_open(self) -> bool:
        """Has begin() been called, and neither commit(), nor abandon(), nor anything that raised a CommError?"""
        return self._memory is not None

    @property
    def num_launched(self) -> int:
        """Buckets launched in the open exchange; the next one to launch is of this number."""
        return len(self._given)

    def new_memory(self) -> SliceErrors:
        """Error memory for one exchanged vector, empty."""
        return SliceErrors(self._between.new_memory(), self._nodes, self._slices, self.buckets.layout.numel)

    def begin(self, memory: ErrorMemory) -> None:
        """As Stepwise.begin; what was lost before can no longer be redone."""
        super().begin(memory)
        try:
            self._between.begin(self._open().between)
        except BaseException:
            self._close()
            raise
        self._start_M = None

    def launch_sum(self, k: int, x_N: Tensor) -> None:
        """Send bucket k of x. In order, the same on every rank. x must not change before commit().

        Raises: RuntimeError, ValueError for a wrong call. A lost peer is told by finish().
        """
        self._launch(k, Given(x_N))

    def launch_lerp(
        self,
        k: int,
        x_N: Tensor,
        weight: float,
        runs: Sequence[Tensor | None] = (),
        start_N: Tensor | None = None,
        factor_r: Tensor | None = None,
    ) -> None:
        """As launch_sum of r + weight (x - r), r being the last committed result of this memory, or start.

        x crosses the box as it is, and its mean is taken in the place of x: r is the same on all ranks.
        runs, factor: as in BucketedAllReduce. Raises: RuntimeError where last(memory) is None, and start too.
        """
        if start_N is None:
            self._require_last(self._open())
        elif self._start_M is None:
            self._start_M = self._slices.take(start_N, self._nodes.number)
        self._launch(k, Given(x_N, weight, runs, start_N, factor_r))

    def launch_formed(self, k: int, form: Callable[[slice], Tensor]) -> None:
        """As launch_sum of what form() makes, once: what may have to be undone is the mean of the box, and kept."""
        self._launch(k, Given(None, form=form))

    def launch_refused(self, k: int) -> None:
        """Send in place of bucket k that this rank takes no part: every rank raises Refused in finish()."""
        self._open()
        self._expect(k)
        self._refuses = True
        with whole_or_left(self._group, self._break_off), self._pipeline.fed():
            self._give_up(k)

    def finish(self) -> None:
        """Wait for all buckets, and for the rows of all slices. Waits for the device once or twice.

        Raises: PeerLost; NonFiniteInput, alike on every rank. Then all is undone, as in BucketedAllReduce.
        """
        self._open()
        if len(self._given) < len(self.buckets) or self._finished:
            raise RuntimeError(
                f"{len(self._given)} of {len(self.buckets)} buckets launched, finished = {self._finished}: launch "
                "every bucket, then finish() once"
            )
        with whole_or_left(self._group, self._break_off):
            began = time.perf_counter()
            self._settle()
            if self._error is not None:
                error = self._error
                self._break_off()
                raise error
            try:
                is_whole = self._finish_slices()
                slot = 1 - self._last
                own_B = self._between.received(slot) if is_whole else self._failed_B
                self._nodes.box.all_gather(self._results[slot].wire.bytes_B.view(self._slices.parts, -1), own_B)
            except CommError:
                self._break_off()
                raise
            self.stats.waited_s += time.perf_counter() - began
            if not bool(self._results[slot].finite()):
                own = self._own_flag()
                self._between.abandon()
                self._close()
                raise non_finite(gather_flags(self._group, own))
            self._finished = True

    def commit(self) -> None:
        """Keep it: result is last() from now on, and what was launched may change. Local; ends the exchange."""
        memory = self._require_finished()
        with whole_or_left(self._group, self._break_off):
            self._between.commit()
            self._keep(memory)
            self._close()

    def abandon(self) -> None:
        """Undo what was launched; nothing happens where no exchange is open. Ends the exchange.

        Collective where buckets are not launched or not finished yet, as in BucketedAllReduce. Raises: PeerLost.
        """
        if self._memory is None:
            return
        with whole_or_left(self._group, self._break_off):
            if not self._finished:
                with self._pipeline.fed():
                    for k in range(len(self._given), len(self.buckets)):
                        self._give_up(k)
                try:
                    self.finish()
                except NonFiniteInput:
                    return
            self._between.abandon()
            self._close()

    def forget(self) -> None:
        """Undo and close what is open, the mean too. Leaves the group where buckets were launched: peers wait for them.

        Takes a few seconds at most. Nothing happens where none is open.
        """
        with deferred(to_the_end=True):
            if self._given:
                leave(self._group)
            self._break_off()
            self._forget_means()

    @contextmanager
    def redone(self) -> Iterator[bool]:
        """As BucketedAllReduce.redone. A rank that has a whole result has it from ranks that have all served."""
        if (means := self._lost_means()) is not None:
            with means.redone() as counts:
                yield counts
            return
        with self._between.redone() as counts:
            yield counts

    def fidelity(self, memory: ErrorMemory) -> Fidelity | None:
        """As BucketedAllReduce.fidelity, the mean over slices. None where the last exchange was not of `memory`."""
        if self._last_of is None or self._last_of[0] is not memory or not isinstance(memory, SliceErrors):
            return None
        found = self._between.fidelity(memory.between)
        told: tuple[float | None, ...] = (None, None, None)
        if found is not None:
            told = (found.worker_density, found.server_density, found.residual_ratio)
        known = self._like.new_tensor([[0.0, 0.0] if one is None else [one, 1.0] for one in told]).flatten()
        self._group.mean_(known)
        means = [total / count if count else None for total, count in known.view(3, 2).tolist()]
        return Fidelity(*means)

    def _make_means(self, wire: FullWire) -> FullMeans:
        if wire == "fp32":
            return FullMean(sums_of(self._nodes), self.buckets, self._like, self._pipeline)
        return means_of(wire, self._group, self._second, self.buckets, self._like, InlinePipeline())

    def _expect(self, k: int) -> None:
        if k != len(self._given):
            raise RuntimeError(f"bucket {k}: the next to launch is {len(self._given)} of {len(self.buckets)}")

    def _launch(self, k: int, given: Given) -> None:
        self._open()
        x_N, numel = given.vector_N, self.buckets.layout.numel
        self._expect(k)
        if given.form is not None:
            pass  # looked at where it is made
        elif x_N is None or x_N.shape != (numel,) or x_N.dtype != self._like.dtype or not x_N.is_contiguous():
            told = "nothing" if x_N is None else f"{x_N.dtype}{list(x_N.shape)}"
            raise ValueError(f"vector is {told}: must be contiguous {self._like.dtype}[{numel}], as the layout")
        with whole_or_left(self._group, self._break_off), self._pipeline.fed():
            began = time.perf_counter()
            rows_Lc = self._rows_of(k, given)
            self.stats.encode_s += time.perf_counter() - began
            self._send(k, given, rows_Lc)

    def _give_up(self, k: int) -> None:
        """Launch in place of bucket k what nobody can use."""
        rows_Lc = self._room(k).fill_(torch.nan)
        self._send(k, Given(None), rows_Lc)

    def _rows_of(self, k: int, given: Given) -> Tensor:
        """Bucket k of what was given, a row for each rank of the box: the vector itself where it is just that."""
        cut, x_N = self._slices.cuts[k], given.vector_N
        numel = cut.stop - cut.start
        if given.form is not None:
            rows_Lc = self._room(k)
            rows_Lc.view(-1)[:numel].copy_(given.form(slice(cut.start, cut.stop)))
            rows_Lc.view(-1)[numel:].zero_()
            return rows_Lc
        assert x_N is not None
        lies_elsewhere = any(run is not None for run in given.runs)
        if not lies_elsewhere and numel == cut.size * self._slices.parts:
            return x_N[cut.start : cut.stop].view(self._slices.parts, cut.size)
        rows_Lc = self._room(k)
        if lies_elsewhere and not self._parts[k]:
            self._parts[k] = by_segment(cut.start, cut.stop, self.buckets.layout)
        parts = [part.of(x_N, given.runs) for part in self._parts[k]] if lies_elsewhere else [x_N[cut.start : cut.stop]]
        flat = rows_Lc.view(-1)
        torch.cat(parts, out=flat[:numel])
        flat[numel:].zero_()
        return rows_Lc

    def _send(self, k: int, given: Given, rows_Lc: Tensor) -> None:
        self._given.append(given)
        if self._error is not None or self._pipeline.failed:
            return  # a peer is lost: nobody will answer
        collected_Lc = self._room(k)
        self._staged[k] = rows_Lc, collected_Lc
        try:
            self._inside[k] = self._nodes.box.start_all_to_all(_bytes(collected_Lc), _bytes(rows_Lc))
        except CommError as error:
            self._error = error
            return
        self._pipeline.submit(self._pass_on, k)

    def _pass_on(self, k: int) -> None:
        """The mean of the box on this rank's slice of bucket k, and its exchange with other boxes begun."""
        pending, staged, given = self._inside[k], self._staged[k], self._given[k]
        assert pending is not None
        assert staged is not None
        self._pipeline.hold(pending)
        self._inside[k] = None
        own_c = self._own_M[self._slices.cuts[k].own]
        first, second, *others = staged[1]
        torch.add(first, second, out=own_c)
        for row in others:
            own_c.add_(row)
        own_c.div_(own_c.new_full((), self._slices.parts))
        self._pipeline.admit(k, lambda: own_c)
        self._free(k)
        if given.weight is None:
            self._between.launch_sum(k, self._own_M)
        else:
            start_M = None if given.start_N is None else self._start_M
            factor_r = given.factor_r
            if factor_r is not None:  # slices beyond the end of a tiny vector have no run
                factor_r = factor_r[self._runs] if len(self._runs) else None
            self._between.launch_lerp(k, self._own_M, given.weight, (), start_M, factor_r)

    def _finish_slices(self) -> bool:
        """Wait for the exchange with other boxes. Returns whether it has a result; all peers of this rank alike."""
        try:
            self._between.finish()
        except NonFiniteInput:
            return False
        return True

    def _own_flag(self) -> Tensor:
        """0-dim uint8: what this rank gave can be encoded, as far as it can be seen here; or REFUSED."""
        flag = torch.ones((), dtype=torch.uint8, device=self._like.device)
        if self._refuses:
            return flag.fill_(REFUSED)
        for k, given in enumerate(self._given):
            if given.is_nothing:
                return flag.zero_()
            size = torch.linalg.vector_norm(self._rows_of(k, given))
            flag.logical_and_(torch.isfinite(size.square()))
            self._free(k)
        return flag

    def _room(self, k: int) -> Tensor:
        """Scratch for bucket k, float[L, c], until _free(k)."""
        cut = self._slices.cuts[k]
        needed = cut.size * self._slices.parts
        at = next((i for i, room in enumerate(self._rooms) if room.numel() >= needed), None)
        room = self._like.new_empty(needed) if at is None else self._rooms.pop(at)
        self._taken.setdefault(k, []).append(room)
        return room[:needed].view(self._slices.parts, cut.size)

    def _free(self, k: int) -> None:
        """Nobody reads or writes the scratch of bucket k any more."""
        self._staged[k] = None
        self._rooms += self._taken.pop(k, [])

    def _settle(self) -> None:
        """Wait until all buckets are on their way between boxes, or nobody waits for them. The first error stays."""
        raised = settle(self._pipeline, self._inside)
        self._error = self._error or raised

    def _break_off(self) -> None:
        """Undo what this rank does not go on with. Where nothing is open, nothing."""
        if self._memory is None:
            return
        self._settle()
        self._between.break_off()
        self._close()

    def _close(self) -> None:
        self._memory, self._error, self._finished, self._refuses = None, None, False, False
        self._given.clear()
        for k in list(self._taken):
            self._free(k)


def _bytes(rows_Lc: Tensor) -> Tensor:
    return rows_Lc.view(torch.uint8)
