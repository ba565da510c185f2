"""What many ask for at the same moment, asked once for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Made = TypeVar("Made")


class OnceForAll(Generic[Key]):
    """Of each key at most one call is under way, and one waits for it: whoever asks meanwhile is given what that makes.

    So an answer is never of a call that began before it was asked for: it is as new as one of one's own. A task belongs
    to its event loop, so two loops that ask the same service have calls of their own.
    """

    def __init__(self) -> None:
        self._next: dict[tuple[asyncio.AbstractEventLoop, Key], asyncio.Task[Any]] = {}
        self._under_way: dict[tuple[asyncio.AbstractEventLoop, Key], asyncio.Task[Any]] = {}
        self.calls = 0
        """Since the start, for who wants to know what was saved."""

    async def of(self, key: Key, call: Callable[[], Awaitable[Made]]) -> Made:
        """What `call` gives, or another one of the same key that has not begun yet. Raises what it raises."""
        place = asyncio.get_running_loop(), key
        task = self._next.get(place)
        if task is None:
            task = self._next[place] = asyncio.create_task(self._make(place, call, self._under_way.get(place)))
            task.add_done_callback(_seen)
        made: Made = await asyncio.shield(task)  # others wait for it where this one goes away
        return made

    async def _make(
        self,
        place: tuple[asyncio.AbstractEventLoop, Key],
        call: Callable[[], Awaitable[Made]],
        before: asyncio.Task[Any] | None,
    ) -> Made:
        if before is not None:
            await asyncio.wait([before])
        self._under_way[place] = self._next.pop(place)
        self.calls += 1
        try:
            return await call()
        finally:
            del self._under_way[place]


def _seen(task: asyncio.Task[Any]) -> None:
    """An error that nobody waits for any more is nobody's."""
    if not task.cancelled():
        task.exception()
