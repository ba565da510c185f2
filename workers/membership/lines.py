"""JSON lines over a socket, bounded in length and, where asked, in time."""

from __future__ import annotations

import socket
import struct
import sys
import threading
import time
from typing import TypeVar

from pydantic import BaseModel, TypeAdapter

T = TypeVar("T")
SEND_S = 10.0
"""A peer that takes nothing for so long, or whose host acknowledges nothing, is gone."""


class BadLine(ValueError):
    """The peer does not speak this protocol."""


class Lines:
    """One connection. Any thread may write, one may read."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._buffer = bytearray()
        self._writing = threading.Lock()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(SEND_S), 0))
        if sys.platform == "linux":  # a host that vanished does not acknowledge; a stopped process's host does
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SEND_S * 1000))

    def write(self, message: BaseModel) -> None:
        """Send one message. Raises OSError if the connection is gone or stuck."""
        line = message.model_dump_json().encode() + b"\n"
        with self._writing:
            self._socket.sendall(line)

    def read(self, model: TypeAdapter[T], longest_bytes: int, until: float | None = None) -> T | None:
        """The next message, by `until` on the monotonic clock; None at the end of the connection.

        Raises OSError if the connection breaks or `until` has come, and BadLine.
        """
        while (end := self._buffer.find(b"\n")) < 0:
            if len(self._buffer) > longest_bytes:
                raise BadLine(f"a line is longer than {longest_bytes} bytes: the peer does not speak this protocol")
            self._socket.settimeout(None if until is None else max(until - time.monotonic(), 0.001))
            received = self._socket.recv(1 << 16)
            if not received:
                return None
            self._buffer += received
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        if len(line) > longest_bytes:
            raise BadLine(f"a line is longer than {longest_bytes} bytes: the peer does not speak this protocol")
        try:
            return model.validate_json(line)
        except ValueError as error:
            raise BadLine(f"a line of {len(line)} bytes is no message of this protocol: {_first(error)}") from None

    def end(self) -> None:
        """Close for both directions; a reader sees the end. What was written still arrives."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it has ended already

    def close(self) -> None:
        """Give the socket back. By the thread that reads."""
        self._socket.close()


def _first(error: ValueError) -> str:
    """What is wrong, without what was received: it may hold a secret."""
    errors = getattr(error, "errors", None)
    found = errors(include_input=False, include_url=False)[0] if errors else {"msg": "not JSON", "loc": ()}
    return f"{'.'.join(str(place) for place in found['loc']) or 'line'}: {found['msg']}"
