"""Which ranks share a box, and can the exchange go by boxes? By node first: inside each, then between them.

It can where there are several boxes with as many ranks each, at least two. Then rank l of every box has peers: the
ranks of that number in the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from thinwire.comm.groups.parts import Part, Parting
from thinwire.comm.protocol import Group
from thinwire.comm.wire.link_classes import Boxes, exchange_boxes

Topology = Literal["flat", "node_first", "auto"]
"""Every rank exchanges with every other (flat); node_first; auto: node_first where that can be, else flat."""


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
