"""From where do the counters of an evidence file come? From the lab, or from the interfaces of the ranks' machines."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from thinwire.comm.protocol import Group
from thinwire.comm.wire.evidence import BoxCounters
from thinwire.comm.wire.interface_counters import InterfaceCounters
from thinwire.comm.wire.link_classes import Boxes
from thinwire.lab.counters import HostCounters

_NAME_BYTES = 16
"""Linux: an interface's name has at most 15 bytes."""


def lab_counters(boxes: Boxes, before: Sequence[HostCounters], after: Sequence[HostCounters]) -> list[BoxCounters]:
    """Of the hosts of a lab, whose ranks fill one host after the other; as in `RunResult`.

    Raises: ValueError where there are not as many boxes as hosts.
    """
    if not len(boxes.ids) == len(before) == len(after):
        raise ValueError(f"{len(before)} and {len(after)} hosts were counted, the ranks are in {len(boxes.ids)} boxes")
    return [
        BoxCounters(box, "tbf", "eth0", one.sent_bytes, two.sent_bytes, one.sent_frames, two.sent_frames)
        for box, one, two in zip(boxes.ids, before, after, strict=True)
    ]


def gather_counters(
    group: Group, boxes: Boxes, before: InterfaceCounters, after: InterfaceCounters, device: torch.device | str = "cpu"
) -> list[BoxCounters]:
    """Of the interface that the first rank of each box has read, known to every rank. Collective. Raises: PeerLost."""
    numbers = (before.sent_bytes, after.sent_bytes, before.sent_frames, after.sent_frames)
    row = b"".join(number.to_bytes(8, "little") for number in numbers)
    row += before.interface.encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")
    row_B = torch.frombuffer(bytearray(row), dtype=torch.uint8).to(device)
    all_nB = torch.empty((group.size, row_B.numel()), dtype=torch.uint8, device=device)
    group.all_gather(all_nB, row_B)
    found = []
    for box in boxes.ids:
        told = bytes(all_nB[boxes.ranks_in(box)[0]].tolist())
        counts = [int.from_bytes(told[at : at + 8], "little") for at in range(0, 32, 8)]
        found.append(BoxCounters(box, "interface", told[32:].rstrip(b"\0").decode(), *counts))
    return found
