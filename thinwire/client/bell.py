"""A bell that rings when something has happened to jobs: who waits for that asks then, and not again and again.

`Bell` listens in a thread, `AwaitedBell` in a task. Where the service has no streams, or they end, neither `follows`.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from enum import Enum
from typing import Final, Self

import httpx

from thinwire.client.errors import ClientError
from thinwire.client.streams import Following, FollowingAwaited, follow, followed
from thinwire.contract.jobs import JobState
from thinwire.contract.streams import END, GAP, SAMPLE, STATE, Told

MOST_SAMPLES_OF: Final = 50
"""Jobs of whose steps a stream of all jobs is asked to tell: so many names fit the 8 KiB that proxies take."""


class Rings(Enum):
    """For what."""

    EACH_STEP = "all that is told: each step that a job reports too"
    CHANGES = "a step only where the number of its workers is another one"
    ENDS = "the end of a job"


class _Listening:
    """What of a stream is news. job_ids: of these jobs; none: of all, and of the steps of `samples_of`."""

    def __init__(self, job_ids: Collection[str], rings: Rings, samples_of: Collection[str] = ()) -> None:
        self._job_ids, self._rings = frozenset(job_ids), rings
        self._world_size: object = None
        self._one = next(iter(self._job_ids)) if len(self._job_ids) == 1 else None
        self._params: dict[str, str | list[str]] = {"after": "now"}
        if samples_of:
            self._params["samples_of"] = list(samples_of)[:MOST_SAMPLES_OF]

    def _is_news(self, told: Told) -> bool:
        if told.event == GAP or told.event == END:
            return True
        if self._job_ids and told.data.get("job_id") not in self._job_ids:
            return False
        if self._rings is Rings.ENDS:
            return told.event == STATE and told.data.get("state") in _OVER
        if told.event == SAMPLE and self._rings is Rings.CHANGES:
            sample = told.data.get("sample")
            before, self._world_size = self._world_size, sample.get("world_size") if isinstance(sample, dict) else None
            return self._world_size != before
        return True

    def _is_last(self, told: Told) -> bool:
        return self._one is not None and told.event == END


_OVER = frozenset(str(state) for state in JobState if state.terminal)


class Bell(_Listening):
    """Rings when something has happened to one of these jobs: a stream is read in a thread, and what it says not kept.

    Use it as a context manager: at its end the connection is closed.
    """

    def __init__(
        self,
        client: Following,
        job_ids: Collection[str],
        rings: Rings = Rings.EACH_STEP,
        samples_of: Collection[str] = (),
    ) -> None:
        super().__init__(job_ids, rings, samples_of)
        self._client = client
        self._rung, self._over = threading.Event(), threading.Event()
        self._follows = False
        self._response: httpx.Response | None = None
        self._thread = threading.Thread(target=self._listen, name="thinwire-bell", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *what: object) -> None:
        self._over.set()
        _hang_up(self._response)

    @property
    def follows(self) -> bool:
        """Will it ring? Else ask every now and then."""
        return self._follows

    def wait(self, seconds: float) -> bool:
        """Wait for it, so long at most. Did it ring since the last time?"""
        rung = self._rung.wait(seconds)
        self._rung.clear()
        return rung

    def wait_for_news(self, poll_s: float, slow_s: float, on_poll: Callable[[], None] = lambda: None) -> None:
        """Wait until it rings, at least for one poll, and at most for `slow_s`; for one poll where it does not follow.

        on_poll: called between polls.
        """
        until = time.monotonic() + slow_s
        if self._follows:  # whatever happens meanwhile is asked for at once
            time.sleep(poll_s)
            on_poll()
        while not self.wait(poll_s) and self._follows and time.monotonic() < until:
            on_poll()

    def _listen(self) -> None:
        try:
            for told in follow(
                self._client,
                self._one,
                "events",
                self._params,
                lost=self._lost,
                opened=self._opened,
                sleep=self._pause,
            ):
                if self._is_news(told):
                    self._rung.set()
                if self._over.is_set() or self._is_last(told):
                    break
        except (ClientError, RuntimeError):  # an older service, or the client is closed: it is polled, and says why
            pass
        self._response = None  # its connection may be another request's by now
        self._follows = False
        self._rung.set()

    def _opened(self, response: httpx.Response) -> None:
        # What has happened before, since it was last asked for, the stream does not tell.
        self._response = response
        self._follows = True
        self._rung.set()
        self._pause(0.0)

    def _lost(self, error: ClientError) -> None:
        self._response = None
        self._follows = False
        self._rung.set()

    def _pause(self, seconds: float) -> None:
        if self._over.wait(seconds):
            raise RuntimeError("nobody waits for the bell any more")


class AwaitedBell(_Listening):
    """The same for a program with an event loop: `async with`."""

    def __init__(self, client: FollowingAwaited, job_ids: Collection[str], rings: Rings = Rings.EACH_STEP) -> None:
        super().__init__(job_ids, rings)
        self._client = client
        self._rung = asyncio.Event()
        self._follows = False

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._listen())
        return self

    async def __aexit__(self, *what: object) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    @property
    def follows(self) -> bool:
        """Will it ring? Else ask every now and then."""
        return self._follows

    async def wait(self, seconds: float) -> bool:
        """The same as Bell.wait."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._rung.wait(), seconds)
        rung = self._rung.is_set()
        self._rung.clear()
        return rung

    async def _listen(self) -> None:
        try:
            async for told in followed(
                self._client, self._one, "events", self._params, lost=self._lost, opened=self._opened
            ):
                if self._is_news(told):
                    self._rung.set()
                if self._is_last(told):
                    break
        except (ClientError, RuntimeError):
            pass
        self._follows = False
        self._rung.set()

    def _opened(self, response: httpx.Response) -> None:
        self._follows = True
        self._rung.set()

    def _lost(self, error: ClientError) -> None:
        self._follows = False
        self._rung.set()


def _hang_up(response: httpx.Response | None) -> None:
    """End a connection of which another thread reads: it need not hear from the service for that."""
    stream = None if response is None else response.extensions.get("network_stream")
    wire = None if stream is None else stream.get_extra_info("socket")
    if isinstance(wire, socket.socket):
        with suppress(OSError):  # it has ended by itself
            # Of TLS too the socket below: another thread is inside of what its own shutdown would take away.
            socket.socket.shutdown(wire, socket.SHUT_RDWR)
