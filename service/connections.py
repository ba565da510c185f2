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
import ssl
from asyncio import sslproto
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import h11
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.h11_impl import H11Protocol

logger = logging.getLogger(__name__)

MOST = 4096
"""Connections, where the limit of files allows for so many."""
ACCEPTED_AT_ONCE = 128
"""Connections that are accepted before there are too many of them."""
TLS_BUFFER_BYTES = 32 << 10
"""Of each connection; asyncio takes 256 KiB, which is 1 GiB for 4096. A record of TLS has up to 16 KiB."""
TURNS = 3
"""Of the event loop: within them it reads what came with a new connection."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of the connections of one server: of all together `most` and `unread_bytes`, of each the seconds."""

    most: int = MOST
    unread_bytes: int = 64 << 20
    """Of answers that wait in this process to be read."""
    handshake_s: float = 10.0
    """With TLS, before it is agreed upon."""
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
        self._moved_at: dict[Counted, float] = {}
        self._new: set[Counted] = set()
        self._unread_bytes = 0
        self._ended: Counter[str] = Counter()
        self._timer: asyncio.TimerHandle | None = None

    def join(self, one: Counted) -> None:
        """Count it, and make room where there are too many: whose sender is waited for goes before whom we answer.

        A new one stays until what came with it is read, however busy this process is: a request may be among it.
        """
        if len(self._moved_at) >= self.bounds.most:
            waited_for = self._first(lambda other: other.is_waited_for and other not in self._new)
            self._end(waited_for or next(iter(self._moved_at)), "displaced")
        self._moved_at[one] = one.loop.time()
        self._new.add(one)
        self._no_longer_new(one, one.loop, TURNS)
        if self._timer is None:
            self._timer = one.loop.call_later(self.bounds.look_s, self._look, one.loop)

    def _no_longer_new(self, one: Counted, loop: asyncio.AbstractEventLoop, turns: int) -> None:
        if turns:
            loop.call_soon(self._no_longer_new, one, loop, turns - 1)
        else:
            self._new.discard(one)

    def leave(self, one: Counted) -> None:
        """Count it no more. Safe to call twice."""
        self.unread(one, 0)
        self._moved_at.pop(one, None)

    def moved(self, one: Counted) -> None:
        """Its sender has made progress."""
        if self._moved_at.pop(one, None) is not None:
            self._moved_at[one] = one.loop.time()

    def unread(self, one: Counted, size: int) -> None:
        """So many bytes of its answers wait to be read now; where all of them are too many, one that waits ends."""
        if one not in self._moved_at:  # it has been ended
            return
        self._unread_bytes += size - one.unread_bytes
        one.unread_bytes = size
        while self._unread_bytes > self.bounds.unread_bytes:
            longest = self._first(lambda other: other.unread_bytes > 0)
            assert longest is not None, "some of them have it"
            self._end(longest, "unread_bytes")

    def _first(self, fits: Callable[[Counted], bool]) -> Counted | None:
        return next((one for one in self._moved_at if fits(one)), None)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """End those that have been without progress for too long; look again later."""
        now = loop.time()
        for one, moved_at in list(self._moved_at.items()):
            if one.unread_bytes and (size := one.unsent) < one.unread_bytes:
                self.unread(one, size)
                self.moved(one)
            elif now - moved_at > (allowed := one.allowed)[1]:
                self._end(one, allowed[0])
        if self._ended:
            logger.info("connections_ended open=%d %s", len(self._moved_at), _counts(self._ended))
            self._ended.clear()
        self._timer = loop.call_later(self.bounds.look_s, self._look, loop) if self._moved_at else None

    def _end(self, one: Counted, why: str) -> None:
        """Close at once: what is not read, or not whole, is lost."""
        self._ended[why] += 1
        self.leave(one)
        one.transport.abort()


Counted: TypeAlias = "BoundedConnection | Handshake"


def _counts(ended: Counter[str]) -> str:
    return " ".join(f"{why}={count}" for why, count in sorted(ended.items()))


