"""The addresses that a job may name for Prometheus: its worker's own, from where the registration came.

Prometheus asks whatever it is given, from inside of the cluster's network. A job that could name any address would
read through it what it cannot reach itself.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

Network = IPv4Network | IPv6Network
_HOST_PORT = re.compile(r"(?:(?P<name>[A-Za-z0-9_][A-Za-z0-9._-]*)|\[(?P<six>[0-9A-Fa-f:.]+)\]):(?P<port>[0-9]{1,5})\Z")


def refused(address: str, came_from: str | None, networks: Sequence[Network]) -> str | None:
    """Why this address is not asked, in words; None where it is.

    address: host:port as the worker gives it. came_from: the address that the registration came from; None where who
    registers may name any. networks: others that may be named, because a proxy stands before the service.
    """
    found = _HOST_PORT.match(address)
    if found is None or not 0 < int(found["port"]) <= 65535:
        return "must be host:port, with a port from 1 to 65535"
    if came_from is None:
        return None
    host = _ip(found["name"] or found["six"])
    if host is None:
        return "must name its host by an IP address"
    if host == _ip(came_from) or any(host.version == network.version and host in network for network in networks):
        return None
    return (
        f"must be on the host that registers it, {came_from}; where workers reach the service through a proxy, the "
        "operator names their networks in THINWIRE_SCRAPE_NETWORKS"
    )


def _ip(text: str) -> IPv4Address | IPv6Address | None:
    try:
        found = ip_address(text)
    except ValueError:
        return None
    return (found.ipv4_mapped or found) if isinstance(found, IPv6Address) else found
