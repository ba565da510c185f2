"""Frames and bytes that each host has sent and received.

The counts are those of the token buckets (`tc -s -j qdisc`): bytes and frames that left the queue, with the Ethernet
header of 14 bytes, without preamble, checksum and gap. A veth interface's own counters count a large packet that is cut
into frames later (GSO) as one, without the headers of the others: up to 4.5 % too low.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any

from thinwire.tools.lab.spec import LabError


@dataclass(frozen=True)
class HostCounters:
    """Of one host since the lab began, or between two moments (after - before).

    sent_*: its own interface, after shaping. received_*: the switch's port towards it, after shaping. *_drops: frames
    that the queue in front of that link had no room for; they are in none of the other counts.
    """

    host: int
    sent_frames: int
    sent_bytes: int
    sent_drops: int
    received_frames: int
    received_bytes: int
    received_drops: int

    def __sub__(self, before: HostCounters) -> HostCounters:
        """What came on top since `before`. Raises: ValueError where that is another host."""
        if before.host != self.host:
            raise ValueError(f"counters of host {self.host} and host {before.host}: only one host's can be compared")
        names = [field.name for field in fields(self) if field.name != "host"]
        return HostCounters(self.host, *(getattr(self, name) - getattr(before, name) for name in names))


def difference(after: tuple[HostCounters, ...], before: tuple[HostCounters, ...]) -> tuple[HostCounters, ...]:
    """after - before, host by host."""
    return tuple(a - b for a, b in zip(after, before, strict=True))


def host_counters(host: int, sent: dict[str, Any], received: dict[str, Any]) -> HostCounters:
    """Counters of one host from the two token buckets of its link, as tc describes them."""
    return HostCounters(
        host=host,
        sent_frames=sent["packets"],
        sent_bytes=sent["bytes"],
        sent_drops=sent["drops"],
        received_frames=received["packets"],
        received_bytes=received["bytes"],
        received_drops=received["drops"],
    )


def token_buckets(tc_json: str) -> dict[str, dict[str, Any]]:
    """The token buckets by interface in what `tc -s -j qdisc show` printed. Raises: LabError where there is none."""
    found = {qdisc["dev"]: qdisc for qdisc in json.loads(tc_json) if qdisc["kind"] == "tbf" and qdisc.get("root")}
    if not found:
        raise LabError(f"no token bucket is left on the lab's interfaces; tc says: {tc_json.strip()}")
    return found


def interface_bytes(ip_json: str) -> dict[str, int]:
    """Bytes sent and received by each interface in what `ip -s -j link show` printed."""
    return {
        link["ifname"]: link["stats64"]["tx"]["bytes"] + link["stats64"]["rx"]["bytes"] for link in json.loads(ip_json)
    }
