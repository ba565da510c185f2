"""How long may a connection say nothing, and how many may there be? Strangers must not use up the service's files.

uvicorn closes a connection that says nothing after an answer. One that never sends a request, sends half of one, or
does not read its answer stays for as long as its sender likes; at the limit of open files nobody else gets in.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

logger = logging.getLogger(__name__)

IDLE_S = 60.0
"""Without a whole request: from the beginning, or from the last answer on."""
BUSY_S = 300.0
"""With a request that has not been answered, or whose answer has not been read."""
WANTED_FILES = 65_536
KEPT_FILES = 256
"""Of the process's limit: not for connections, but for the database, logs, and what it starts."""
MOST = 4096
"""Connections, where the limit of files allows for so many."""


def raise_file_limit() -> int:
    """Let this process open as many files as it may, up to WANTED_FILES. Returns how many connections fit then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_FILES if hard == resource.RLIM_INFINITY else min(hard, WANTED_FILES)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return max(16, min(MOST, soft - KEPT_FILES))


class BoundedConnection(H11Protocol):
    """One connection. most: how many there may be at once; one more ends the one that has been idle for longest."""

    most = MOST
    idle_s = IDLE_S
    busy_s = BUSY_S

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._since = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to count, and make room where there are too many."""
        super().connection_made(transport)
        self._rest()
        if len(self.connections) > self.most:
            idle = [one for one in self.connections if isinstance(one, BoundedConnection) and one.is_idle]
            longest = min(idle, key=lambda one: one._since, default=self)
            logger.debug("connection_ended reason=too_many open=%d", len(self.connections))
            longest._end()

    def connection_lost(self, exc: Exception | None) -> None:
        """Count no more."""
        self._unset()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take what came; a request that is whole now has more time."""
        was_idle = self.is_idle
        super().data_received(data)
        if was_idle and not self.is_idle:
            self._set(self.busy_s)

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        if not self.transport.is_closing() and self.is_idle:
            self._rest()

    @property
    def is_idle(self) -> bool:
        """Is there no request that waits for its answer?"""
        return self.cycle is None or self.cycle.response_complete

    def _rest(self) -> None:
        self._since = self.loop.time()
        self._set(self.idle_s)

    def _set(self, seconds: float) -> None:
        self._unset()
        self._timer = self.loop.call_later(seconds, self._end)

    def _unset(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end(self) -> None:
        """Close at once: what is not read, or not whole, is lost."""
        self._unset()
        self.connections.discard(self)
        self.transport.abort()
