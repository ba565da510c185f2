"""A sign for each value and a scale for each block of them: kept sums in place, fused kernels.  [Tang et al. 2021]

    launch    c <- e + x, s <- its scale, a row of s and signs for each rank; all-to-all
    serve     the mean of the collected rows + server error, encoded alike; all-gather
    result    the rows received last: a bit a value, decoded where they are read (rows.py)

The errors are never written to memory (memory.py). Kept sums are written in place on the way, while backward still
runs, and undone where the exchange fails: c <- c' - z, exact to rounding (4 ulp of the largest |c|; of sums in bfloat16
1 of its ulp). z is formed again from what the bucket was launched with, and from what was collected. Of a block that
was not finite nothing was written, and its scale in the row is NaN.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from thinwire.comm.codecs.sign import SignCodec
from thinwire.comm.exchange.alone import Results
from thinwire.comm.exchange.coder import GIVEN_AGAIN, Coder, Given
from thinwire.comm.exchange.fidelity import Fidelity, fidelity_of
from thinwire.comm.exchange.memory import SERVER, WORKER, ErrorMemory, Kept, Place, Served, Where, Whole, noise_for
from thinwire.comm.exchange.outliers import Outliers
from thinwire.comm.exchange.rebuild import add_rebuilt_, left_squares
from thinwire.comm.exchange.rows import BucketRows, Crossing, Cut, Received
from thinwire.comm.keeps import Keeps
from thinwire.comm.kernels import bf16
from thinwire.comm.kernels.added import Added, Lerp, MeanOfRows, ScaledLerp, Vector
from thinwire.comm.kernels.bf16 import NONE, Noise
from thinwire.comm.kernels.blocks import BlockTable, Pieces, RowMemory
from thinwire.comm.kernels.choose import kernels_for, warm_up
from thinwire.comm.layout import Buckets
from thinwire.comm.protocol import Group, Pending


class SignCoder(Coder):
    """Signs of vectors of one layout over one group. second: its second communicator, or the group itself.

    keeps: what each rank keeps of the others, for the death of one. REPLICA: the server error of the rank before it, so
    that phase 1 sends each row twice. sums: the type that kept sums have, where it is not the vector's: bfloat16, for
    vectors of float32. threads: cores that a kernel may use. row_bytes: of the rows of each bucket, where they are
    longer than they need to be. where: what of the model's vector is exchanged; None: all of it. results: "read": no
    exchange begins from the last one, so that it is kept only for the dead (ROWS).
    Raises: ValueError.
    """

    in_place = True
    takes_ranges = True

    def __init__(
        self,
        group: Group,
        second: Group,
        buckets: Buckets,
        codec: SignCodec,
        like: Tensor,
        *,
        keeps: Keeps = Keeps.NOTHING,
        sums: torch.dtype | None = None,
        threads: int = 1,
        row_bytes: Sequence[int] | None = None,
        where: Where | None = None,
        results: Results = "kept",
    ) -> None:
        if sums not in (None, like.dtype) and (sums, like.dtype) != (torch.bfloat16, torch.float32):
            raise ValueError(f"sums = {sums}: must be torch.bfloat16 for vectors of torch.float32, or {like.dtype}")
        super().__init__(buckets, like)
        self._group, self._second = group, second
        self._where = where or Whole(group, buckets.layout.numel)
        self._sums = sums
        self.keeps_last = results == "kept" or keeps is Keeps.ROWS
        self._rounds = sums not in (None, like.dtype)
        """Are sums kept in fewer bits, rounded by what an exchange draws?"""
        self._kernels = kernels_for(like.device, like.dtype, threads)
        if like.device.type == "cpu":
            warm_up(like.dtype, sums)  # not in the first exchange, where peers would wait for it
        self._block = codec.block
        lengths: Sequence[int | None] = row_bytes or [None] * len(buckets)
        self._rows = [
            BucketRows(bucket, buckets, codec.block, group.rank, group.size, like, keeps=keeps, row_bytes=length)
            for bucket, length in zip(buckets, lengths, strict=True)
        ]
        self._places = [_place(rows, group.rank) for rows in self._rows]
        self._pieces: list[Pieces | None] = [None] * len(self._rows)
        """Of each bucket, where runs have factors; made when they first have."""
        self._in_vector: list[tuple[Tensor, tuple[Tensor, ...]] | None] = [None] * len(self._rows)
        """Of each bucket, a vector that was mixed with the last result, as a gradient is, and its part of it."""
        self._memory: ErrorMemory | None = None
        self._formed_by: Added | None = None
        """From form() to encode(): what kernels form a bucket by."""
        self._drawn = 0
        """The draw of the exchange under way, or of the last one."""
        self._counts_again = False
        """Inside redone(): the memory stands at the exchange whose rows are those under way."""

    def new_memory(self) -> ErrorMemory:
        """Error memory for one exchanged vector, empty: kept sums."""
        outliers = Outliers(self._rows, self._group, self.like) if self._rows[0].keeps_last else None
        return ErrorMemory(self._places, self._where, self.like, sums=self._sums, outliers=outliers)

    def owns(self, memory: ErrorMemory) -> bool:
        """Was it made here?"""
        return memory.places is self._places

    def begin(self, memory: ErrorMemory | None, draw: int) -> None:
        """Have memory for sums, rows and results."""
        if memory is None:
            raise TypeError("memory = None: signs leave out too much; give what new_memory() made")
        self._memory, self._drawn = memory, draw
        memory.take_room(draw)
        for rows in self._rows:
            rows.take_room()  # of all, so that what is sent of each later has its place
        if not self.results:  # from the first exchange on: a warm-up needs none, and a regroup has the old ones
            cut, sets = Cut(self.buckets, self._block, self._group.size), 1 + self.keeps_last
            made = [Received.of(self._rows, self._kernels, self.like, cut, 2 // sets) for _ in range(sets)]
            self.results = made[0], made[-1]

    def form(self, k: int, given: Given) -> Tensor | None:
        """Bucket k of what is added to the kept sums; None where the kernels form it themselves."""
        in_kernel = given.form is None and given.weight is not None and given.start_N is None
        self._formed_by = None if in_kernel else self._advanced(k, given)
        return None if in_kernel or self._formed_by is not None else self.formed(k, given)

    def encode(self, k: int, given: Given, formed_b: Tensor | None) -> None:
        """Add what was given to the kept sums of bucket k, and write its rows and their flags."""
        rows, kept, z = self._rows[k], self._open.worker[k], self._added(k, given, formed_b)
        self._formed_by = None
        self._kernels.encode(kept.sum_c, kept.scale_b, z, rows.table, rows.sent, self._worker_noise(rows))

    def encode_nothing(self, k: int) -> None:
        """Scales of 0."""
        rows = self._rows[k]
        rows.sent.values_V[rows.table.scale_at] = 0
        rows.sent_nB[:, 0] = 1

    def refuse(self, k: int, flag: int) -> None:
        """Scales that are NaN; flags of 0."""
        self._rows[k].refuse()

    def send(self, k: int) -> Sequence[Pending]:
        """The rows to their servers; where replicas are kept, to the ranks after them too."""
        rows = self._rows[k]
        first = self._group.start_all_to_all(rows.collected_nB, rows.sent_nB)
        if rows.replica is None:
            return (first,)
        rows.replica.take(rows)
        # Who has the result knows that all have these rows.
        return first, self._group.start_all_to_all(rows.replica.collected_nB, rows.replica.sent_nB)

    def fuse(self, k: int) -> Tensor | None:
        """The scales of the first collected row."""
        return self._rows[k].fuse()

    def serve(self, k: int, given: Given) -> None:
        """Average what was collected, and encode it for all.

        A row that its sender could not write has scales that are NaN, so the flag is also that of all collected rows.
        """
        rows, kept = self._rows[k], self._open.server[k]
        if rows.own_table.numel:
            noise = self._server_noise(rows.own.start)
            self._serve(kept, rows.collected, rows.own_table, rows.served, noise)

    def pass_on(self, k: int) -> Pending | None:
        """What is served, to all."""
        rows = self._rows[k]
        return self._second.start_all_gather(rows.gathered_nB[1 - self.turn], rows.served_B)

    def finite(self) -> Tensor:
        """Could every server write all of its rows?"""
        if not self.is_whole:
            return torch.cat([rows.gathered_nB[1 - self.turn][:, 0] for rows in self._crossing]).amin()
        made = self.results[1 - self.turn]
        assert isinstance(made, Received)
        return made.finite()

    def own_flag(self, given: Sequence[Given]) -> Tensor:
        """Of the rows that were sent."""
        return torch.stack([rows.least_flag(self._kernels) for rows in self._crossing]).amin()

    def complete(self) -> None:
        """The largest server errors, now and then; of buckets that cross by parts, with the last of these."""
        outliers = self._open.outliers
        if outliers is not None and outliers.is_due and self._has_last:
            outliers.send([(kept.sum_c, kept.scale_b) for kept in self._open.server])

    def keep(self) -> None:
        """What has crossed is the last exchange, and replicas follow it."""
        self._follow(self._open)
        for rows in self._crossing:
            rows.turn()
        if self._open.outliers is not None and self._has_last:
            self._open.outliers.exchanges += 1
        self._memory = None

    def merge(self) -> None:
        """Their rows, 1/32 of the floats."""
        for rows in self._crossing:
            rows.gathered_nB[self.turn].copy_(rows.gathered_nB[1 - self.turn])

    def remember(self) -> object | None:
        """Copies of rounded sums, which nobody finds again; else what was given makes them again."""
        return self._open.copies() if self._open.is_narrow else GIVEN_AGAIN

    @contextmanager
    def redone(self, memory: ErrorMemory | None, given: Sequence[Given], remembered: object) -> Iterator[bool]:
        """Encode and serve once more what was given and collected; afterwards undo it."""
        assert memory is not None
        self._memory = memory
        undone = None if remembered is GIVEN_AGAIN else memory.swap(remembered)  # type: ignore[arg-type]
        if undone is None:
            for k, one in zip(self.at, given, strict=True):
                if not one.is_empty:
                    self.encode(k, one, self.form(k, one))
                self.serve(k, one)
        replicas = [memory.replica[k] for k in self.at] if memory.replica else []
        before = [kept.copy() for kept in replicas]
        self._follow(memory)
        self._counts_again = True
        try:
            yield True
        finally:  # also where a peer is lost inside: the next attempt begins from the same
            self._counts_again = False
            for kept, old in zip(replicas, before, strict=True):
                kept.sum_c.copy_(old.sum_c)
                kept.scale_b.copy_(old.scale_b)
            if undone is None:
                self._undo(memory, given, len(given))
            else:
                memory.swap(undone)
            self._memory = None

    def undo(self, given: Sequence[Given], num_served: int, *, lost: bool) -> None:
        """c <- c' - z, where something was written."""
        self._undo(self._open, given, num_served)
        self._memory = None

    def rebuilds(self, memory: ErrorMemory) -> bool:
        """Where the rows of the last exchange are kept."""
        return memory.outliers is not None

    def add_rebuilt_(
        self, part_N: Tensor, memory: ErrorMemory, missing: Collection[int], holders: int, *, has_result: bool
    ) -> None:
        """part <- part + this survivor's part of what is estimated of the missing ranks (rebuild.py)."""
        if self._rows[0].keeps_last:
            result = self.results[self.turn] if has_result else None
            assert result is None or isinstance(result, Received)
            add_rebuilt_(part_N, memory, self._crossed(), self._kernels, missing, holders, result)

    def left_squares(self, memory: ErrorMemory) -> Tensor:
        """What the estimate would leave out."""
        if not self.rebuilds(memory) or self._counts_again:
            return super().left_squares(memory)
        result = self.results[self.turn]
        assert isinstance(result, Received)
        return left_squares(memory, self._crossed(), self._kernels, self._group.rank, result)

    def fidelity(self, memory: ErrorMemory) -> Fidelity | None:
        """Of the sums that are kept."""
        return fidelity_of(memory, self.buckets.layout, self.results[self.turn], self._group)

    @property
    def _crossing(self) -> Sequence[BucketRows]:
        """The rows of the buckets of this exchange."""
        return self._rows[self.at.start : self.at.stop]

    @property
    def _has_last(self) -> bool:
        return self.at.stop == len(self.buckets)

    @property
    def _open(self) -> ErrorMemory:
        assert self._memory is not None
        return self._memory

    def _added(self, k: int, given: Given, formed_b: Tensor | None) -> Added:
        if formed_b is not None:
            return Vector(formed_b)
        if self._formed_by is not None:
            return self._formed_by
        assert given.weight is not None
        lerp = self._parts_again(k, given), given.weight, self._rows[k].gathered[self.turn]
        if given.factor_r is None:
            return Lerp(*lerp)
        return ScaledLerp(*lerp, given.factor_r, self._pieces_of(k))

    def _parts_again(self, k: int, given: Given) -> Sequence[Tensor]:
        """As parts_of(); the same tuple from step to step, by which kernels know it, of a vector that has all of it."""
        if not self.is_in_vector(k, given):
            return self.cut_parts(k, given)
        known = self._in_vector[k]
        if known is None or known[0] is not given.vector_N:
            assert given.vector_N is not None
            known = self._in_vector[k] = given.vector_N, tuple(self.parts_of(k, given))
        return known[1]

    def _advanced(self, k: int, given: Given) -> Added | None:
        """What the kernels form bucket k by in the pass that encodes it, where they can."""
        if given.added is None or not self._kernels.advances:
            return None
        return given.added(slice(*self.buckets.spans[k]))

    def _serve(self, kept: Kept, rows: RowMemory, table: BlockTable, served: RowMemory, noise: Noise) -> None:
        mean = MeanOfRows(rows, self._group.size)
        self._kernels.encode(kept.sum_c, kept.scale_b, mean, table, served, noise)

    def _follow(self, memory: ErrorMemory) -> None:
        """Do for the replica what the rank before has done for its server error: the same kernel on the same rows.

        So its sums are bit-equal to that rank's, and no float crosses the wire. It follows where an exchange is
        committed, so there is nothing to undo; all rows are there by then, for phase 2 waits for them.
        """
        for k in self.at if memory.replica else ():
            replica, kept = self._rows[k].replica, memory.replica[k]
            if replica is not None and replica.table.numel:
                self._serve(
                    kept, replica.collected, replica.table, replica.served, self._server_noise(replica.span.start)
                )

    def _undo(self, memory: ErrorMemory, given: Sequence[Given], num_served: int) -> None:
        for k in self.at[:num_served]:
            rows = self._rows[k]
            if rows.own_table.numel:
                mean_c = self._mean(rows)
                _take_back(memory.server[k], mean_c, rows.served, rows.own_table, self._server_noise(rows.own.start))
        for k, one in zip(self.at, given, strict=False):
            if not one.is_empty:
                rows = self._rows[k]
                _take_back(memory.worker[k], self.formed(k, one), rows.sent, rows.table, self._worker_noise(rows))

    def _mean(self, rows: BucketRows) -> Tensor:
        """The mean of what was collected, as serve() has added it up: in the order of ranks."""
        mean_c = self.like.new_zeros(rows.own_table.numel)
        decoded_c = torch.empty_like(mean_c)
        for one_B in rows.collected_nB:
            self._kernels.decode(RowMemory.of(one_B, self.like.dtype), rows.own_table, decoded_c)
            mean_c.add_(decoded_c)
        return mean_c.div_(mean_c.new_full((), self._group.size))

    def _worker_noise(self, rows: BucketRows) -> Noise:
        if not self._rounds:
            return NONE
        return noise_for(self._drawn, WORKER, self._group.rank).at(rows.span.start)

    def _server_noise(self, start: int) -> Noise:
        """Of the chunk that begins there, on the rank that serves it and on one that keeps a replica."""
        return noise_for(self._drawn, SERVER).at(start) if self._rounds else NONE

    def _pieces_of(self, k: int) -> Pieces:
        rows, found = self._rows[k], self._pieces[k]
        if found is None:
            found = self._pieces[k] = Pieces.of(rows.table, rows.span.start, self.buckets.layout)
        return found

    def _crossed(self) -> list[tuple[BucketRows, Crossing]]:
        """Of each bucket, the rows of the exchange that error memory stands at."""
        found = []
        for k, rows in enumerate(self._rows):
            crossing = rows.now if self._counts_again and k in self.at else rows.last
            assert crossing is not None
            found.append((rows, crossing))
        return found


