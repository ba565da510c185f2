"""How many large answers there are at once: what is read, made and sent of them is memory of the service.

`Slots` are taken by the routes whose answers may be some MiB long (`large_answer`), and given back when the answer has
been sent. Who asks for more waits for a while, holding nothing, and is then refused. `Paced` gives every answer to the
server in small parts, each when the one before has gone: so what is not read stays in its slot, and not in the server.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final
from weakref import WeakValueDictionary

from fastapi import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from thinwire.service.auth import Caller
from thinwire.service.errors import TooMuch

WAIT_S: Final = 10.0
PART_BYTES: Final = 64 << 10


class Slots:
    """at_once: how many answers; of_one: how many to one person or job."""

    def __init__(self, at_once: int, of_one: int, wait_s: float = WAIT_S) -> None:
        self._of_one, self._wait_s = of_one, wait_s
        self._all = asyncio.Semaphore(at_once)
        self._of: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    @asynccontextmanager
    async def one(self, who: str) -> AsyncIterator[None]:
        """Hold one for somebody. Raises TooMuch, where none gets free."""
        own = self._of.setdefault(who, asyncio.Semaphore(self._of_one))
        try:
            async with asyncio.timeout(self._wait_s):
                await own.acquire()
                try:
                    await self._all.acquire()
                except BaseException:
                    own.release()
                    raise
        except TimeoutError:
            raise TooMuch(f"{who} asks for more large answers at once than are given", self._wait_s) from None
        try:
            yield
        finally:
            self._all.release()
            own.release()


async def large_answer(request: Request) -> AsyncIterator[None]:
    """Dependency: hold a slot until the answer has been sent. Raises TooMuch."""
    slots: Slots = request.app.state.plane.large_answers
    caller: Caller = request.state.caller
    who = f"job {caller.job_id}" if caller.person is None else caller.person.name
    async with slots.one(who):
        yield


class Paced:
    """ASGI middleware, the outermost: no part of an answer is longer than PART_BYTES."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and its answer in parts."""

        async def in_parts(message: Message) -> None:
            body = message.get("body", b"")
            if message["type"] != "http.response.body" or len(body) <= PART_BYTES:
                await send(message)
                return
            view = memoryview(body)
            for start in range(0, len(view), PART_BYTES):
                more = start + PART_BYTES < len(view) or message.get("more_body", False)
                await send({**message, "body": bytes(view[start : start + PART_BYTES]), "more_body": more})

        await self.app(scope, receive, in_parts)
