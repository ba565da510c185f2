"""Groups of some ranks of a group: those of one box, and one rank of each box. By node first goes through both.

    whole   0 1 2 3 4 5        BOX of rank 4: 3 4 5        PEERS of rank 4: 1 4
    boxes   |a....|b....|

A part lives and dies with the whole: after a PeerLost in one of them all are of no more use, and every rank that waits
in any of them raises it too. So a rank may wait in one part for a rank that waits in another.

That can be where there are several boxes with as many ranks each, at least two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, Protocol, runtime_checkable

import torch

from thinwire.comm.protocol import Group, Stats
from thinwire.comm.wire.link_classes import Boxes, exchange_boxes

Topology = Literal["flat", "node_first", "auto"]
"""Every rank exchanges with every other (flat); node_first; auto: node_first where that can be, else flat."""


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


@dataclass(frozen=True, slots=True, eq=False)
class Nodes:
    """The groups of one rank. whole: all n ranks. box: the L ranks of this box. peers: this rank's in each of B boxes.

    of_rank: of each rank of the whole its number in its box.
    """

    whole: Group
    box: Group
    peers: Group
    of_rank: tuple[int, ...]

    @property
    def number(self) -> int:
        """Of this rank in its box, 0 to L - 1."""
        return self.box.rank

    def holders(self, missing: Sequence[int] | tuple[int, ...]) -> int:
        """How many ranks of this number there are, in all boxes, without those that are missing."""
        return self.peers.size - sum(self.of_rank[rank] == self.number for rank in set(missing))


def ranks_by_box(boxes: Boxes) -> list[tuple[int, ...]]:
    """The ranks of each box, ascending, in the order of their first."""
    return [boxes.ranks_in(box_id) for box_id in boxes.ids]


def why_flat(group: Group, by_box: Sequence[Sequence[int]]) -> str | None:
    """Why these ranks cannot exchange by node first, in words; None where they can."""
    sizes = [len(ranks) for ranks in by_box]
    if len(sizes) == 1:
        return f"all {sizes[0]} ranks are in one box"
    if len(set(sizes)) > 1:
        return f"the {len(sizes)} boxes have {', '.join(map(str, sizes))} ranks: all must have as many"
    if sizes[0] == 1:
        return f"each of the {len(sizes)} boxes has one rank"
    if not isinstance(group, Parting):
        return f"{type(group).__name__} makes no groups of some of its ranks"
    return None


def nodes_of(group: Group, device: torch.device | str = "cpu") -> Nodes | str:
    """The groups of this rank, or why there are none. Collective. Raises: PeerLost."""
    by_box = ranks_by_box(exchange_boxes(group, device=device))
    reason = why_flat(group, by_box)
    if reason is not None:
        return reason
    assert isinstance(group, Parting)
    own = next(ranks for ranks in by_box if group.rank in ranks)
    number = {rank: at for ranks in by_box for at, rank in enumerate(ranks)}
    peers = [ranks[number[group.rank]] for ranks in by_box]
    box, between = group.part(Part.BOX, own), group.part(Part.PEERS, peers)
    return Nodes(group, box, between, tuple(number[rank] for rank in range(group.size)))
