"""Does the network carry what this job sends, and nothing else? The ledger's prediction beside the kernel's counters.

Asked for by naming the interface in the environment of the worker; nothing is measured else. One worker of each box
measures, the one of the lowest rank: the interface counts what all workers of the box send together.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass

from thinwire.comm.protocol import Stats
from thinwire.comm.wire.link_classes import Boxes
from thinwire.workers.telemetry.interface_counters import InterfaceCounters, read_interface, read_mtu
from thinwire.workers.telemetry.ledger import HeaderModel, Ledger, unexplained_ratio

logger = logging.getLogger(__name__)

WIRE_INTERFACE_VARIABLE = "THINWIRE_WIRE_INTERFACE"


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
