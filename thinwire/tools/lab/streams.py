"""Bytes sent for the sake of their speed, and counted where they arrive."""

from __future__ import annotations

import socket
import time

MOST_BYTES = 32 << 30
"""Whatever the time: so many are sent at most."""
HEAD_START_S = 0.3
"""What comes before is not counted, unless said otherwise: TCP is still finding out how fast the link is."""
_CHUNK = bytes(1 << 18)


def send(opened: socket.socket, seconds: float, head_start_s: float = HEAD_START_S) -> None:
    """Send for so long after a head start, and say that this was all.

    Raises: OSError; TimeoutError where nothing is taken any more.
    """
    until, left = time.monotonic() + head_start_s + seconds, MOST_BYTES
    while left > 0 and time.monotonic() < until:
        left -= opened.send(_CHUNK)
    opened.shutdown(socket.SHUT_WR)


def count(opened: socket.socket, head_start_s: float = HEAD_START_S) -> float:
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
            if last - began >= head_start_s:
                counted_from = last
    if counted_from is None or last <= counted_from:  # a link so slow that all came in the head start, or in one piece
        return before * 8e-6 / max(last - began, 1e-6)
    return counted * 8e-6 / (last - counted_from)
