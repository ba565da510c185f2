"""Who sent how many bytes to whom, over which class of link, and how many bytes of frames is that?

Groups count each collective they start by kind and size (`Stats.calls`), which costs a microsecond. All the rest is
worked out when somebody asks: every rank calls the same collectives with the same sizes, so one rank's calls tell what
every rank sent (routes.py), which of it left a box (link_classes.py) and in how many bytes of frames (headers.py).

    unexplained ratio = |counted - predicted| / counted

of the bytes that left a box: `counted` by the kernel, `predicted` here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from thinwire.comm.protocol import Call, Stats
from thinwire.comm.wire.headers import Frames, HeaderModel
from thinwire.comm.wire.link_classes import Boxes, LinkClass
from thinwire.comm.wire.routes import sends

Calls = Mapping[Call, int]


@dataclass(frozen=True, slots=True)
class Entry:
    """What was sent in one kind of collective over one class of link. collectives: those that sent something there."""

    kind: str
    link: LinkClass
    collectives: int
    num_bytes: int
    messages: int


class Ledger:
    """The account of one group, seen from one rank; of all that its `Stats` count, second communicator included.

    It holds no numbers of its own but what was there when it was opened: that is not part of it.
    """

    def __init__(self, stats: Stats, boxes: Boxes, headers: HeaderModel | None = None) -> None:
        self.boxes = boxes
        self.headers = HeaderModel() if headers is None else headers
        self._stats = stats
        self._before = Counter(stats.calls)
        self._frames: dict[tuple[str, Call], Frames] = {}

    def calls(self) -> Calls:
        """Collectives since the ledger was opened."""
        return self._stats.calls - self._before

    def entries(self, ranks: Iterable[int] | None = None) -> list[Entry]:
        """What these ranks (None: all) have sent since the ledger was opened, by kind and class of link."""
        return entries(self.calls(), self.boxes, ranks)

    def predicted(self, box_id: str) -> Frames:
        """Frames that have left a box for others since the ledger was opened."""
        total = Frames()
        for call, times in self.calls().items():
            key = (box_id, call)
            if key not in self._frames:
                self._frames[key] = leaving(call, self.boxes, box_id, self.headers)
            total += self._frames[key] * times
        return total


def entries(calls: Calls, boxes: Boxes, ranks: Iterable[int] | None = None) -> list[Entry]:
    """What `ranks` (None: all) sent in these collectives, by kind and class of link, sorted."""
    wanted = set(range(boxes.size) if ranks is None else ranks)
    collectives: Counter[tuple[str, LinkClass]] = Counter()
    num_bytes: Counter[tuple[str, LinkClass]] = Counter()
    messages: Counter[tuple[str, LinkClass]] = Counter()
    for call, times in calls.items():
        crossed = set()
        for send in sends(call, boxes.size):
            if send.src not in wanted:
                continue
            key = call[0], boxes.link(send.src, send.dst)
            crossed.add(key)
            num_bytes[key] += times * send.num_bytes
            messages[key] += times * send.messages
        for key in crossed:
            collectives[key] += times
    return [Entry(*key, collectives[key], num_bytes[key], messages[key]) for key in sorted(collectives)]


def leaving(call: Call, boxes: Boxes, box_id: str, headers: HeaderModel) -> Frames:
    """Frames that leave a box in one collective: its ranks' messages, and its answers to those of other boxes."""
    one = next(sends(call, boxes.size), None)
    if one is None:
        return Frames()
    kind, _, root = call
    out, back = _crossings(kind, root, boxes, box_id)
    return headers.forward(one.num_bytes, one.messages) * out + headers.backward(one.num_bytes, one.messages) * back


@lru_cache(maxsize=1024)
def _crossings(kind: str, root: int, boxes: Boxes, box_id: str) -> tuple[int, int]:
    """How many sends of a collective leave a box and how many enter it. In each kind, all sends are of one size."""
    out = back = 0
    for send in sends((kind, boxes.size * boxes.size, root), boxes.size):
        src, dst = boxes.of_rank[send.src].id, boxes.of_rank[send.dst].id
        out += src == box_id != dst
        back += dst == box_id != src
    return out, back


def unexplained_ratio(counted_bytes: float, predicted_bytes: float) -> float | None:
    """|counted - predicted| / counted; None where nothing was counted."""
    return abs(counted_bytes - predicted_bytes) / counted_bytes if counted_bytes else None
