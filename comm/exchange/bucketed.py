"""The compressed all-reduce in buckets: kept sums in place, fused kernels, both phases overlapped.  [Tang et al. 2021]

    bucket 0   encode | all-to-all | serve | all-gather |
    bucket 1            encode     | all-to-all         | serve | all-gather |
    bucket 2                         encode             | all-to-all  ...

The caller encodes and starts the all-to-all, while backward still makes the next bucket if it likes; a pipeline waits
for it, serves and starts the all-gather on the group's second communicator, so that on each all ranks have one order.

The same collective as CompressedAllReduce, for scale x sign with the 2-norm, whose errors are never written to memory
(kept_sums.py). Kept sums are written in place on the way, and undone where the exchange fails: c <- c' - z, exact to
rounding (4 ulp of the largest |c|; of sums in bfloat16 1 of its ulp). The result takes the place of the last one only
at commit().

A signal is handled where others are waited for (comm/signals.py). What it raises, as any error of this rank alone,
undoes the exchange too, and this rank leaves the group, so that nobody waits for it. Where an error comes while sums
are written, as one out of memory may, they are torn: that is said by whoever would use them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.comm.codecs.sign import SignCodec
from thinwire.comm.errors import CommError, NonFiniteInput
from thinwire.comm.exchange.fidelity import Fidelity
from thinwire.comm.exchange.kept_fidelity import fidelity_of
from thinwire.comm.exchange.kept_sums import SERVER, WORKER, Kept, KeptSums, noise_for
from thinwire.comm.exchange.narrow_mean import means_of
from thinwire.comm.exchange.parts import Part, by_run
from thinwire.comm.exchange.pipeline import Pipeline, settle
from thinwire.comm.exchange.rebuild import add_rebuilt_, left_squares
from thinwire.comm.exchange.rows import BucketRows, Crossing, Cut, Received, rows_of
from thinwire.comm.exchange.side import pipeline_for
from thinwire.comm.exchange.stepwise import REFUSED, Stepwise, gather_flags, leave, non_finite, whole_or_left
from thinwire.comm.groups.fingerprint import agree, exchange_facts
from thinwire.comm.keeps import Keeps
from thinwire.comm.kernels.bf16 import NONE, Noise
from thinwire.comm.kernels.blocks import Pieces
from thinwire.comm.kernels.choose import kernels_for, warm_up
from thinwire.comm.layout import DEFAULT_BUCKET, Buckets, VectorLayout
from thinwire.comm.protocol import ErrorMemory, FullMeans, FullWire, Group, Pending
from thinwire.comm.signals import deferred


@dataclass(frozen=True, slots=True, eq=False)
class Given:
    """What a bucket was launched with. vector: x. weight: of x against the last result; None: x itself.

    runs: what was read in place of parts of x. start: what stood for the last result. factor: of each live run, where
    what was sent is so many times that. form: what makes x, where it is no vector. Without both nothing was given: the
    bucket was abandoned or refused.
    """

    vector_N: Tensor | None
    weight: float | None = None
    runs: Sequence[Tensor | None] = ()
    start_N: Tensor | None = None
    factor_r: Tensor | None = None
    form: Callable[[slice], Tensor] | None = None

    @property
    def is_nothing(self) -> bool:
        """Was the bucket sent without anything in it?"""
        return self.vector_N is None and self.form is None


class BucketedAllReduce(Stepwise[KeptSums, Received]):
    """A Reducer for vectors of one layout, over one group, through SignCodec with scale "l2", one exchange at a time.

    bucket_elements: the most elements of a bucket. cuts: positions that no bucket reaches across, such as the ends of
    parameter groups whose weights differ. threads: cores that a kernel may use.
    keeps: what each rank keeps of the others, for the death of one. REPLICA: the server error of the rank before it, so
    that phase 1 sends each row twice. full: how the mean of a gradient is sent, in steps that send it in full
    (exchange/narrow_mean.py). sums: the type that kept sums have, where it is not the vector's: bfloat16, for vectors
    of float32 (kept_sums.py).
    Collective: every rank constructs it, alike. Raises: ValueError; WireMismatch, PeerLost.
    """

    def __init__(
        self,
        group: Group,
        layout: VectorLayout,
        codec: SignCodec,
        like: Tensor,
        *,
        bucket_elements: int = DEFAULT_BUCKET,
        cuts: Iterable[int] = (),
        threads: int = 1,
        keeps: Keeps = Keeps.NOTHING,
        full: FullWire = "fp32",
        sums: torch.dtype | None = None,
    ) -> None:
        if sums not in (None, like.dtype) and (sums, like.dtype) != (torch.bfloat16, torch.float32):
            raise ValueError(f"sums = {sums}: must be torch.bfloat16 for vectors of torch.float32, or {like.dtype}")
        if not isinstance(codec, SignCodec) or codec.scale != "l2":
            raise ValueError(f'codec = {codec}: must be SignCodec with scale "l2"; CompressedAllReduce takes any')
        buckets = Buckets.cut(layout, bucket_elements, cuts)
        facts = {**exchange_facts(layout, codec, buckets), "full exchange": full, "keeps": keeps.value}
        if sums is not None:
            facts["kept sums"] = str(sums)
        agree(group, facts, like)
        super().__init__(group, buckets, KeptSums)
        self.full_wire = full
        self._second_communicator = group.second_communicator()
        self._like, self._sums = like.new_empty(0), sums
        self._rounds = sums not in (None, like.dtype)
        """Are sums kept in fewer bits, rounded by what an exchange draws?"""
        self._kernels = kernels_for(like.device, like.dtype, threads, sums)
        if like.device.type == "cpu":
            warm_up(like.dtype, sums)  # not in the first exchange, where peers would wait for it
        self._block = codec.block
        self._rows = self._make_rows(codec.block, like, keeps)
        self._results: list[Received] = []
        """Two, from the first begin() on: a warm-up needs none, and a regroup has the old ones too."""
        self._parts: list[list[Part]] = [[] for _ in self._rows]
        """Of each bucket, where some of the vector may lie elsewhere; made when it first does."""
        self._pieces: list[Pieces | None] = [None] * len(self._rows)
        """Of each bucket, where runs have factors; made when they first have."""
        self._pipeline = self._make_pipeline()
        self._first: list[Pending | None] = [None] * len(buckets)
        self._replicated: list[Pending | None] = [None] * len(buckets)
        self._second: list[Pending | None] = [None] * len(buckets)
        self._given: list[Given] = []
        self._num_served = 0
        self._writing: set[str] = set()
        """What writes kept sums now. Some of it still does after an error: then they are torn."""
        self._error: BaseException | None = None
        self.means(full)
        self._lost: tuple[KeptSums, tuple[Given, ...]] | None = None
        """The last exchange where a peer was lost after this rank had done all its part: others may have the result."""
        self._lost_sums: tuple[list[Kept], list[Kept]] | None = None
        """As that exchange left them, where rounding lets nobody find them again."""
        self._drawn = 0
        """The draw of the exchange under way, or of the last one."""
        self._counts_again = False
        """Inside redone(): the memory stands at the exchange whose rows are those under way."""

    @property
    def is_open(self) -> bool:
        """Has begin() been called, and neither commit(), nor abandon(), nor anything that raised a CommError?"""
        return self._memory is not None

    @property
    def num_launched(self) -> int:
        """Buckets launched in the open exchange; the next one to launch is of this number."""
        return len(self._given)

    def new_memory(self) -> KeptSums:
        """Error memory for one exchanged vector, empty."""
        return KeptSums(self._rows, self._group, self._like, self._sums)

    def begin(self, memory: ErrorMemory) -> None:
        """As Stepwise.begin; what was lost before can no longer be redone."""
        if isinstance(memory, KeptSums):
            memory.refuse_torn()
        super().begin(memory)
        self._drawn = self.draw
        self._open().take_room(self._drawn)
        for rows in self._rows:
            rows.take_room()
        if not self._results:
            cut = Cut(self.buckets, self._block, self.size)
            self._results = [Received.of(self._rows, self._kernels, self._like, cut) for _ in range(2)]
        self._lost = self._lost_sums = None

    def launch_sum(self, k: int, x_N: Tensor) -> None:
        """Encode bucket k of x and send it. Buckets are launched in order, the same on every rank.

        x: float[N], the whole vector, of which only bucket k is read, now and if the exchange is undone: it must not
        change before commit(). Raises: RuntimeError, ValueError for a wrong call. A lost peer is told by finish().
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
        """As launch_sum of r + weight (x - r), r being the last committed result of this memory, in one pass.

        x: float[N]; must not change before commit(). runs: for each live run of the layout float or bfloat16[run],
        contiguous, to be read in place of that part of x, or None; what is not in buckets.layout.alone() is read of x
        all the same. start: float[N], r in place of the last result, as x; a bucket of the sum is made then, and
        encoded in a second pass: equal bit for bit. factor: float[live runs], f, as x: f (r + weight (x - r)) is sent,
        and the last result is f r. Raises: RuntimeError where last(memory) is None, and start too.
        """
        if start_N is None:
            self._require_last(self._open())
        self._launch(k, Given(x_N, weight, runs, start_N, factor_r))

    def launch_formed(self, k: int, form: Callable[[slice], Tensor]) -> None:
        """As launch_sum of what form() makes, a bucket at a time; made again where the exchange is undone or redone."""
        self._launch(k, Given(None, form=form))

    def launch_refused(self, k: int) -> None:
        """Send in place of bucket k that this rank takes no part: every rank raises Refused in finish()."""
        self._open()
        self._expect(k)
        self._refuses = True
        with whole_or_left(self._group, self._break_off), self._pipeline.fed():
            self._rows[k].refuse()
            self._given.append(Given(None))
            self._send(k)

    def finish(self) -> None:
        """Wait for all buckets, and see that every rank could write all of its rows. Waits for the device once.

        Raises: PeerLost; NonFiniteInput, alike on every rank. Then all is undone: R of the memory is as before to
        rounding (4 ulp of the largest |c|), what was committed last is as before, bit for bit, and no exchange is open.
        """
        memory = self._open()
        if len(self._given) < len(self.buckets) or self._finished:
            raise RuntimeError(
                f"{len(self._given)} of {len(self.buckets)} buckets launched, finished = {self._finished}: launch "
                "every bucket, then finish() once"
            )
        with whole_or_left(self._group, self._break_off):
            began = time.perf_counter()
            self._settle()
            is_finite = self._error is None and self._all_finite()
            self.stats.waited_s += time.perf_counter() - began
            if (error := self._error) is not None:
                if isinstance(error, CommError):
                    self._lose(memory)
                raise error
            if not is_finite:
                own = torch.stack([rows.least_flag(self._kernels) for rows in self._rows]).amin()
                if self._refuses:
                    own.fill_(REFUSED)
                self._undo(memory)
                raise non_finite(gather_flags(self._group, own))
            if memory.outliers is not None and memory.outliers.is_due:
                try:
                    memory.outliers.send([(kept.sum_c, kept.scale_b) for kept in memory.server])
                except CommError:
                    self._lose(memory)
                    raise
            self._finished = True

    def commit(self) -> None:
        """Keep it: result is last() from now on, and what was launched may change. Local; ends the exchange."""
        memory = self._require_finished()
        with whole_or_left(self._group, self._break_off):
            self._writing.add("commit()")
            self._follow(memory)
            self._keep(memory)
            for rows in self._rows:
                rows.turn()
            if memory.outliers is not None:
                memory.outliers.exchanges += 1
            self.draw += 1
            self._close()

    def abandon(self) -> None:
        """Undo what was launched; nothing happens where no exchange is open. Ends the exchange.

        Collective where buckets are not launched or not finished yet: the rest cross the wire marked as unusable, so
        that ranks that have launched more, or wait in finish(), go on (with NonFiniteInput) instead of waiting for
        ever. Raises: PeerLost, after undoing.
        """
        memory = self._memory
        if memory is None:
            return
        with whole_or_left(self._group, self._break_off):
            if self._finished:
                self._undo(memory)
                return
            with self._pipeline.fed():
                for k in range(len(self._given), len(self.buckets)):
                    self._rows[k].refuse()
                    self._given.append(Given(None))
                    self._send(k)
            try:
                self.finish()
            except NonFiniteInput:
                return
            self._undo(memory)

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
        """Inside, an exchange that was undone because a peer was lost counts: another rank has its whole result.

        What the memory keeps is then what was left out of what was sent, to rounding (4 ulp of the largest |c|); signs
        and scales are those that were sent. x must be as at the launch. Local. Gives whether there was one of which
        this rank had served every bucket; where not, nothing is done, and no rank can have the result.
        """
        if (means := self._lost_means()) is not None:
            with means.redone() as counts:
                yield counts
            return
        if self._lost is None:
            yield False
            return
        memory, given = self._lost
        undone = None if self._lost_sums is None else memory.swap(self._lost_sums)
        if undone is None:
            for k, one in enumerate(given):
                self._encode(memory, k, one, self._sum_of(k, one))
                self._serve_rows(memory, k)
        before = [(kept.sum_c.clone(), kept.scale_b.clone()) for kept in memory.replica]
        self._follow(memory)
        self._counts_again = True
        try:
            yield True
        finally:  # also where a peer is lost inside: the next attempt begins from the same
            self._counts_again = False
            for kept, (sum_c, scale_b) in zip(memory.replica, before, strict=True):
                kept.sum_c.copy_(sum_c)
                kept.scale_b.copy_(scale_b)
            if undone is None:
                self._undo_kept(memory, given, len(given))
            else:
                memory.swap(undone)

    @property
    def needs_lost_input(self) -> bool:
        """As Reducer.needs_lost_input: where it may have to be encoded again."""
        return self._lost is not None and self._lost_sums is None

    def rebuilds(self, memory: ErrorMemory) -> bool:
        """Are the rows of the last exchange of `memory` here, and has nobody restored that since?"""
        return isinstance(memory, KeptSums) and memory.outliers is not None and self.last(memory) is not None

    def share(
        self,
        memory: ErrorMemory,
        holders: int,
        missing: Collection[int] = (),
        *,
        rebuilt_by: int | None = None,
        out_N: Tensor | None = None,
    ) -> Tensor:
        """As Reducer.share."""
        part_N = memory.share(holders, missing, out_N)
        if rebuilt_by is not None and missing and isinstance(memory, KeptSums):
            result = self._results[self._last] if rebuilt_by == self._group.rank else None
            add_rebuilt_(part_N, memory, self._crossed(), self._kernels, missing, holders, result)
        return part_N

    def left_squares(self, memory: ErrorMemory) -> Tensor:
        """As Reducer.left_squares."""
        if not self.rebuilds(memory) or self._counts_again or not isinstance(memory, KeptSums):
            return self._like.new_zeros(2)
        result = self._results[self._last]
        return left_squares(memory, self._crossed(), self._kernels, self._group.rank, result)

    def _crossed(self) -> list[tuple[BucketRows, Crossing]]:
        """Of each bucket, the rows of the exchange that error memory stands at."""
        found = []
        for rows in self._rows:
            crossing = rows.now if self._counts_again else rows.last
            assert crossing is not None
            found.append((rows, crossing))
        return found

    def fidelity(self, memory: ErrorMemory) -> Fidelity | None:
        """How well the last exchange carried what it was given; None where it was not one of `memory`.

        Collective: one mean of a few thousand numbers. Waits for the device. Modifies nothing. Raises: PeerLost.
        """
        if self._last_of is None or self._last_of[0] is not memory or not isinstance(memory, KeptSums):
            return None
        return fidelity_of(memory, self._rows, self._results[self._last], self._group)

    def _make_means(self, wire: FullWire) -> FullMeans:
        like, second = self._like, self._second_communicator
        return means_of(wire, self._group, second, self.buckets, like, self._make_pipeline())

    def _make_rows(self, block: int, like: Tensor, keeps: Keeps) -> list[BucketRows]:
        return rows_of(self.buckets, block, self._group.rank, self.size, like, keeps)

    def _make_pipeline(self) -> Pipeline:
        return pipeline_for(self._group, self._second_communicator, self._like, len(self.buckets))

    def _launch(self, k: int, given: Given) -> None:
        memory, x_N = self._open(), given.vector_N
        self._expect(k)
        numel = self.buckets.layout.numel
        if given.form is not None:
            pass  # looked at where it is made
        elif x_N is None or x_N.shape != (numel,) or x_N.dtype != self._like.dtype or not x_N.is_contiguous():
            told = "nothing" if x_N is None else f"{x_N.dtype}{list(x_N.shape)}"
            raise ValueError(f"vector is {told}: must be contiguous {self._like.dtype}[{numel}], as the layout")
        with whole_or_left(self._group, self._break_off), self._pipeline.fed():
            began = time.perf_counter()
            x_b = self._sum_of(k, given)
            self._writing.add("launch")
            self._encode(memory, k, given, x_b)
            self.stats.encode_s += time.perf_counter() - began
            self._given.append(given)
            self._writing.discard("launch")
            self._send(k)

    def _expect(self, k: int) -> None:
        if k != len(self._given):
            raise RuntimeError(f"bucket {k}: the next to launch is {len(self._given)} of {len(self.buckets)}")

    def _encode(self, memory: KeptSums, k: int, given: Given, x_b: Tensor | None) -> None:
        """Add what was given to the kept sums of bucket k, and write its rows and their flags. x: as _sum_of()."""
        rows, kept = self._rows[k], memory.worker[k]
        noise = self._worker_noise(rows)
        if x_b is not None:
            self._kernels.encode_sum(kept.sum_c, kept.scale_b, x_b, rows.table, rows.sent, noise)
            return
        assert given.weight is not None
        at = kept.sum_c, kept.scale_b, self._parts_of(k, given), given.weight, rows.gathered[self._last]
        if given.factor_r is None:
            self._kernels.encode_lerp(*at, rows.table, rows.sent, noise)
        else:
            self._kernels.encode_scaled(*at, given.factor_r, self._pieces_of(k), rows.table, rows.sent)

    def _worker_noise(self, rows: BucketRows) -> Noise:
        if not self._rounds:
            return NONE
        return noise_for(self._drawn, WORKER, self._group.rank).at(rows.span.start)

    def _server_noise(self, start: int) -> Noise:
        """Of the chunk that begins there, whoever serves it or keeps a replica."""
        return noise_for(self._drawn, SERVER).at(start) if self._rounds else NONE

    def _sum_of(self, k: int, given: Given) -> Tensor | None:
        """Bucket k of what is added to the kept sums; None where the kernels form it from the last result."""
        span = self._rows[k].span
        if given.form is not None:
            return given.form(span)
        assert given.vector_N is not None
        if given.weight is None:
            return given.vector_N[span]
        if given.start_N is None:
            return None
        start_b = given.start_N[span]
        sum_b = torch.cat([part.to(start_b.dtype) for part in self._parts_of(k, given)])
        sum_b.sub_(start_b).mul_(given.weight).add_(start_b)
        return sum_b if given.factor_r is None else sum_b.mul_(self._pieces_of(k).spread(given.factor_r))

    def _send(self, k: int) -> None:
        if self._error is not None or self._pipeline.failed:
            return  # a peer is lost: nobody will answer
        try:
            rows = self._rows[k]
            self._first[k] = self._group.start_all_to_all(rows.collected_nB, rows.sent_nB)
            if rows.replica is not None:
                rows.replica.take(rows)
                self._replicated[k] = self._group.start_all_to_all(rows.replica.collected_nB, rows.replica.sent_nB)
        except CommError as error:
            self._error = error
            return
        self._pipeline.submit(self._serve, k)

    def _serve(self, k: int) -> None:
        """The second half of bucket k. In the pipeline's thread, where it has one."""
        pending, memory, pipeline = self._first[k], self._memory, self._pipeline
        assert pending is not None
        assert memory is not None
        pipeline.hold(pending)
        self._first[k] = None
        if (replicated := self._replicated[k]) is not None:  # who has the result knows that all have these rows
            pipeline.hold(replicated)
            self._replicated[k] = None
        pipeline.admit(k, self._rows[k].fuse)
        self._writing.add("serving")
        self._serve_rows(memory, k)
        self._num_served = k + 1
        self._writing.discard("serving")
        rows = self._rows[k]
        gathered_nB = rows.gathered_nB[1 - self._last]
        self._second[k] = self._second_communicator.start_all_gather(gathered_nB, rows.served_B)

    def _serve_rows(self, memory: KeptSums, k: int) -> None:
        """Average what was collected, and encode it for all.

        A row that its sender could not write has scales that are NaN, so the flag is also that of all collected rows.
        """
        rows, kept = self._rows[k], memory.server[k]
        if rows.own_table.numel:
            table, served, noise = rows.own_table, rows.served, self._server_noise(rows.own.start)
            self._kernels.serve(kept.sum_c, kept.scale_b, rows.collected, self.size, table, served, noise)

    def _follow(self, memory: KeptSums) -> None:
        """Do for the replica what the rank before has done for its server error: the same kernel on the same rows.

        So its sums are bit-equal to that rank's, and no float crosses the wire. It follows where an exchange is
        committed, so there is nothing to undo; all rows are there by then, for phase 2 waits for them.
        """
        for rows, kept in zip(self._rows, memory.replica, strict=False):
            replica = rows.replica
            if replica is not None and replica.table.numel:
                table, served, noise = replica.table, replica.served, self._server_noise(replica.span.start)
                self._kernels.serve(kept.sum_c, kept.scale_b, replica.collected, self.size, table, served, noise)

    def _parts_of(self, k: int, given: Given) -> list[Tensor]:
        """Bucket k of what was given, in tensors that lie end to end."""
        rows = self._rows[k]
        assert given.vector_N is not None
        if not given.runs:
            return [given.vector_N[rows.span]]
        if not self._parts[k]:
            self._parts[k] = by_run(rows.span.start, rows.table, self.buckets.layout)
        return [part.of(given.vector_N, given.runs) for part in self._parts[k]]

    def _pieces_of(self, k: int) -> Pieces:
        rows, found = self._rows[k], self._pieces[k]
        if found is None:
            found = self._pieces[k] = Pieces.of(rows.table, rows.span.start, self.buckets.layout)
        return found

    def _settle(self) -> None:
        """Wait until no collective touches a buffer. The first error stays in _error; later ones follow from it."""
        raised = settle(self._pipeline, self._first, self._replicated, self._second)
        self._error = self._error or raised

    def _all_finite(self) -> bool:
        """Could every server write all of its rows? Waits for the device; a peer that is lost is noted in _error."""
        try:
            return bool(self._pipeline.host(self._results[1 - self._last].finite()))
        except CommError as error:
            self._error = error
            return False

    def _lose(self, memory: KeptSums) -> None:
        """Undo, and remember what was undone, for another rank may have the whole result (redone)."""
        num_served = self._pipeline.admitted(self._num_served)
        if num_served is None:  # a GPU that does not come back from an abort
            memory.torn = "what was collected may be garbage of collectives that were aborted"
            self._close()
            return
        given = tuple(self._given)
        if len(given) == num_served == len(self.buckets) and not any(one.is_nothing for one in given):
            self._lost = memory, given
            self._lost_sums = memory.exchanged_sums() if memory.is_narrow else None
        self._undo(memory)

    def _break_off(self) -> None:
        """Undo what this rank alone does not go on with, unless sums are torn. Where nothing is open, nothing."""
        memory = self._memory
        if memory is None:
            return
        self._settle()
        if self._writing:
            memory.torn = f"an error came in {' and '.join(sorted(self._writing))} of an exchange"
            self._close()
        else:
            self._lose(memory)

    def _undo(self, memory: KeptSums) -> None:
        self._writing.add("undoing")
        self._undo_kept(memory, self._given, self._num_served)
        self._close()

    def _undo_kept(self, memory: KeptSums, given: Sequence[Given], num_served: int) -> None:
        for k in range(num_served):
            rows, kept = self._rows[k], memory.server[k]
            if rows.own_table.numel:
                collected, table, noise = rows.collected, rows.own_table, self._server_noise(rows.own.start)
                self._kernels.undo_serve(kept.sum_c, kept.scale_b, collected, self.size, rows.served, table, noise)
        for k, one in enumerate(given):
            rows, kept = self._rows[k], memory.worker[k]
            if one.is_nothing:
                continue
            table, sent, noise = rows.table, rows.sent, self._worker_noise(rows)
            if (x_b := self._sum_of(k, one)) is not None:
                self._kernels.undo_sum(kept.sum_c, kept.scale_b, x_b, sent, table, noise)
                continue
            assert one.weight is not None
            at = kept.sum_c, kept.scale_b, self._parts_of(k, one), one.weight, rows.gathered[self._last]
            if one.factor_r is None:
                self._kernels.undo_lerp(*at, sent, table, noise)
            else:
                self._kernels.undo_scaled(*at, one.factor_r, self._pieces_of(k), sent, table)

    def _close(self) -> None:
        self._memory, self._error, self._finished, self._num_served = None, None, False, 0
        self._refuses = False
        self._given.clear()
        self._writing.clear()
