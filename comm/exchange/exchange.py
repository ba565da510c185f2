"""The state machine of everything that crosses the wire: one exchange at a time, bucket by bucket.  [Tang et al. 2021]

    begin(memory)    launch_*(0) ... launch_*(K-1)    finish()    read the result    commit()
                                                      raises: everything is undone, nothing is open
    abandon()        at any point: everything is undone
    begin(memory, at=range(a, b))    launch_*(a) ... launch_*(b-1)    the same of these buckets alone

    bucket 0   encode | first collective | serve | second collective |
    bucket 1            encode           | first collective          | serve | second collective |
    bucket 2                               encode                    | first collective  ...

The caller encodes and starts the first collective, while backward still makes the next bucket if it likes; a pipeline
waits for it, serves, and starts the second one on the group's second communicator, so that on each all ranks have one
order. What the bytes are a Coder says (coder.py).

A step counts once, for all its buckets, when the last has been received and every rank could encode what it gave. A
signal is handled where others are waited for (comm/signals.py). What it raises, as any error of this rank alone, undoes
the exchange too, and this rank leaves the group, so that nobody waits for it. Where an error comes while error memory
is written in place, as one out of memory may, that memory is torn, and its next use says so.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from thinwire.comm.calls import calls_of, interrupted
from thinwire.comm.errors import CommError, NonFiniteInput, PeerLost, Refused
from thinwire.comm.exchange.coder import ABSENT, GIVEN_AGAIN, UNUSABLE, Coder, Given
from thinwire.comm.exchange.memory import ErrorMemory
from thinwire.comm.exchange.pipeline import Pipeline
from thinwire.comm.kernels.added import Added
from thinwire.comm.protocol import Group, Leavable, Pending, Result, Stats
from thinwire.comm.signals import deferred

REFUSED = 2
"""The flag of a rank that refuses an exchange; 1: what it gave is finite, 0: it is not."""
ANOTHER_PART = (
    "what another rank of this box has given, of other parts of the same tensors, holds NaN or infinity; nothing was "
    "changed. Look at the loss and the learning rate of the step before"
)
_NOTHING = nullcontext()
LOST = -1
"""What a rank says where it has lost a peer, to those with which it agrees."""


class Exchange:
    """Exchanges of vectors of one layout over one group, through one coder. Every rank calls alike.

    draw: which numbers the next exchange rounds by, where error memory is kept in few bits. It counts up with each
    exchange; an optimizer that saves and loads sets it, the same on every rank.
    """

    draw: int = 0

    agree: Callable[[int], int] | None = None
    """Asked by finish(), where this rank exchanges a part of what the ranks of its box do, each with ranks of its own:
    whether all of these exchanges count. Collective in the box: 1 all is finite, 0 it is not, LOST a peer is; the least
    of what they say."""

    def __init__(self, group: Group, coder: Coder, pipeline: Pipeline) -> None:
        self.size: int = group.size
        self.stats: Stats = group.stats
        self.buckets = coder.buckets
        self._group, self._coder, self._pipeline = group, coder, pipeline
        self.is_open = False
        self._memory: ErrorMemory | None = None
        self._finished = self._refuses = self._is_launching = False
        self._given: list[Given] = []
        self._first: list[Sequence[Pending]] = [()] * len(coder.buckets)
        self._second: list[Sequence[Pending]] = [()] * len(coder.buckets)
        self._num_served = 0
        self._writing: set[str] = set()
        """What writes error memory in place now. Some of it still does after an error: then that is torn."""
        self._error: BaseException | None = None
        self._not_received: CommError | None = None
        self._last_of: tuple[ErrorMemory, int, frozenset[int]] | None = None
        """Whose the last committed result is, that memory's version then, and of which buckets there is one."""
        self._lost: tuple[ErrorMemory | None, tuple[Given, ...], object] | None = None
        """The last exchange where a peer was lost after this rank had done all its part: others may have the result."""

    @property
    def num_launched(self) -> int:
        """Buckets launched in the open exchange; of all buckets, the next one to launch is of this number."""
        return len(self._given)

    @property
    def at(self) -> range:
        """The buckets of the exchange that is open, or of the last one."""
        return self._coder.at

    @property
    def has_failed(self) -> bool:
        """Is a peer lost since the first launch, as far as is known? finish() raises it."""
        return self._error is not None or self._pipeline.failed

    @property
    def has_lost(self) -> bool:
        """Was the last exchange undone because a peer was lost, so that redone() may count it?"""
        return self._lost is not None

    def begin(self, memory: ErrorMemory | None, *, at: range | None = None) -> None:
        """Open an exchange that keeps in `memory` what it leaves out; None: that is dropped. Local.

        at: the only buckets that are exchanged, one after another, the same on every rank; None: all. Of the others
        nothing is sent, their errors stay as they are, and the result has nothing; last() has what came last of each.
        Raises: RuntimeError where one is open; TypeError for a memory that this reducer has not made; ValueError for
        buckets that are none, or cannot be exchanged alone.
        """
        if self.is_open:
            raise RuntimeError(
                "an exchange is open: finish() and commit() it, or abandon() it, before the next begin()"
            )
        if memory is not None:
            if not isinstance(memory, ErrorMemory) or not self._coder.owns(memory):
                raise TypeError(f"memory is {type(memory).__name__}: must come from new_memory() of this reducer")
            memory.refuse_torn()
        self._coder.choose(at)
        self._coder.begin(memory, self.draw)
        self._last_of = self._last_of if self._coder.keeps_last else None
        self._memory, self._lost, self.is_open = memory, None, True

    def launch_sum(self, k: int, x_N: Tensor) -> None:
        """Encode bucket k of x and send it. Buckets are launched in order, the same on every rank.

        x: float[N], the whole vector, of which only bucket k is read, now and if the exchange is undone: it must not
        change before commit(). Raises: RuntimeError, ValueError for a wrong call. finish() reports a lost peer.
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
        """As launch_sum of r + weight (x - r), r being start, or last(memory), in one pass where the coder can.

        runs: for each live run of the layout float[run], contiguous, to be read in place of that part of x, or None;
        what is not in buckets.layout.alone() is read of x all the same. start: float[N]. factor: float[live runs], f:
        what is sent is f (r + weight (x - r)), and last(memory) is f r, in each run with its f. None of them may change
        before commit(). Raises: RuntimeError where there is no r.
        """
        self._open()
        if start_N is None and (self._memory is None or self.last(self._memory) is None):
            raise RuntimeError("no result of this memory has been committed since restore(): use launch_sum")
        self._launch(k, Given(x_N, weight, runs, start_N, factor_r))

    def launch_formed(
        self,
        k: int,
        form: Callable[[slice], Tensor],
        x_N: Tensor | None = None,
        runs: Sequence[Tensor | None] = (),
        added: Callable[[slice], Added | None] | None = None,
    ) -> None:
        """As launch_sum of a vector that nobody keeps: form(at) makes its elements `at`, new, whenever it is called.

        It is called now, and again where the exchange is undone or redone: what it reads must not change before
        commit(); of one rank whose results are "read" before that is read, and of parts of a bucket.
        x, runs: as in launch_lerp, where what is formed is finite if these are: one rank looks at them in its place.
        added: added(at) gives what kernels of signs form the same by, or None, as Given has it.
        """
        self._launch(k, Given(x_N, runs=runs, form=form, added=added))

    def launching(self) -> AbstractContextManager[object]:
        """Around launches between which the caller queues nothing of its own: what each prepares is prepared once."""
        return _NOTHING if self._is_launching else self._prepared()

    @contextmanager
    def _prepared(self) -> Iterator[None]:
        with whole_or_left(self._group, self.break_off), self._pipeline.fed():
            self._is_launching = True
            try:
                yield
            finally:
                self._is_launching = False

    def launch_absent(self, k: int) -> None:
        """Send in place of bucket k that this rank gives nothing this time: its part of the mean is 0. Of a rank alone.

        Its error memory stays as it is: ErrorMemory.add_ keeps there what it does not give. Raises: as launch_sum; and
        RuntimeError with topology node_first, where what is compressed is a box's.
        """
        self._expect(k)
        if not self._coder.sits_out:
            raise RuntimeError("launch_absent with topology node_first: a rank of a box cannot give nothing alone")
        with whole_or_left(self._group, self.break_off), self._pipeline.fed():
            self._coder.encode_nothing(k)
            self._given.append(ABSENT)
            self._send(k)

    def launch_refused(self, k: int) -> None:
        """Send in place of bucket k that this rank takes no part: every rank raises Refused in finish()."""
        self._expect(k)
        self._refuses = True
        with whole_or_left(self._group, self.break_off), self._pipeline.fed():
            self._send_nothing(k, REFUSED)

    def finish(self) -> None:
        """Wait for all buckets, and see that every rank could encode all that it gave. Waits for the device once.

        Raises: PeerLost; NonFiniteInput, alike on every rank. Then all is undone: R of the memory is as before, to
        rounding where it was written in place (4 ulp of the largest kept sum), what was committed last is as before,
        bit for bit, what was launched is undefined where results take its place, and no exchange is open.
        """
        self._open()
        if len(self._given) < len(self.at) or self._finished:
            raise RuntimeError(
                f"{len(self._given)} of {len(self.at)} buckets launched, finished = {self._finished}: launch "
                "every bucket, then finish() once"
            )
        with whole_or_left(self._group, self.break_off):
            began = time.perf_counter()
            self._settle(receive=True)
            is_finite = own_finite = self._error is None and self._all_finite()
            if self.agree is not None:
                is_finite = self._agreed(self.agree, own_finite)
            self.stats.waited_s += time.perf_counter() - began
            self._raise_lost()
            if not is_finite:
                own = self._coder.own_flag(self._given)
                if self._refuses:
                    own.fill_(REFUSED)
                self._undo(lost=False)
                if own_finite:
                    raise NonFiniteInput(ANOTHER_PART)
                raise non_finite(gather_flags(self._group, own))
            try:
                self._coder.complete()
            except CommError as error:
                self._error = error
            self._raise_lost()
            self._finished = True

    @property
    def result(self) -> Result:
        """What the finished exchange gave. Raises: RuntimeError where none is."""
        self._require_finished()
        return self._coder.results[1 - self._coder.turn]

    def last(self, memory: ErrorMemory) -> Result | None:
        """The last committed result, if it is of `memory`, untouched since; launch_lerp forms what it sends from it.

        None before the first commit, of all buckets, after memory.restore(): read it before, which state_dict() does;
        and where results are only read, from the next begin() on.
        """
        known = len(self._known_of(memory)) == len(self.buckets)
        return self._coder.results[self._coder.turn] if known else None

    def _known_of(self, memory: ErrorMemory) -> frozenset[int]:
        """The buckets of which the last committed result is of this memory, untouched since."""
        if self._last_of is None or self._last_of[0] is not memory or self._last_of[1] != memory.version:
            return frozenset()
        return self._last_of[2]

    def commit(self) -> None:
        """Keep it: result is last() from now on, and what was launched may change. Local; ends the exchange."""
        self._require_finished()
        with whole_or_left(self._group, self.break_off):
            self._writing.add("commit()")
            self._coder.keep()
            if self._memory is not None and self._coder.keeps_results:
                known = self._known_of(self._memory).union(self.at)
                if self._coder.is_whole:
                    self._coder.turn = 1 - self._coder.turn
                else:
                    self._coder.merge()
                self._last_of = (self._memory, self._memory.version, known)
            self.draw += 1
            self._close()

    def abandon(self) -> None:
        """Undo what was launched; nothing happens where no exchange is open. Ends the exchange.

        Collective where buckets are not launched or not finished yet: the rest cross the wire marked as unusable, so
        that ranks that have launched more, or wait in finish(), go on (with NonFiniteInput) instead of waiting for
        ever. Raises: PeerLost, after undoing.
        """
        if not self.is_open:
            return
        with whole_or_left(self._group, self.break_off):
            if not self._finished:
                with self._pipeline.fed():
                    for k in self.at[len(self._given) :]:
                        self._send_nothing(k, 0)
                try:
                    Exchange.finish(self)
                except NonFiniteInput:
                    return
            self._undo(lost=False)

    def forget(self) -> None:
        """After an error inside a step: undo and close what is open. Leaves the group where peers may wait for it.

        Not collective: peers raise PeerLost. Takes a few seconds at most. Nothing happens where none is open.
        """
        with deferred(to_the_end=True):
            if self._given:
                leave(self._group)
            self.break_off()

    def release(self) -> None:
        """Let go of wire memory until the next begin(). Local."""
        if not self.is_open:
            self._lost = None
            self._coder.release()

    @contextmanager
    def redone(self) -> Iterator[bool]:
        """Inside, an exchange that was undone because a peer was lost counts: another rank has its whole result.

        What was exchanged must be as the failed call has left it. Error memory is what was left out of what was sent,
        to rounding where it was written in place. Local. Gives whether there was one of which this rank had done all
        its part; where not, nothing is done, and no rank can have the result.
        """
        if self._lost is None:
            yield False
            return
        with self._coder.redone(*self._lost) as counts:
            yield counts

    @property
    def needs_lost_input(self) -> bool:
        """Must what the last exchange was given stay as it is, because that lost a peer and may have to be redone?"""
        return self._lost is not None and self._lost[2] is GIVEN_AGAIN

    def _launch(self, k: int, given: Given) -> None:
        self._expect(k)
        x_N, numel, like = given.vector_N, self.buckets.layout.numel, self._coder.like
        if given.form is None:
            assert x_N is not None
            if x_N.shape != (numel,) or x_N.dtype != like.dtype or not x_N.is_contiguous():
                raise ValueError(
                    f"vector is {x_N.dtype}{list(x_N.shape)}: must be contiguous {like.dtype}[{numel}], as the layout"
                )
        with self.launching():
            began = time.perf_counter()
            formed_b = self._coder.form(k, given)
            self._writing.add("launch")
            self._coder.encode(k, given, formed_b)
            self.stats.encode_s += time.perf_counter() - began
            self._given.append(given)
            self._writing.discard("launch")
            self._send(k)

    def _send_nothing(self, k: int, flag: int) -> None:
        self._coder.refuse(k, flag)
        self._given.append(UNUSABLE)
        self._send(k)

    def _send(self, k: int) -> None:
        if self.has_failed:
            return  # a peer is lost: nobody will answer
        try:
            self._first[k] = self._coder.send(k)
        except CommError as error:
            self._error = error
            return
        self._pipeline.submit(self._serve, k)

    def _serve(self, k: int) -> None:
        """The second half of bucket k. In the pipeline's thread, where it has one."""
        coder, pipeline = self._coder, self._pipeline
        for pending in self._first[k]:
            pipeline.hold(pending)
        self._first[k] = ()
        fused = coder.fuse(k)
        i = k - coder.at.start
        if fused is not None:
            pipeline.admit(i, lambda: fused)
        self._writing.add("serving")
        coder.serve(k, self._given[i])
        self._num_served = i + 1
        self._writing.discard("serving")
        passed_on = coder.pass_on(k)
        if passed_on is not None:
            self._second[k] = (passed_on,)
        if i:
            self._receive(k - 1)

    def _receive(self, k: int) -> None:
        """The end of bucket k, which is there, or nearly, when the next one is served."""
        if self._coder.keeps_results:
            return  # results are read when all of them are there
        try:
            for pending in self._second[k]:
                self._pipeline.hold(pending)
            self._second[k] = ()
            self._coder.receive(k, self._given[k - self.at.start])
        except CommError as error:
            if not self._coder.serves_on:
                raise
            self._second[k] = ()
            self._not_received = self._not_received or error

    def _settle(self, *, receive: bool) -> None:
        """Run all stages, then wait until no collective touches a buffer; on a GPU the caller's stream waits for it.

        receive: the last bucket too. The first error stays in _error; later ones follow from it.
        """
        with self._pipeline.fed():
            raised = self._pipeline.drain()
            self._error = self._error or self._not_received or raised
            if receive and self._error is None:
                try:
                    self._receive(self.at[-1])
                except CommError as error:
                    self._error = error
                self._error = self._error or self._not_received
            for pendings in (self._first, self._second):
                for k, of_bucket in enumerate(pendings):
                    for pending in of_bucket:
                        try:
                            self._pipeline.hold(pending)
                        except CommError as error:
                            self._error = self._error or error
                    pendings[k] = ()
        self._pipeline.join()

    def _all_finite(self) -> bool:
        """Could every rank encode all that it gave? Waits for the device; a peer that is lost is noted in _error."""
        try:
            return float(self._pipeline.host(self._coder.finite())) == 1
        except CommError as error:
            self._error = error
            return False

    def _agreed(self, agree: Callable[[int], int], own_finite: bool) -> bool:
        """Is all finite in the exchanges of the others of the box too? A peer that is lost is noted in _error."""
        try:
            found = agree(int(own_finite) if self._error is None else LOST)
        except CommError as error:
            self._error = self._error or error
            return False
        if found == LOST and self._error is None:
            self._error = PeerLost("a rank of this box, which exchanges another part of the same tensors, lost a peer")
        return found == 1

    def _raise_lost(self) -> None:
        if (error := self._error) is not None:
            if isinstance(error, CommError):
                self._lose()
            raise error

    def _lose(self) -> None:
        """Undo, and remember what was undone, for another rank may have the whole result (redone)."""
        memory, given = self._memory, tuple(self._given)
        num_served = self._pipeline.admitted(self._num_served)
        if num_served is None:  # a GPU that does not come back from an abort
            if not self._coder.in_place:
                self._undo(lost=True)
                return
            if memory is not None:
                memory.torn = "what was collected may be garbage of collectives that were aborted"
            self._close()
            return
        if len(given) == num_served == len(self.at) and all(one.usable for one in given):
            remembered = self._coder.remember()
            self._lost = None if remembered is None else (memory, given, remembered)
        self._num_served = num_served
        self._undo(lost=True)

    def break_off(self) -> None:
        """Undo what this rank alone does not go on with, unless error memory is torn. Nothing where none is open."""
        if not self.is_open:
            return
        self._settle(receive=False)
        if self._writing and self._coder.in_place and self._memory is not None:
            self._memory.torn = f"an error came in {' and '.join(sorted(self._writing))} of an exchange"
            self._close()
        else:
            self._lose()

    def _undo(self, *, lost: bool) -> None:
        self._writing.add("undoing")
        self._coder.undo(self._given, self._num_served, lost=lost)
        self._close()

    def _close(self) -> None:
        self._memory, self._error, self._not_received = None, None, None
        self.is_open = self._finished = self._refuses = False
        self._num_served = 0
        self._given.clear()
        self._writing.clear()

    def _expect(self, k: int) -> None:
        self._open()
        if k != self.at.start + len(self._given):
            raise RuntimeError(
                f"bucket {k}: the next to launch is {self.at.start + len(self._given)} of {len(self.buckets)}"
            )

    def _open(self) -> None:
        if not self.is_open:
            raise RuntimeError("no exchange is open: begin(memory) first")

    def _require_finished(self) -> None:
        self._open()
        if not self._finished:
            raise RuntimeError("the exchange is not finished: finish() first")


