"""What one box measures of another, over links to its listener.

Small things first. A link on which only large frames vanish lets everything pass that a person would try, ping and a
login, and hangs as soon as a job sends its first gradients. So large frames are tried before speed is: TCP at the size
that both ends believe in, then datagrams that may not be cut up, to find the size that passes.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import statistics
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from pydantic import Field

from thinwire.tools.doctor.facts import Frozen, interfaces
from thinwire.tools.doctor.link import PATIENCE_S, Link, LinkError, call, refusal

ROUND_TRIPS = 50
LARGE_BYTES = 1 << 16
"""Several full frames of any size."""
SESSION_BYTES = 16
_IP_UDP_HEADERS = 28
_TRIES, _TRY_S = 3, 0.25
# From linux/in.h: set "don't fragment", and ignore what was learned about the path.
_IP_MTU_DISCOVER, _IP_PMTUDISC_PROBE = 10, 3
SMALLEST_MTU = 576
MOST_SENT_BYTES = 32 << 30
"""In each measurement of speed, however long it is."""
HEAD_START_S = 0.3
"""What arrives before is not counted: TCP is still finding out how fast the link is."""
_CHUNK = bytes(1 << 18)


class Target(Frozen):
    """Where a box listens. ports: more of them, each of which must be reachable."""

    host: str
    port: int
    ports: tuple[int, ...] = ()


class Visit(Frozen):
    """What a box found as it called another; None where it could not be measured.

    connect: "ok", or as LinkError.kind; why: in words. interface: by which it went there. round_trip_ms: median of
    small messages. clock_s: the other's clock less ours, within +- clock_error_s. ports: how each was met, as
    `connect`. sends_large, hears_large: whether full frames arrive, there and back. frame_bytes: the largest IP packet
    that arrives there, where one was found. there_mbit, back_mbit: payload in 10^6 bit/s, alone; both_*: both at once.
    """

    connect: str
    why: str = ""
    address: str | None = None
    round_trip_ms: float | None = None
    clock_s: float | None = None
    clock_error_s: float | None = None
    ports: dict[int, str] = Field(default_factory=dict)
    sends_large: bool | None = None
    hears_large: bool | None = None
    frame_bytes: int | None = None
    there_mbit: float | None = None
    back_mbit: float | None = None
    both_there_mbit: float | None = None
    both_back_mbit: float | None = None


def visit(
    target: Target,
    secret: bytes,
    *,
    seconds: float,
    clock: Callable[[], float] = time.time,
) -> Visit:
    """Measure what lies between here and the target. It takes some ten seconds where all is well.

    seconds: how long each speed is measured; 0: speeds are left out.
    """
    ports = {port: _reach(target.host, port) for port in target.ports}
    try:
        with call(target.host, target.port, secret, small=True) as link:
            address = str(link.socket.getsockname()[0])
            times, offset, error = _round_trips(link, clock)
    except LinkError as refused:
        return Visit(connect=refused.kind, why=str(refused), ports=ports)
    except (OSError, ValueError) as broken:
        return Visit(connect="broke off", why=f"the connection broke off: {broken}", ports=ports)
    found: dict[str, Any] = {
        "address": address,
        "round_trip_ms": times * 1e3,
        "clock_s": offset,
        "clock_error_s": error,
        "sends_large": _large(target, secret, {"do": "swallow", "bytes": LARGE_BYTES}, _give_large),
        "hears_large": _large(target, secret, {"do": "spill", "bytes": LARGE_BYTES}, _take_large),
        "frame_bytes": _largest_frame(target, secret, _mtu_of(address)),
    }
    if seconds > 0 and found["sends_large"] and found["hears_large"]:
        found["there_mbit"] = _there(target, secret, seconds)
        found["back_mbit"] = _back(target, secret, seconds)
        both = _both(target, secret, seconds)
        found["both_there_mbit"], found["both_back_mbit"] = both
    return Visit(connect="ok", ports=ports, **found)


def _mtu_of(address: str) -> int | None:
    return next((one.mtu for one in interfaces() if address in one.addresses), None)


def _reach(host: str, port: int) -> str:
    try:
        socket.create_connection((host, port), timeout=PATIENCE_S).close()
    except OSError as error:
        return refusal(error, f"{host}:{port}").kind
    return "ok"


def _round_trips(link: Link, clock: Callable[[], float]) -> tuple[float, float, float]:
    """Median time there and back; how far their clock is ahead of ours, and how sure that is. All in seconds."""
    link.say({"do": "tell the time", "times": ROUND_TRIPS})
    times, offsets = [], []
    for _ in range(ROUND_TRIPS):
        asked, began = clock(), time.perf_counter()
        link.socket.sendall(b"?")
        (theirs,) = struct.unpack("!d", link.exactly(8))
        took = time.perf_counter() - began
        times.append(took)
        offsets.append(theirs - (asked + took / 2))
    quickest = min(range(ROUND_TRIPS), key=times.__getitem__)
    return statistics.median(times), offsets[quickest], times[quickest] / 2


# large frames


def _large(target: Target, secret: bytes, question: dict[str, Any], move: Callable[[Link], None]) -> bool | None:
    """Whether so many bytes, in frames as large as TCP makes them, get through; None where no link came about."""
    try:
        link = call(target.host, target.port, secret)
    except LinkError:
        return None
    with link:
        try:
            link.say(question)
            move(link)
        except (OSError, ValueError):
            return False
    return True


def _give_large(link: Link) -> None:
    link.socket.sendall(bytes(LARGE_BYTES))
    link.heard()


def _take_large(link: Link) -> None:
    link.exactly(LARGE_BYTES)


def _largest_frame(target: Target, secret: bytes, mtu: int | None) -> int | None:
    """The largest IP packet that arrives there uncut, up to `mtu`; None where datagrams do not, or cannot be asked."""
    if mtu is None or not sys.platform.startswith("linux"):
        return None
    mtu = min(mtu, 65_535)  # loopback's is more than a packet can have
    with contextlib.suppress(LinkError, OSError, ValueError, KeyError), call(target.host, target.port, secret) as link:
        link.say({"do": "hear datagrams"})
        answer = link.heard()
        session, port = bytes.fromhex(answer["session"]), int(answer["port"])
        host = link.socket.getpeername()[0]
        family = link.socket.family
        with socket.socket(family, socket.SOCK_DGRAM) as sender:
            sender.connect((host, port))
            sender.settimeout(_TRY_S)
            level = socket.IPPROTO_IPV6 if family == socket.AF_INET6 else socket.IPPROTO_IP
            # Numbered otherwise for IPv6: IPV6_MTU_DISCOVER is 23.
            sender.setsockopt(level, 23 if family == socket.AF_INET6 else _IP_MTU_DISCOVER, _IP_PMTUDISC_PROBE)
            headers = _IP_UDP_HEADERS + (20 if family == socket.AF_INET6 else 0)
            return _search(lambda size: _arrives(sender, session, size - headers), mtu)
    return None


def _search(arrives: Callable[[int], bool], most: int) -> int | None:
    """The largest size up to `most` that arrives; None where not even a small one does."""
    if arrives(most):
        return most
    if not arrives(SMALLEST_MTU):
        return None
    low, high = SMALLEST_MTU, most
    for usual in (1500, 1450, 1400, 9000):  # what it is in most networks, with and without a tunnel
        if low < usual < high:
            low, high = (usual, high) if arrives(usual) else (low, usual)
    if low > SMALLEST_MTU and not arrives(low + 1):
        return low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if arrives(middle) else (low, middle)
    return low


def _arrives(sender: socket.socket, session: bytes, size: int) -> bool:
    for _ in range(_TRIES):
        question = secrets.token_bytes(8)
        try:
            sender.send((session + question).ljust(size, b"\0"))
            until = time.monotonic() + _TRY_S
            while time.monotonic() < until:
                if sender.recv(64) == session + question:
                    return True
        except TimeoutError:
            continue
        except OSError:  # larger than the interface sends, or nobody hears datagrams there
            return False
    return False


# speed


def send(opened: socket.socket, seconds: float) -> None:
    """Send for so long after a head start, and say that this was all.

    Raises: OSError; TimeoutError where nothing is taken any more.
    """
    until, left = time.monotonic() + HEAD_START_S + seconds, MOST_SENT_BYTES
    while left > 0 and time.monotonic() < until:
        left -= opened.send(_CHUNK)
    opened.shutdown(socket.SHUT_WR)


def count(opened: socket.socket) -> float:
    """Receive until the other side has sent all, and give 10^6 bit/s. Raises: OSError."""
    buffer = memoryview(bytearray(1 << 20))
    began = last = time.monotonic()
    counted_from, counted, before = None, 0, 0
    while size := opened.recv_into(buffer):
        last = time.monotonic()
        if counted_from is not None:
            counted += size
        else:
            before += size
            if last - began >= HEAD_START_S:
                counted_from = last
    if counted_from is None or last <= counted_from:  # a link so slow that all came in the head start, or in one piece
        return before * 8e-6 / max(last - began, 1e-6)
    return counted * 8e-6 / (last - counted_from)


def _there(target: Target, secret: bytes, seconds: float) -> float | None:
    with contextlib.suppress(LinkError, OSError, ValueError, KeyError), call(target.host, target.port, secret) as link:
        link.say({"do": "count"})
        send(link.socket, seconds)
        link.socket.settimeout(4 * PATIENCE_S)  # what is under way still has to arrive
        return float(link.heard()["mbit"])
    return None


def _back(target: Target, secret: bytes, seconds: float) -> float | None:
    with contextlib.suppress(LinkError, OSError, ValueError), call(target.host, target.port, secret) as link:
        link.say({"do": "send", "seconds": seconds})
        return count(link.socket)
    return None


def _both(target: Target, secret: bytes, seconds: float) -> Sequence[float | None]:
    """Both directions at once, each on a connection of its own."""
    rates: list[float | None] = [None, None]

    def measure(place: int, one_way: Callable[[Target, bytes, float], float | None]) -> None:
        rates[place] = one_way(target, secret, seconds)

    threads = [
        threading.Thread(target=measure, args=(place, one_way), daemon=True)
        for place, one_way in enumerate((_there, _back))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HEAD_START_S + seconds + 4 * PATIENCE_S)
    return tuple(rates)


def longest(seconds: float) -> float:
    """A visit takes at most about so many seconds, whatever happens."""
    return 12 * PATIENCE_S + 4 * (seconds + HEAD_START_S)
