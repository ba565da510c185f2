"""How many large answers there are at once: what is read, made and sent of them is memory of the service.

`Slots` are taken by the routes whose answers may be some MiB long (`large_answer`), and given back when the answer has
been sent. Who asks for more waits for a while, holding nothing. Then the answer that has been under way for longest
gives way, if that is for as long; else who asks is refused. So nobody keeps others out by reading slowly. `Paced` gives
these answers to the server in small parts, each when the one before has gone: what is not read stays in its slot. The
others go there whole, and count among what is not read (connections.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final
from weakref import WeakValueDictionary

from fastapi import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from thinwire.service.auth import Caller
from thinwire.service.errors import TooMuch

logger = logging.getLogger(__name__)

WAIT_S: Final = 10.0
PART_BYTES: Final = 64 << 10


class Slots:
    """at_once: how many answers; of_one: how many to one person or job."""

    def __init__(self, at_once: int, of_one: int, wait_s: float = WAIT_S) -> None:
        self._of_one, self._wait_s = of_one, wait_s
        self._all = asyncio.Semaphore(at_once)
        self._of: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._held: dict[asyncio.Timeout, float] = {}  # since when, the longest first

    @asynccontextmanager
    async def one(self, who: str, sending: asyncio.Timeout) -> AsyncIterator[None]:
        """Hold one for somebody, whose answer ends with `sending`. Raises TooMuch, where none gets free."""
        own = self._of.setdefault(who, asyncio.Semaphore(self._of_one))
        try:
            async with asyncio.timeout(self._wait_s):
                await own.acquire()
            try:
                await self._one_of_all()
            except BaseException:
                own.release()
                raise
        except TimeoutError:
            raise TooMuch(f"{who} asks for more large answers at once than are given", self._wait_s) from None
        self._held[sending] = asyncio.get_running_loop().time()
        try:
            yield
        finally:
            self._held.pop(sending, None)
            self._all.release()
            own.release()

    async def _one_of_all(self) -> None:
        """Raises TimeoutError."""
        try:
            async with asyncio.timeout(self._wait_s):
                await self._all.acquire()
        except TimeoutError:
            now = asyncio.get_running_loop().time()
            longest, since = next(iter(self._held.items()), (None, now))
            if longest is None or now - since < self._wait_s:
                raise
            del self._held[longest]
            longest.reschedule(now)
            async with asyncio.timeout(self._wait_s):
                await self._all.acquire()


async def large_answer(request: Request) -> AsyncIterator[None]:
    """Dependency: hold a slot until the answer has been sent. Raises TooMuch."""
    slots: Slots = request.app.state.plane.large_answers
    caller: Caller = request.state.caller
    who = f"job {caller.job_id}" if caller.person is None else caller.person.name
    request.state.large = True
    async with slots.one(who, request.state.sending):
        yield


class Paced:
    """ASGI middleware, the outermost: no part of a large answer is longer than PART_BYTES, and it ends when it has to
    give way.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and its answer in parts."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        state = scope.setdefault("state", {})

        async def in_parts(message: Message) -> None:
            body = message.get("body", b"")
            if message["type"] != "http.response.body" or len(body) <= PART_BYTES or not state.get("large"):
                await send(message)
                return
            view = memoryview(body)
            for start in range(0, len(view), PART_BYTES):
                more = start + PART_BYTES < len(view) or message.get("more_body", False)
                await send({**message, "body": bytes(view[start : start + PART_BYTES]), "more_body": more})

        try:
            async with asyncio.timeout(None) as state["sending"]:
                await self.app(scope, receive, in_parts)
        except TimeoutError:
            if not state["sending"].expired():
                raise
            logger.info("large_answer_gave_way path=%s", scope["path"])
