"""The seams of communication: Group (transport), Codec (bytes), Reducer (all that an optimizer sees), Stats.

Shapes: N elements of a vector, n ranks, c elements of one chunk, B wire bytes of one row.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from thinwire.comm.layout import VectorLayout

if TYPE_CHECKING:
    from thinwire.comm.error_feedback import ErrorFeedback
    from thinwire.comm.fidelity import Fidelity


@dataclass(slots=True)
class Stats:
    """What this rank has sent: payload bytes (no TCP, IP or transport headers) and collectives, by kind."""

    sent_bytes: int = 0
    collectives: int = 0
    bytes_by_kind: Counter[str] = field(default_factory=Counter)

    def count(self, kind: str, num_bytes: int) -> None:
        """Add one collective that made this rank send `num_bytes` to its peers."""
        self.sent_bytes += num_bytes
        self.collectives += 1
        self.bytes_by_kind[kind] += num_bytes


class Group(Protocol):
    """Ranks that call the same collectives in the same order. Every call raises PeerLost where a peer is gone."""

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
        """X <- mean over ranks of x, bit-identical on all. Floating point, contiguous."""

    def broadcast_(self, x: Tensor, src: int = 0) -> None:
        """X <- x of rank `src`."""


class RowCodec(Protocol):
    """Encodes one chunk of a vector as a row of bytes, and back. Pure: no communication, no memory."""

    @property
    def wire_bytes(self) -> int:
        """Bytes of the row that carry something."""

    def encode(self, x_c: Tensor, row_B: Tensor) -> Tensor:
        """Write x into the row. Returns a 0-dim bool: every value that was written is finite."""

    def decode(self, row_B: Tensor, out_c: Tensor) -> None:
        """out <- what the row says; dead elements are 0."""


class Codec(Protocol):
    """A way to write vectors in fewer bytes: makes the row codec of a chunk."""

    @property
    def name(self) -> str:
        """Its key in the registry."""

    def row(self, layout: VectorLayout, start: int, stop: int, like: Tensor) -> RowCodec:
        """The codec of [start, stop) of vectors with this layout, in the dtype and on the device of `like`."""

    def fingerprint(self) -> int:
        """32 bits that differ when two codecs would read bytes differently."""


class Reducer(Protocol):
    """All that an optimizer sees of communication. Bound to one layout; every rank calls alike."""

    @property
    def size(self) -> int:
        """Ranks that take part."""

    @property
    def stats(self) -> Stats:
        """What this rank has sent through the group below."""

    def full_(self, x_N: Tensor) -> None:
        """X <- mean_i x_i, uncompressed. Raises PeerLost, NonFiniteInput; x is undefined then."""

    def compressed_(self, x_N: Tensor, slot: ErrorFeedback) -> None:
        """X <- mean_i x_i through the codec, `slot` keeping what was left out.

        Raises PeerLost, NonFiniteInput; then x is undefined and the slot is as before the call.
        """

    def fidelity(self, slot: ErrorFeedback) -> Fidelity | None:
        """How well the last exchange carried what it was given; None where it was not one of `slot`. Collective."""

    def new_slot(self) -> ErrorFeedback:
        """Error memory for one exchanged vector, empty."""

    def broadcast_(self, x: Tensor, src: int = 0) -> None:
        """X <- x of rank `src`."""