class Mean(Exchange):
    """Means whose results take the place of what was launched: begin(), launch(0, x) ... launch(K-1, x), finish()."""

    def begin(
        self, memory: ErrorMemory | None = None, givers: Sequence[int] | None = None, *, at: range | None = None
    ) -> None:
        """Open a mean. memory: for what is left out, where anything is; None: it is dropped. at: all buckets. Local.

        givers: the only ranks that give something, in order, the same on every rank; what the others launch is only
        where their mean goes, of all ranks: sum of the givers / ranks. None: all. Raises: ValueError where it cannot
        be so.
        """
        if givers is not None and not self._coder.takes_givers:
            raise ValueError(
                f"givers = {list(givers)}: must be None but for a mean in full of several ranks, with topology flat, "
                "over a Group that is Uneven (comm/protocol.py)"
            )
        super().begin(memory, at=at)
        self._coder.givers = givers

    def launch(self, k: int, x_N: Tensor) -> None:
        """Start the mean of bucket k of x, in order. x: float[N], contiguous; bucket k belongs to it until finish().

        Raises: RuntimeError, ValueError for a wrong call. finish() reports a lost peer.
        """
        self.launch_sum(k, x_N)

    def finish(self) -> None:
        """Wait for all buckets; x is the mean then. Waits for the device once.

        Raises: PeerLost; NonFiniteInput, alike on every rank. Then x is undefined and the errors are as before. No mean
        is open after it.
        """
        with deferred():  # peers keep what this rank would leave open
            super().finish()
            self.commit()


