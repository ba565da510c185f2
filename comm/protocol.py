"""The seams of communication: Group (transport), Codec (bytes), Reducer (all that an optimizer sees), Stats.

Shapes: N elements of a vector, n ranks, c elements of one chunk, B wire bytes of one row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

from torch import Tensor

from thinwire.comm.exchange.fidelity import Fidelity
from thinwire.comm.exchange.held import Held
from thinwire.comm.kernels.blocks import BlockTable, RowMemory
from thinwire.comm.layout import Buckets, VectorLayout

Call = tuple[str, int, int]
"""A collective as the ledger reads it: kind, bytes (sent by this rank; with a source: given by it), source or -1."""


@dataclass(slots=True)
class Stats:
    """What this rank has sent: payload bytes (no TCP, IP or transport headers) and collectives, by kind.

    waited_s: seconds in which the step had nothing left to do but to wait for its exchange.
    encode_s: seconds in which the step's own thread encoded; on a GPU, in which it told the device to.
    calls: how often each collective of each size; workers/telemetry/ledger.py works out from them who sent what.
    """

    sent_bytes: int = 0
    collectives: int = 0
    bytes_by_kind: Counter[str] = field(default_factory=Counter)
    calls: Counter[Call] = field(default_factory=Counter)
    waited_s: float = 0.0
    encode_s: float = 0.0

    def count(self, kind: str, num_bytes: int, src: int = -1, src_bytes: int = 0) -> None:
        """Add one collective that made this rank send `num_bytes` to its peers.

        src, src_bytes: where one rank alone gives, that rank and what it gives: the others cannot tell from num_bytes.
        """
        self.sent_bytes += num_bytes
        self.collectives += 1
        self.bytes_by_kind[kind] += num_bytes
        self.calls[kind, src_bytes if src >= 0 else num_bytes, src] += 1


class Pending(Protocol):
    """A collective that was started. Its tensors belong to it until `wait` returns."""

    def wait(self) -> None:
        """Block, without the interpreter's lock, until the result is there. comm.groups.watching.hold() does not block.

        Raises: PeerLost; then what was to be written is undefined.
        """


class Group(Protocol):
    """Ranks that call the same collectives in the same order. Every call raises PeerLost where a peer is gone.

    After a PeerLost the group is of no more use, on any rank.
    """

    @property
    def rank(self) -> int:
        """This rank, 0 to size - 1."""

    @property
    def size(self) -> int:
        """Ranks in the group."""

    @property
    def stats(self) -> Stats:
        """What this rank has sent through this group."""

    def all_to_all(self, out_nB: Tensor, in_nB: Tensor) -> None:
        """out[i] on rank j <- in[j] of rank i. uint8[n, B], contiguous."""

    def all_gather(self, out_nB: Tensor, in_B: Tensor) -> None:
        """out[i] <- in of rank i. uint8[n, B] and uint8[B], contiguous."""

    def mean_(self, x: Tensor) -> None:
        """x <- mean over ranks of x, bit-identical on all. Floating point, contiguous."""

    def broadcast_(self, x: Tensor, src: int = 0) -> None:
        """x <- x of rank `src`."""

    def start_all_to_all(self, out_nB: Tensor, in_nB: Tensor) -> Pending:
        """As all_to_all, without waiting for it. Bytes are counted here."""

    def start_all_gather(self, out_nB: Tensor, in_B: Tensor) -> Pending:
        """As all_gather, without waiting for it. Bytes are counted here."""

    def start_sum_(self, x: Tensor) -> Pending:
        """x <- sum over ranks of x, not divided, without waiting for it. Floating point, contiguous."""

    def second_communicator(self) -> Group:
        """A group of the same ranks and the same `stats` whose collectives overlap with this one's.

        Each of the two has one order of calls on all ranks, whatever the order between them. Collective at its first
        call; the same object ever after. A group that cannot overlap returns itself.
        """


@runtime_checkable
class Relaying(Protocol):
    """A Group that can also pass a vector along some of its ranks."""

    def relay_(self, x: Tensor, path: Sequence[int]) -> None:
        """x of all ranks on the path <- x of its first. All call it, with x of one length. Raises: PeerLost."""


@runtime_checkable
class Leavable(Protocol):
    """A Group that a rank can leave while its process lives."""

    def leave(self, reason: str = ...) -> None:
        """Say that this rank stops: peers that wait for it raise PeerLost, and so does it. The first reason stands."""


class RowCodec(Protocol):
    """Encodes one chunk of a vector as a row of bytes, and back. Pure: no communication, no memory."""

    @property
    def wire_bytes(self) -> int:
        """Bytes of the row that carry something."""

    def encode(self, x_c: Tensor, row_B: Tensor) -> Tensor:
        """Write x into the row. Returns a 0-dim bool: every value that was written is finite."""

    def decode(self, row_B: Tensor, out_c: Tensor) -> None:
        """out <- what the row says; dead elements are 0."""


class LeavingRow(RowCodec, Protocol):
    """A RowCodec that also says what it leaves out, in the pass that encodes: error feedback needs no other."""

    def encode_left(self, x_c: Tensor, error_c: Tensor, left_c: Tensor, row_B: Tensor) -> Tensor:
        """As encode of x + error. left: modified: x + error - what the row says. x and error are not."""

    def mean_left(self, rows_nB: Tensor, error_c: Tensor | None, left_c: Tensor, row_B: Tensor) -> Tensor:
        """As encode of the mean of rows, added up in their order, + error. rows: uint8[n, B], contiguous.

        left: modified: mean + error - what the row says; without an error the mean.
        """


class Codec(Protocol):
    """A way to write vectors in fewer bytes: makes the row codec of a chunk."""

    @property
    def name(self) -> str:
        """Its key in the registry."""

    def row(self, layout: VectorLayout, start: int, stop: int, like: Tensor) -> RowCodec:
        """The codec of [start, stop) of vectors with this layout, in the dtype and on the device of `like`."""

    def fingerprint(self) -> int:
        """32 bits that differ when two codecs would read bytes differently."""


@dataclass(frozen=True, slots=True, eq=False)
class Errors:
    """What a rank holds of an error memory, written in place: of each bucket the worker and the server error."""

    worker: Sequence[Tensor]
    server: Sequence[Tensor]


class ErrorMemory(Protocol):
    """The error memory of one exchanged vector, as all but the reducer that made it see it.

    version: changes whenever it is written from outside of an exchange. is_behind: replicas of server errors are kept,
    and are not those of the errors now; restore() of residual() makes them so. The same on every rank.
    workers: how many hold a worker error of an element: the ranks, or with topology node_first the boxes.
    """

    version: int

    @property
    def is_behind(self) -> bool:
        """As above."""

    @property
    def workers(self) -> int:
        """As above."""

    @property
    def worker_N(self) -> Tensor:
        """This rank's compression error, the whole vector. For reading."""

    @property
    def server_c(self) -> Tensor:
        """The error of re-encoding what this rank serves. For reading."""

    def squares(self) -> Tensor:
        """float[2]: the squared norms of the worker error and of the server error that are here. Local."""

    def errors(self) -> Errors:
        """The errors themselves, to be read and written: of means in few bits (exchange/narrow_mean.py). Local."""

    def swap_errors(self, errors: Errors) -> Errors:
        """Hold these tensors, of the shapes of errors(), in the place of those. Gives those back. Local."""

    def scale_(self, factor_N: Tensor) -> None:
        """R <- factor R, an element each, as where the unit of what is exchanged changes. Local. factor: float[N]."""

    def residual(self, out_N: Tensor | None = None) -> Tensor:
        """R, float[N], bit-identical on every rank. Collective; modifies nothing but out. Raises: PeerLost.

        out: float[N], written and returned; undefined where a peer is lost. None: new.
        """

    def share(self, holders: int, missing: Collection[int] = (), out_N: Tensor | None = None) -> Tensor:
        """worker error / holders + server error, float[N]: what this rank holds of R. Local; modifies nothing but out.

        Summed over all ranks, holders being their number, it is R. Where a rank is gone, the sum over the others,
        holders being theirs, imputes its worker error (their mean), and has its server error only where another keeps
        it too. missing: the ranks that are gone. out: float[N], written and returned; None: new.
        """

    def kept_of(self, rank: int) -> bool:
        """Is the server error of this rank kept here, as this one's own is?"""

    def restore(self, residual_N: Tensor) -> None:
        """Hold R. Local; R is not modified. Raises: ValueError where it is of another length."""

    def held(self) -> Held:
        """All that this rank holds, as it is. Local; modifies nothing; new tensors."""

    def hold(self, held: Held) -> bool:
        """Hold what held() of this rank of as many ranks gave. Local. Returns whether errors are where they were.

        Then the next exchange is bit-equal to the one that would have followed held(). Else, as after another cut into
        buckets, what this rank holds of R is in its worker error, and R is as it was to rounding.
        Raises: ValueError where it is of another length.
        """


