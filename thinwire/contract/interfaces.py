"""The network interfaces of this machine: what they are called, and which IPv4 address each has. Linux.

Service, boxes and workers name an interface alike, and list the same where a name is wrong.
"""

from __future__ import annotations

import socket
import struct
import sys

if sys.platform == "linux":
    import fcntl

_SIOCGIFADDR = 0x8915
_NAME_BYTES = 15


class NoInterface(ValueError):
    """This machine has no such interface, or it has no address; the message lists what there is."""


def interfaces() -> dict[str, str]:
    """The IPv4 address of each interface that has one, by name."""
    found = {}
    if sys.platform == "linux":
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
            for _, name in socket.if_nameindex():
                request = struct.pack("256s", name[:_NAME_BYTES].encode())
                try:
                    answer = fcntl.ioctl(asker, _SIOCGIFADDR, request)
                except OSError:
                    continue  # it has none
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def address_of(name: str) -> str:
    """The IPv4 address of this interface. Raises NoInterface."""
    found = interfaces()
    if name not in found:
        raise NoInterface(
            f"{socket.gethostname()} has no network interface {name!r} with an IPv4 address: {listed(found)}"
        )
    return found[name]


def name_of(address: str) -> str | None:
    """The interface that has this address; None where none has."""
    return next((name for name, own in interfaces().items() if own == address), None)


def routes_to(host: str) -> str:
    """This machine's own address on the way to `host`. Nothing is sent. Raises OSError where there is no way."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        asker.connect((host, 9))
        return str(asker.getsockname()[0])


def listed(found: dict[str, str]) -> str:
    """What there is, for a person."""
    return "it has " + ", ".join(f"{name} ({address})" for name, address in sorted(found.items())) if found else "none"
