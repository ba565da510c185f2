"""How many bytes of bodies the service holds at once: of all callers together, and of each one a share.

A body counts from when its length is known, before any of it is read, until its request is over. Where there is no room
for one more, the one that has been longest without progress, of those that are still on their way, gives way. So
nobody keeps others out by sending halves.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.types import Message, Receive

from thinwire.service.errors import BodyTooSlow, Busy

TOTAL_BYTES = 64 << 20
SHARE_BYTES = 16 << 20
"""Of one caller: two bodies of the largest kind."""


class BodyBudget:
    """Of one event loop."""

    def __init__(self, total: int = TOTAL_BYTES, share: int = SHARE_BYTES) -> None:
        self._total, self._share = total, share
        self._of: Counter[str] = Counter()
        self._arriving: dict[Arriving, None] = {}  # in the order of their last progress

    @contextmanager
    def hold(
        self, who: str, size: int, receive: Receive, *, silent_s: float, within_s: float = math.inf
    ) -> Iterator[Arriving]:
        """Room for a body of this caller, until the end of the block.

        silent_s, within_s: how long it may be without progress, and take in all. Raises Busy, where the caller has its
        share or nobody can give way.
        """
        if self._of[who] + size > self._share:
            raise Busy(f"{who} has {self._of[who]} bytes of bodies under way; it may have {self._share}")
        while self._of.total() + size > self._total:
            longest = next(iter(self._arriving), None)
            if longest is None:
                raise Busy(f"the service works on {self._of.total()} bytes of bodies; it holds {self._total}")
            self.arrived(longest)
            self._free(longest)
            longest.give_way()
        body = Arriving(self, who, size, receive, silent_s, within_s)
        self._of[who] += size
        self._arriving[body] = None
        try:
            yield body
        finally:
            self.arrived(body)
            self._free(body)

    def moved(self, body: Arriving) -> None:
        """A part has come."""
        del self._arriving[body]
        self._arriving[body] = None

    def arrived(self, body: Arriving) -> None:
        """All of it is here, and it no longer gives way. Safe to call twice."""
        self._arriving.pop(body, None)

    def is_arriving(self, body: Arriving) -> bool:
        """Is a part of it still to come?"""
        return body in self._arriving

    def _free(self, body: Arriving) -> None:
        self._of[body.who] -= body.size
        body.size = 0
        if not self._of[body.who]:
            del self._of[body.who]


class Arriving:
    """A body on its way, to be called for each part as ASGI's `receive`, which then raises BodyTooSlow or Busy."""

    def __init__(
        self, budget: BodyBudget, who: str, size: int, receive: Receive, silent_s: float, within_s: float
    ) -> None:
        self.who, self.size = who, size
        self._budget, self._receive = budget, receive
        self._silent_s, self._within_s = silent_s, within_s
        self._until = asyncio.get_running_loop().time() + within_s
        self._gave_way = False
        self._wait: asyncio.Timeout | None = None

    async def __call__(self) -> Message:
        """The next part; after the last one whatever else comes."""
        if self._gave_way:
            raise self._lost()
        if not self._budget.is_arriving(self):
            return await self._receive()
        now = asyncio.get_running_loop().time()
        self._wait = asyncio.timeout_at(min(self._until, now + self._silent_s))
        try:
            async with self._wait:
                message = await self._receive()
        except TimeoutError:
            if self._gave_way:
                raise self._lost() from None
            late = f"nothing of the body came for {self._silent_s:g} s, or not all of it within {self._within_s:g} s"
            raise BodyTooSlow(f"{late}: send it again") from None
        finally:
            self._wait = None
        if message["type"] == "http.request" and message.get("more_body", False):
            self._budget.moved(self)
        else:
            self._budget.arrived(self)
        return message

    def give_way(self) -> None:
        """Its room is another's now: whoever waits for the next part, or asks for it later, hears so."""
        self._gave_way = True
        if self._wait is not None and not self._wait.expired():
            self._wait.reschedule(asyncio.get_running_loop().time())

    def _lost(self) -> Busy:
        return Busy("the service holds as many bodies as it may, and this one was the longest without progress")