class Reader(Protocol):
    """One pass over a result, in whichever form a reducer holds it. at: the elements of the vector."""

    def rows(self, at: slice, rows: RowMemory, table: BlockTable) -> None:
        """Read them as rows of signs. table: their blocks, counted from at.start, and where in `rows` each stands."""

    def values(self, at: slice, values: Tensor) -> None:
        """Read them as floats, float[stop - start]. Not to be modified."""


class Result(Protocol):
    """What an exchange gave, bit-equal on every rank. It stays until the next but one begins."""

    def decode_(self, out_N: Tensor, start: int = 0, stop: int | None = None) -> None:
        """out <- elements [start, stop) of the result, 0 where dead.

        out may be what was launched; abandon() cannot undo after that: commit.
        """

    def read(self, reader: Reader, start: int = 0, stop: int | None = None) -> None:
        """Hand elements [start, stop) to the reader. Bounds are multiples of 8 and may lie anywhere."""


FullWire = Literal["fp32", "bf16", "int8"]
"""How the mean of a gradient crosses the wire: in the type of the vector (fp32), in 16 bits, or in 8 with feedback."""


class FullMeans(Protocol):
    """A mean bucket by bucket: begin(), launch(0) ... launch(K-1), finish()."""

    @property
    def has_lost(self) -> bool:
        """Was the last mean undone because a peer was lost, so that redone() may count it?"""

    def begin(self, memory: ErrorMemory | None = None) -> None:
        """Open a mean. memory: for what is left out, where anything is; None: it is dropped. Local."""

    def redone(self) -> AbstractContextManager[bool]:
        """As Reducer.redone."""

    def release(self) -> None:
        """Let go of wire memory until the next begin()."""

    def launch(self, k: int, x_N: Tensor) -> None:
        """Start the mean of bucket k of x, in place, in order."""

    def finish(self) -> None:
        """Wait for all. Raises PeerLost, NonFiniteInput; x is undefined then."""

    def abandon(self) -> None:
        """End a mean that nobody will use; x is undefined. Collective. Raises PeerLost."""

    def forget(self) -> None:
        """As Reducer.forget."""

    def launch_refused(self, k: int) -> None:
        """In place of launch: this rank takes no part. Every rank raises Refused in finish()."""