class BoundedConnection(H11Protocol):
    """One connection of `others`. unread_bytes: of its answers, in this process; 0 where the kernel has taken all."""

    others: ClassVar[Connections]
    unread_bytes = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.app = self._told_of_parts(self.app)
        self._early = bytearray()
        self.below: asyncio.Transport | None = None  # of TLS

    def _should_upgrade(self) -> bool:
        """Never: where a library for WebSockets is installed, uvicorn would hand the connection to a protocol of its,
        which has none of these bounds.
        """
        return False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Join the others, and hear of it when anything at all is not read."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=1, low=0)
        self.others.join(self)
        if early := bytes(self._early):
            self._early.clear()
            self.data_received(early)

    def connection_lost(self, exc: Exception | None) -> None:
        """Leave the others."""
        self.others.leave(self)
        if self.transport is not None:
            super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """A request that is whole, or a part of its body, is progress; a part of its head is none.

        Who sends the next request before this one is answered gets this answer, and no other: no client of today does
        so, and whether its answers are read could not be told.
        """
        if self.transport is None:  # TLS is agreed upon, and nobody has been told
            self._early += data
            return
        super().data_received(data)
        if self.unread_bytes:
            self.others.unread(self, self.unsent)
        if self._is_idle or self.unread_bytes:
            return
        self.others.moved(self)
        if self.conn.their_state is h11.DONE and self.conn.trailing_data[0]:
            self.cycle.keep_alive = False

    def _told_of_parts(self, app: ASGI3Application) -> ASGI3Application:
        """A part of an answer that has been taken is progress: a stream may go on for ever."""

        async def call(scope: Any, receive: Any, send: Any) -> None:
            async def sent(message: Any) -> None:
                await send(message)
                if message["type"] == "http.response.body" and not self.unread_bytes:
                    self.others.moved(self)

            await app(scope, receive, sent)

        return call

    def on_response_complete(self) -> None:
        """An answer that has been taken is progress."""
        super().on_response_complete()
        if not self.unread_bytes:
            self.others.moved(self)
            if self.below is not None:  # which has it all, and tells nobody
                self.others.unread(self, self.unsent)

    def pause_writing(self) -> None:
        """Not all of an answer has been taken."""
        super().pause_writing()
        self.others.moved(self)
        self.others.unread(self, self.unsent)

    def resume_writing(self) -> None:
        """All of it has been taken."""
        super().resume_writing()
        self.others.unread(self, self.unsent)
        self.others.moved(self)

    @property
    def unsent(self) -> int:
        """Bytes that the kernel has not taken."""
        below = 0 if self.below is None else self.below.get_write_buffer_size()
        return self.transport.get_write_buffer_size() + below

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


class Handshake(asyncio.Protocol):
    """A connection before TLS is agreed upon. It counts among the others: asyncio would tell of it only afterwards.

    make: the protocol that speaks within TLS.
    """

    is_waited_for = True
    unread_bytes = unsent = 0

    def __init__(self, make: Callable[[], BoundedConnection], context: ssl.SSLContext) -> None:
        self.loop = asyncio.get_running_loop()
        self._inner, self._context = make(), context

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Join the others, and begin."""
        self.transport = transport
        self._inner.others.join(self)
        self._task = self.loop.create_task(self._shake())

    async def _shake(self) -> None:
        try:
            inner = await self.loop.start_tls(self.transport, self._inner, self._context, server_side=True)
        except OSError as error:  # of TLS, or of a connection that ended
            logger.debug("handshake_failed error=%s", error)
            self.transport.abort()
            return
        finally:
            self._inner.others.leave(self)
        if inner is not None and not inner.is_closing():
            self._inner.below = self.transport
            self._inner.connection_made(inner)

    @property
    def allowed(self) -> tuple[str, float]:
        """What it does, and for how many seconds it may do that."""
        return "handshake", self._inner.others.bounds.handshake_s


def within_tls(loop: asyncio.AbstractEventLoop) -> None:
    """From now on, servers of this loop that speak TLS count connections from their first byte on."""
    create = loop.create_server

    async def create_server(make: Callable[[], BoundedConnection], *rest: Any, ssl: Any, **more: Any) -> Any:
        return await create(lambda: Handshake(make, ssl), *rest, **more)

    loop.create_server = create_server  # type: ignore[assignment, method-assign]
    sslproto.SSLProtocol.max_size = TLS_BUFFER_BYTES


def bounded(bounds: Bounds) -> type[BoundedConnection]:
    """The protocol of one server, for uvicorn.Config(http=...)."""

    class OfThisServer(BoundedConnection):
        others = Connections(bounds)

    return OfThisServer