def leave(group: Group, error: BaseException | None = None) -> None:
    """This rank goes no further in what it has begun: its peers raise PeerLost. error: why, or what is handled."""
    error = error or sys.exception()
    if group.size > 1 and isinstance(group, Leavable):
        group.leave("a step of it was cut short" if error is None else interrupted(error, calls_of(group)))


class whole_or_left:
    """Inside, signals wait until others are waited for; any error of this rank alone makes it leave, then undo.

    A CommError is everybody's, and the code that raises it has undone what there was.
    """

    def __init__(self, group: Group, undo: Callable[[], None]) -> None:
        self._group, self._undo, self._deferred = group, undo, deferred()

    def __enter__(self) -> None:
        self._deferred.__enter__()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is not None and not isinstance(error, CommError):
                with deferred(to_the_end=True):  # a second Ctrl-C waits for the end of this, a few seconds at most
                    leave(self._group, error)
                    self._undo()
        finally:
            self._deferred.__exit__(kind, error, trace)


def gather_flags(group: Group, own: Tensor) -> Tensor:
    """uint8[n]: every rank's 0-dim flag. Collective. Raises: PeerLost."""
    flags = torch.zeros((group.size, 1), dtype=torch.uint8, device=own.device)
    group.all_gather(flags, own.to(torch.uint8).view(1))
    return flags[:, 0]


def non_finite(flags: Tensor) -> NonFiniteInput:
    """The error that every rank raises. flags: [n], 0 for a rank whose own input was not finite, or REFUSED."""
    refused = tuple(rank for rank, flag in enumerate(flags.tolist()) if flag == REFUSED)
    if refused:
        return Refused(
            f"rank {', '.join(map(str, refused))} took no part in the exchange; nothing was changed", refused
        )
    ranks = tuple(rank for rank, finite in enumerate(flags.tolist()) if not finite)
    whose = f"of rank {', '.join(map(str, ranks))}" if ranks else "mean over ranks (each rank's own was finite)"
    return NonFiniteInput(
        f"the input {whose} holds NaN or infinity; nothing was changed. Look at the loss and the learning rate of the "
        "step before",
        ranks,
    )
