"""What a worker puts on the network: the payload of each class of link, and frames as the kernel counts them.

LinkBytes   bytes inside of the box and between boxes, as the ledger says; of every worker
WireMeter   the ledger's prediction beside the kernel's counters: does the network carry what this job sends, and
            nothing else? Asked for by naming the interface in the environment of the worker; nothing is measured
            else. One worker of each box measures, the one of the lowest rank: the interface counts what all
            workers of the box send together
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from thinwire.comm.protocol import Call, Stats
from thinwire.comm.wire.link_classes import Boxes, LinkClass
from thinwire.contract.metric_names import LINKS
from thinwire.workers.telemetry.ledger import HeaderModel, Ledger, sends_among, unexplained_ratio

logger = logging.getLogger(__name__)

WIRE_INTERFACE_VARIABLE = "THINWIRE_WIRE_INTERFACE"
LOOPBACK = "lo"
_PROC = Path("/proc/self/net/dev")  # of the process's own network namespace, whatever /sys shows


@dataclass(frozen=True, slots=True)
class InterfaceCounters:
    """Of one interface since it was made."""

    interface: str
    sent_frames: int
    sent_bytes: int
    received_frames: int
    received_bytes: int


def read_interfaces(text: str | None = None) -> dict[str, InterfaceCounters]:
    """Every interface by name but loopback. text: what /proc/net/dev says, None to read it. Raises: OSError."""
    found = {}
    for line in (_PROC.read_text() if text is None else text).splitlines()[2:]:
        name, _, numbers = line.partition(":")
        if name.strip() == LOOPBACK:
            continue
        column = [int(number) for number in numbers.split()]
        found[name.strip()] = InterfaceCounters(name.strip(), column[9], column[8], column[1], column[0])
    return found


def read_interface(name: str) -> InterfaceCounters:
    """One interface. Raises: ValueError where there is none of that name or it is loopback; OSError."""
    found = read_interfaces()
    if name not in found:
        why = "is loopback, where no frame goes" if name == LOOPBACK else "is not an interface of this machine"
        raise ValueError(f"interface {name!r} {why}; there are: {', '.join(sorted(found)) or 'none'}")
    return found[name]


def read_mtu(name: str) -> int | None:
    """The interface's MTU; None where /sys does not say, or shows another namespace's interfaces."""
    path = Path(f"/sys/class/net/{name}/mtu")
    return int(path.read_text()) if path.exists() else None


@dataclass(frozen=True, slots=True)
class WireAccount:
    """Bytes of frames that have left the box since the meter was made, counted by the kernel and predicted."""

    counted_bytes: int
    predicted_bytes: float

    @property
    def unexplained(self) -> float | None:
        """|counted - predicted| / counted; None where nothing was counted."""
        return unexplained_ratio(self.counted_bytes, self.predicted_bytes)


class WireMeter:
    """Compares one interface with the ledger of one group. Trouble with its counters is logged and ends it."""

    def __init__(
        self, ledger: Ledger, box_id: str, interface: str, read: Callable[[str], InterfaceCounters] = read_interface
    ) -> None:
        """Raises: ValueError where there is no such interface; OSError."""
        self._ledger, self._box_id, self._interface, self._read = ledger, box_id, interface, read
        self._before = self._last = read(interface).sent_bytes
        self._ended = False

    def account(self) -> WireAccount | None:
        """What there is so far; None once the counters cannot be read or have fallen."""
        if self._ended:
            return None
        try:
            now = self._read(self._interface).sent_bytes
        except (OSError, ValueError) as error:
            self._end(str(error))
            return None
        if now < self._last:
            self._end(f"its counter fell from {self._last} to {now}; was the interface made again?")
            return None
        self._last = now
        return WireAccount(now - self._before, self._ledger.predicted(self._box_id).num_bytes)

    def _end(self, reason: str) -> None:
        self._ended = True
        logger.error("wire_meter_ended interface=%s reason=%r", self._interface, reason)


def wire_meter(stats: Stats, boxes: Boxes, rank: int) -> WireMeter | None:
    """The meter that the environment asks this rank for, if any. An interface that is not there is logged."""
    interface = os.environ.get(WIRE_INTERFACE_VARIABLE, "")
    box_id = boxes.of_rank[rank].id
    if not interface or boxes.ranks_in(box_id)[0] != rank:
        return None
    mtu = read_mtu(interface)
    headers = HeaderModel() if mtu is None else HeaderModel(mtu=mtu)
    try:
        return WireMeter(Ledger(stats, boxes, headers), box_id, interface)
    except (OSError, ValueError) as error:
        logger.error("wire_meter_refused %s=%s reason=%r", WIRE_INTERFACE_VARIABLE, interface, str(error))
        return None


LABELS = dict(zip((LinkClass.INSIDE, LinkClass.BETWEEN), LINKS, strict=True))


class LinkBytes:
    """What one worker has sent by link, over all groups that it has been in. Payload, as Stats counts it."""

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
