"""Connections, whoever opens them: how many there may be, how long each may be without progress, what may lie unread.

uvicorn closes a connection that says nothing after an answer. One that never sends a request, sends half of one, or
does not read its answers stays for as long as its sender likes; at the limit of open files nobody else gets in. So of
each connection it is known when its sender last made progress: sent a whole request or a part of a body, took an answer
or a part of one. Without progress for too long it is ended, and where there are too many, a newcomer takes the place of
the one that has been longest without. No limit is of an address: behind a proxy all people have the same one.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

logger = logging.getLogger(__name__)

MOST = 4096
"""Connections, where the limit of files allows for so many."""
ACCEPTED_AT_ONCE = 128
"""Connections that are accepted before there are too many of them."""
TURNS = 3
"""Of the event loop: within them it reads what came with a new connection."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of the connections of one server: of all together `most` and `unread_bytes`, of each the seconds."""

    most: int = MOST
    unread_bytes: int = 64 << 20
    """Of answers that wait in this process to be read."""
    idle_s: float = 60.0
    """Without a whole request: from the beginning, or from the last answer on."""
    unread_s: float = 10.0
    """With an answer of which nothing is read."""
    busy_s: float = 300.0
    """With a request that the service has not answered."""
    look_s: float = 1.0
    """Between two looks at all of them."""


class Connections:
    """Those of one server, in the order of their last progress: who has been longest without is the first."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self._moved_at: dict[BoundedConnection, float] = {}
        self._new: set[BoundedConnection] = set()
        self._unread_bytes = 0
        self._ended: Counter[str] = Counter()
        self._timer: asyncio.TimerHandle | None = None

    def join(self, one: BoundedConnection) -> None:
        """Count it, and make room where there are too many: whose sender is waited for goes before whom we answer.

        A new one stays until what came with it is read, however busy this process is: a request may be among it.
        """
        if len(self._moved_at) >= self.bounds.most:
            waited_for = self._first(lambda other: other.is_waited_for and other not in self._new)
            self._end(waited_for or self._first(lambda other: True), "displaced")
        self._moved_at[one] = one.loop.time()
        self._new.add(one)
        self._no_longer_new(one, one.loop, TURNS)
        if self._timer is None:
            self._timer = one.loop.call_later(self.bounds.look_s, self._look, one.loop)

    def _no_longer_new(self, one: BoundedConnection, loop: asyncio.AbstractEventLoop, turns: int) -> None:
        if turns:
            loop.call_soon(self._no_longer_new, one, loop, turns - 1)
        else:
            self._new.discard(one)

    def leave(self, one: BoundedConnection) -> None:
        """Count it no more. Safe to call twice."""
        self.unread(one, 0)
        self._moved_at.pop(one, None)

    def moved(self, one: BoundedConnection) -> None:
        """Its sender has made progress."""
        if self._moved_at.pop(one, None) is not None:
            self._moved_at[one] = one.loop.time()

    def unread(self, one: BoundedConnection, size: int) -> None:
        """So many bytes of its answers wait to be read now; where all of them are too many, one that waits ends."""
        self._unread_bytes += size - one.unread_bytes
        one.unread_bytes = size
        while self._unread_bytes > self.bounds.unread_bytes:
            self._end(self._first(lambda other: other.unread_bytes > 0), "unread_bytes")

    def _first(self, fits: Callable[[BoundedConnection], bool]) -> BoundedConnection | None:
        return next((one for one in self._moved_at if fits(one)), None)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """End those that have been without progress for too long; look again later."""
        now = loop.time()
        for one, moved_at in list(self._moved_at.items()):
            if one.unread_bytes and (size := one.transport.get_write_buffer_size()) < one.unread_bytes:
                self.unread(one, size)
                self.moved(one)
            elif now - moved_at > (allowed := one.allowed)[1]:
                self._end(one, allowed[0])
        if self._ended:
            logger.info("connections_ended open=%d %s", len(self._moved_at), _counts(self._ended))
            self._ended.clear()
        self._timer = loop.call_later(self.bounds.look_s, self._look, loop) if self._moved_at else None

    def _end(self, one: BoundedConnection | None, why: str) -> None:
        """Close at once: what is not read, or not whole, is lost."""
        if one is not None:
            self._ended[why] += 1
            self.leave(one)
            one.transport.abort()


def _counts(ended: Counter[str]) -> str:
    return " ".join(f"{why}={count}" for why, count in sorted(ended.items()))


class BoundedConnection(H11Protocol):
    """One connection of `others`. unread_bytes: of its answers, in this process; 0 where the kernel has taken all."""

    others: ClassVar[Connections]
    unread_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Join the others, and hear of it when anything at all is not read."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=1, low=0)
        self.others.join(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Leave the others."""
        self.others.leave(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """A request that is whole, or a part of its body, is progress; a part of its head is none.

        Who sends the next request before this one is answered gets this answer, and no other: no client of today does
        so, and whether its answers are read could not be told.
        """
        super().data_received(data)
        if self._is_idle or self.unread_bytes:
            return
        self.others.moved(self)
        if self.conn.their_state is h11.DONE and self.conn.trailing_data[0]:
            self.cycle.keep_alive = False

    def on_response_complete(self) -> None:
        """An answer that has been taken is progress."""
        super().on_response_complete()
        if not self.unread_bytes:
            self.others.moved(self)

    def pause_writing(self) -> None:
        """Not all of an answer has been taken."""
        super().pause_writing()
        self.others.moved(self)
        self.others.unread(self, self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        """All of it has been taken."""
        super().resume_writing()
        self.others.unread(self, 0)
        self.others.moved(self)

    @property
    def _is_idle(self) -> bool:
        """Is there no request that waits for its answer?"""
        return self.cycle is None or self.cycle.response_complete

    @property
    def is_waited_for(self) -> bool:
        """Is it its sender who has to do something next: ask, send on, read?"""
        return self._is_idle or self.unread_bytes > 0 or self.cycle.more_body

    @property
    def allowed(self) -> tuple[str, float]:
        """What it does, and for how many seconds it may do that without progress."""
        bounds = self.others.bounds
        if self.unread_bytes:
            return "unread", bounds.unread_s
        return ("idle", bounds.idle_s) if self._is_idle else ("busy", bounds.busy_s)


def bounded(bounds: Bounds) -> type[BoundedConnection]:
    """The protocol of one server, for uvicorn.Config(http=...)."""

    class OfThisServer(BoundedConnection):
        others = Connections(bounds)

    return OfThisServer