def _place(rows: BucketRows, rank: int) -> Place:
    replica = rows.replica
    return Place(
        Served(rows.span, rows.table, rank),
        Served(rows.own, rows.own_table, rank),
        None if replica is None else Served(replica.span, replica.table, replica.before),
    )


PIECE = 256
"""Blocks of which sums are taken back at a time, where some of them were not written or all are in few bits."""


def _take_back(kept: Kept, z_c: Tensor, written: RowMemory, table: BlockTable, noise: Noise) -> None:
    """c <- c - z, s <- 0, of each block whose scale in `written` says that it was written. z: float[c]."""
    missing_b = torch.isnan(written.values_V[table.scale_at])
    if kept.sum_c.dtype == z_c.dtype and not bool(missing_b.any()):
        kept.sum_c.sub_(z_c)
        kept.sum_c[table.dead] = 0
        kept.scale_b.zero_()
        return
    bounds = table.on_host.starts.tolist()
    for first in range(0, table.num_blocks, PIECE):
        blocks = slice(first, min(first + PIECE, table.num_blocks))
        at = slice(bounds[blocks.start], bounds[blocks.stop])
        sizes = table.starts[blocks.start : blocks.stop + 1].diff()
        stays_c = torch.repeat_interleave(missing_b[blocks], sizes, output_size=at.stop - at.start)
        sum_c = kept.sum_c[at]
        before_c = sum_c
        if sum_c.dtype != z_c.dtype:
            before_c = bf16.unrounded(sum_c, noise.at(noise.start + at.start))
        sum_c.copy_(torch.where(stays_c, sum_c.to(z_c.dtype), before_c - z_c[at]))
    kept.sum_c[table.dead] = 0
    kept.scale_b.masked_fill_(~missing_b, 0)
