"""The seams of communication: Group (transport), Codec (bytes), Result (what an exchange gave), Stats.

Shapes: N elements of a vector, n ranks, c elements of one chunk, B wire bytes of one row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from thinwire.comm.kernels.blocks import BlockTable, RowMemory
from thinwire.comm.layout import VectorLayout
from thinwire.comm.wire.network import FullWire as FullWire

Call = tuple[str, int, int]
"""A collective as the ledger reads it: kind, bytes (sent by this rank; with a source: given by it), source or -1."""


@dataclass(slots=True)
class Stats:
    """What this rank has sent: payload bytes (no TCP, IP or transport headers) and collectives, by kind.

    waited_s: seconds in which the step had nothing left to do but to wait for its exchange.
    encode_s: seconds in which the step's own thread encoded; on a GPU, in which it launched that on the device.
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
        self.count_sent(kind, num_bytes)
        self.collectives += 1
        self.calls[kind, src_bytes if src >= 0 else num_bytes, src] += 1

    def count_sent(self, kind: str, num_bytes: int) -> None:
        """Add what the ledger does not know of."""
        self.sent_bytes += num_bytes
        self.bytes_by_kind[kind] += num_bytes


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
class Uneven(Protocol):
    """A Group that can also exchange rows of different lengths. MPI's Alltoallv."""

    def start_all_to_all_v(
        self, out_B: Tensor, in_B: Tensor, of: Sequence[int], to: Sequence[int], num_bytes: int
    ) -> Pending:
        """Row i of out on rank j <- row j of in of rank i. uint8, contiguous: n rows, one after another.

        of, to: the bytes of each row of out, and of in. num_bytes: of all ranks together, by which ranks that are in
        different calls find that out. Not in the ledger. Raises: PeerLost.
        """


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


@runtime_checkable
class LeavingRow(RowCodec, Protocol):
    """A RowCodec that also says what it leaves out, in the pass that encodes: error feedback needs no other."""

    def encode_left(self, x_c: Tensor, error_c: Tensor, left_c: Tensor, row_B: Tensor) -> Tensor:
        """As encode of x + error. left: modified: x + error - what the row says. x and error are not."""

    def mean_left(self, rows_nB: Tensor, error_c: Tensor | None, left_c: Tensor, row_B: Tensor) -> Tensor:
        """As encode of the mean of rows, added up in their order, + error. rows: uint8[n, B], contiguous.

        left: modified: mean + error - what the row says; without an error the mean.
        """


class Named(Protocol):
    """What two ranks must have alike."""

    @property
    def name(self) -> str:
        """Its key in the registry."""

    def fingerprint(self) -> int:
        """32 bits that differ when two codecs would read bytes differently."""


class Codec(Named, Protocol):
    """A way to write vectors in fewer bytes: makes the row codec of a chunk."""

    def row(self, layout: VectorLayout, start: int, stop: int, like: Tensor) -> RowCodec:
        """The codec of [start, stop) of vectors with this layout, in the dtype and on the device of `like`."""


class Known(Protocol):
    """What all ranks know of one exchange after its first sum."""

    def decide(self, second: Tensor) -> None:
        """The mean of what crossed second is there. What is chosen by it is chosen now; nothing, until then."""

    def decode(self, second: Tensor, out_N: Tensor) -> None:
        """out <- what these second values say: linear in them."""


class Sums(Protocol):
    """A linear code of vectors of one layout, on one rank. Pure but for kept()."""

    @property
    def numel(self) -> int:
        """Values that a rank gives to both sums, a + b."""

    def first(self, z_N: Tensor) -> Tensor:
        """What crosses first, new: float[a]."""

    def second(self, first: Tensor, z_N: Tensor) -> tuple[Known, Tensor]:
        """What all know by the mean of that, and what crosses second, new: float[b]."""

    def kept(self, known: Any) -> None:
        """An exchange counts: the next one may begin from what was known in it."""


@runtime_checkable
class LinearCodec(Named, Protocol):
    """A way to write vectors so that a sum of what is written is written of the sum."""

    def over(self, layout: VectorLayout, like: Tensor) -> Sums:
        """The code of vectors of this layout. Raises: ValueError where it would send no less than they are."""


class Reader(Protocol):
    """One pass over a result. at: the elements of the vector."""

    def values(self, at: slice, values: Tensor) -> None:
        """Read them as floats, float[stop - start]. Not to be modified."""


@runtime_checkable
class RowReader(Reader, Protocol):
    """One that has loops of its own over rows of signs, for a reducer that holds them."""

    def rows(self, at: slice, rows: RowMemory, table: BlockTable) -> None:
        """Read them as rows of signs. table: their blocks, counted from at.start, and where in `rows` each stands."""


class Result(Protocol):
    """What an exchange gave, bit-equal on every rank. It stays until the next but one begins.

    Of one rank until a Reader has made the next one in its place (comm.exchange.alone).
    """

    def decode_(self, out_N: Tensor, start: int = 0, stop: int | None = None) -> None:
        """out <- elements [start, stop) of the result, 0 where dead.

        out may be what was launched; abandon() cannot undo after that: commit.
        """

    def read(self, reader: Reader, start: int = 0, stop: int | None = None) -> None:
        """Hand elements [start, stop) to the reader. Bounds are multiples of 8 and may lie anywhere."""
