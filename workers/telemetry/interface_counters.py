"""What a network interface of this machine has sent and received: the kernel's own counters, from /proc/net/dev.

They count frames with the Ethernet header where the driver does so. A driver that gives large packets to be cut
elsewhere (veth, virtio, many cards with TSO) may count such a packet once, without the headers of the frames that it
becomes: up to 4.5 % too low. The lab reads its token buckets instead, which count every frame.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

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
