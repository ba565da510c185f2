"""How many bytes has this worker sent inside of its box, and how many to other boxes? As the ledger says."""

from __future__ import annotations

from collections import Counter

from thinwire.comm.protocol import Call, Stats
from thinwire.comm.wire.link_classes import Boxes, LinkClass
from thinwire.contract.metric_names import LINKS
from thinwire.workers.telemetry.ledger import Ledger, sends_among

LABELS = dict(zip((LinkClass.INSIDE, LinkClass.BETWEEN), LINKS, strict=True))


class LinkBytes:
    """Of one worker, over all groups that it has been in. Payload, as Stats counts it."""

    def __init__(self) -> None:
        self._before: Counter[str] = Counter(dict.fromkeys(LINKS, 0))
        self._ledger: Ledger | None = None
        self._rank = 0
        self._of_call: dict[Call, Counter[str]] = {}

    def seated(self, stats: Stats, boxes: Boxes, rank: int) -> None:
        """From here on in this group, as this rank of it."""
        self._before = self._so_far()
        self._ledger, self._rank = Ledger(stats, boxes), rank
        self._of_call = {}

    def by_link(self) -> dict[str, int]:
        """Bytes since the worker began. Each size of a collective is worked out once; then it costs a sum."""
        return dict(self._so_far())

    def _so_far(self) -> Counter[str]:
        total = Counter(self._before)
        if self._ledger is None:
            return total
        for call, times in self._ledger.calls().items():
            if call not in self._of_call:
                self._of_call[call] = self._of(call, self._ledger.boxes)
            for link, num_bytes in self._of_call[call].items():
                total[link] += times * num_bytes
        return total

    def _of(self, call: Call, boxes: Boxes) -> Counter[str]:
        """What this rank sends in one such collective."""
        found: Counter[str] = Counter()
        for send in sends_among(call, boxes):
            if send.src == self._rank:
                found[LABELS[boxes.link(send.src, send.dst)]] += send.num_bytes
        return found
