"""The part of a lab's rate that plain TCP sockets reach, and the round trip of a message.

Two halves in one file: measure() for those who have a lab, and a program that a lab runs as its ranks. Pattern
"one-way": host 0 sends to host 1. "ring": every host sends to the next one and receives from the one before, all at
once; with two hosts that is two-way. The receivers count, after a second's head start for slow start.
"""

from __future__ import annotations

import json
import socket
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from thinwire.tools.lab.streams import count, send

if TYPE_CHECKING:
    from thinwire.tools.lab.lab import Lab

PORT = 5201
CONNECT_LIMIT_S = 20.0
HEAD_START_S = 1.0
ROUND_TRIPS = 200
PATTERNS = ("one-way", "ring")
# Of 1538 byte times that a full frame takes on a wire, a lab counts 1514; 1448 of them are TCP's payload.
MOST_OF_RATE = 1448 / 1514


@dataclass(frozen=True)
class Goodput:
    """received_mbit: TCP payload in 10^6 bit/s, by receiving host. round_trip_ms: of one byte, median, idle wire."""

    pattern: str
    asked_mbit: float
    received_mbit: tuple[float, ...]
    round_trip_ms: float
    seconds: float

    @property
    def least_share(self) -> float:
        """The slowest receiver's part of the rate asked for; at most 0.956 with frames of 1500 bytes."""
        return min(self.received_mbit) / self.asked_mbit


def measure(lab: Lab, pattern: str = "ring", seconds: float = 2.0) -> Goodput:
    """Send through an idle lab for `seconds` and a second of head start.

    Raises: ValueError where the pattern is unknown or the lab has one host only; LabRunFailed.
    """
    if pattern not in PATTERNS:
        raise ValueError(f"pattern = {pattern!r}: must be one of {', '.join(PATTERNS)}")
    if lab.spec.hosts < 2:
        raise ValueError("hosts = 1: a lab of one host has no link to measure; it needs at least 2")
    program = [sys.executable, "-m", "thinwire.tools.lab.goodput", pattern, str(seconds)]
    commands = [
        [*program, str(lab.spec.host_of(rank)), *lab.addresses] if rank % lab.spec.ranks_per_host == 0 else ["true"]
        for rank in range(lab.spec.world_size)
    ]
    result = lab.run(commands, time_limit_s=seconds + 60.0).check()
    said = [json.loads(text) for text in result.stdout if text]
    return Goodput(
        pattern=pattern,
        asked_mbit=lab.spec.rate_mbit,
        received_mbit=tuple(one["received_mbit"] for one in said if one["received_mbit"] is not None),
        round_trip_ms=statistics.median(one["round_trip_ms"] for one in said if one["round_trip_ms"] is not None),
        seconds=seconds,
    )


def main(arguments: Sequence[str]) -> None:
    """One host's part. arguments: pattern, seconds, number of this host, addresses of all."""
    pattern, seconds, host, addresses = arguments[0], float(arguments[1]), int(arguments[2]), arguments[3:]
    num_hosts = len(addresses)
    sends, receives = (True, True) if pattern == "ring" else (host == 0, host == 1)
    said: dict[str, Any] = {"received_mbit": None, "round_trip_ms": None}
    with socket.create_server((addresses[host], PORT)) as server:
        server.settimeout(CONNECT_LIMIT_S)
        threads = []
        if receives:
            threads.append(threading.Thread(target=_receive, args=(server, said)))
        if sends:
            threads.append(threading.Thread(target=_send, args=(addresses[(host + 1) % num_hosts], seconds, said)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if (receives and said["received_mbit"] is None) or (sends and said["round_trip_ms"] is None):
        sys.exit(1)  # the thread's traceback is on stderr
    json.dump(said, sys.stdout)


def _send(address: str, seconds: float, said: dict[str, Any]) -> None:
    with _connect(address) as link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        times = []
        for _ in range(ROUND_TRIPS):
            began = time.perf_counter()
            link.sendall(b".")
            link.recv(1)
            times.append(time.perf_counter() - began)
        send(link, seconds, HEAD_START_S)
    said["round_trip_ms"] = statistics.median(times) * 1e3


def _receive(server: socket.socket, said: dict[str, Any]) -> None:
    link, _ = server.accept()
    with link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(ROUND_TRIPS):
            link.sendall(link.recv(1))
        said["received_mbit"] = count(link, HEAD_START_S)


def _connect(address: str) -> socket.socket:
    until = time.monotonic() + CONNECT_LIMIT_S
    while True:
        try:
            return socket.create_connection((address, PORT), timeout=CONNECT_LIMIT_S)
        except ConnectionRefusedError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


if __name__ == "__main__":
    main(sys.argv[1:])