class Reducer(Protocol):
    """All that an optimizer sees of communication. Bound to one layout; every rank calls alike.

    begin(memory)    launch_*(0) ... launch_*(K-1)    finish()    read the result    commit()
                                                      raises: everything is undone, nothing is open
    abandon()        at any point: everything is undone

    draw: which numbers the next exchange rounds by, where error memory is kept in few bits. Whoever saves and loads
    sets it, the same on every rank; else it counts up with each exchange.
    """

    draw: int

    @property
    def size(self) -> int:
        """Ranks that take part."""

    @property
    def stats(self) -> Stats:
        """What this rank has sent through the group below."""

    @property
    def topology(self) -> str:
        """By which way vectors go: flat, or node_first and how many boxes of how many ranks."""

    @property
    def buckets(self) -> Buckets:
        """The cut, in the order of launch; one bucket where vectors are exchanged as a whole."""

    @property
    def full(self) -> FullMeans:
        """The mean of a gradient by the same buckets, as the reducer was told to send it."""

    def release_means(self) -> None:
        """Let go of the wire memory of means, until the next one. Local."""

    def new_memory(self) -> ErrorMemory:
        """Error memory for one exchanged vector, empty."""

    def begin(self, memory: ErrorMemory) -> None:
        """Open an exchange that keeps in `memory` what it leaves out. Local. Raises: RuntimeError where one is open."""

    def launch_sum(self, k: int, x_N: Tensor) -> None:
        """Encode bucket k of x and send it, in order; x must not change before commit()."""

    def launch_lerp(
        self,
        k: int,
        x_N: Tensor,
        weight: float,
        runs: Sequence[Tensor | None] = (),
        start_N: Tensor | None = None,
        factor_r: Tensor | None = None,
    ) -> None:
        """As launch_sum of r + weight (x - r), r being start, or last(memory). Both must not change before commit().

        runs: for each live run of the layout float[run], contiguous, to be read in place of that part of x, or None;
        what is not in buckets.layout.alone() is read of x all the same. factor: float[live runs], f: what is sent is
        f (r + weight (x - r)), and last(memory) is f r, in each run with its f; it must not change either.
        Raises: RuntimeError where there is no r.
        """

    def launch_formed(self, k: int, form: Callable[[slice], Tensor]) -> None:
        """As launch_sum of a vector that nobody keeps: form(at) makes its elements `at`, new, whenever it is asked.

        Asked now, and again where the exchange is undone or redone: what they are made of must not change before
        commit().
        """

    def launch_refused(self, k: int) -> None:
        """In place of launch_*: this rank takes no part. Every rank raises Refused in finish(); nothing changes."""

    def finish(self) -> None:
        """Wait for all buckets. Raises PeerLost, NonFiniteInput, alike on every rank; then all is undone."""

    @property
    def result(self) -> Result:
        """Of the exchange that was finished. Raises: RuntimeError where none is."""

    def commit(self) -> None:
        """Keep it; what was launched may change. Local; ends the exchange."""

    def abandon(self) -> None:
        """Undo what was launched, where anything was. Collective. Raises PeerLost."""

    def forget(self) -> None:
        """After an error inside a step: undo and close what is open. Where peers may wait for it, leave the group.

        Not collective: peers raise PeerLost. Takes a few seconds at most.
        """

    def last(self, memory: ErrorMemory) -> Result | None:
        """The last committed result, where it is of this memory and nobody has restored that since."""

    def means(self, wire: FullWire) -> FullMeans:
        """Means that are sent so, whatever `full` is."""

    def full_(self, x_N: Tensor, wire: FullWire = "fp32") -> None:
        """x <- mean_i x_i; what another wire than fp32 leaves out is dropped.

        Raises PeerLost, NonFiniteInput; x is undefined then.
        """

    def compressed_(self, x_N: Tensor, memory: ErrorMemory) -> None:
        """x <- mean_i x_i through the codec, `memory` keeping what was left out:  out + R' = mean_i x_i + R.

        Raises PeerLost, NonFiniteInput; then x is as it was and R as before the call, to rounding (4 ulp of the largest
        kept sum). Source: Tang et al. 2021, Alg. 1, l. 7-11.
        """

    def redone(self) -> AbstractContextManager[bool]:
        """Inside, an exchange that lost a peer counts in its memory all the same, for another rank has its result.

        What was exchanged must be as the failed call has left it. Local. Gives whether there was such an exchange and
        this rank had done all its part; where not, nothing is done, and no rank can have the result.
        """

    @property
    def needs_lost_input(self) -> bool:
        """Must what the last exchange was given stay as it is, because that lost a peer and may have to be redone?"""

    def rebuilds(self, memory: ErrorMemory) -> bool:
        """Can this rank help to estimate what a rank that is gone held? Where all that are left can, they do."""

    def share(
        self,
        memory: ErrorMemory,
        holders: int,
        missing: Collection[int] = (),
        *,
        rebuilt_by: int | None = None,
        out_N: Tensor | None = None,
    ) -> Tensor:
        """As memory.share; where rebuilt_by is given, with this rank's part of what is estimated of the missing.

        rebuilt_by: the rank, in this group, that adds what all of them know: one that has the last exchange committed.
        Local; modifies nothing but out.
        """

    def left_squares(self, memory: ErrorMemory) -> Tensor:
        """float[2]: squared norms that would be lost of this rank's server and worker error if it died, about.

        Zeros where that is not known: no rebuilds(memory), or inside redone(). Local.
        """

    def fidelity(self, memory: ErrorMemory) -> Fidelity | None:
        """How well the last exchange carried what it was given; None where it was not one of `memory`. Collective."""

    def broadcast_(self, x: Tensor, src: int = 0) -> None:
        """x <- x of rank `src`."""
