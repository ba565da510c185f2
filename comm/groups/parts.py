"""Groups of some ranks of a group: those of one box, and one rank of each box. Who makes them, and what counts them.

    whole   0 1 2 3 4 5        BOX of rank 4: 3 4 5        PEERS of rank 4: 1 4
    boxes   |a....|b....|

A part lives and dies with the whole: after a PeerLost in one of them all are of no more use, and whoever waits in any
of them raises it too. So a rank may wait in one part for a rank that waits in another.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol, runtime_checkable

from thinwire.comm.protocol import Group, Stats


class Part(StrEnum):
    """What the ranks of a part have in common; the value stands before the kind of its collectives in Stats."""

    BOX = "box"
    """All ranks of one box."""
    PEERS = "peers"
    """Of each box the rank of the same number in it."""

    @property
    def communicator(self) -> int:
        """Its first communicator, as comm.calls numbers them; its second is the one after. The whole has 0 and 1."""
        return 2 if self is Part.BOX else 4

    def kind(self, collective: str) -> str:
        """What a collective of such a part is called in Stats."""
        return f"{self.value} {collective}"


@runtime_checkable
class Parting(Protocol):
    """A Group whose ranks can have groups of their own."""

    def part(self, part: Part, ranks: Sequence[int]) -> Group:
        """A group of these ranks, this one among them, in this order, which it keeps: the same at every call.

        Collective at its first call: every rank of the whole calls it for this part, each with the ranks of its own,
        all with as many. Its collectives are counted here too, by part.kind(). Raises: PeerLost.
        """


class PartStats(Stats):
    """What was sent through a part: counted there, and in the whole."""

    __slots__ = ("_part", "_whole")

    def __init__(self, whole: Stats, part: Part) -> None:
        super().__init__()
        self._whole, self._part = whole, part

    def count(self, kind: str, num_bytes: int, src: int = -1, src_bytes: int = 0) -> None:
        """As Stats.count, in both."""
        super().count(kind, num_bytes, src, src_bytes)
        self._whole.count(self._part.kind(kind), num_bytes, src, src_bytes)
