"""A bell that rings when something has happened to jobs: who waits for that asks then, and not again and again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from typing import Self

from thinwire.client import Client, ClientError
from thinwire.client.streams import follow
from thinwire.contract.streams import END, GAP, SAMPLE, Told


class Bell:
    """Rings when something has happened to one of these jobs: a stream is read in a thread, and what it says not kept.

    Use it as a context manager. each_step: it rings for each step that a job reports; else only where the number of its
    workers has changed. Where the service has no streams, or they end, it no longer `follows`.
    """

    def __init__(self, client: Client, job_ids: Collection[str], *, each_step: bool = True) -> None:
        self._client, self._job_ids, self._each_step = client, frozenset(job_ids), each_step
        self._world_size: object = None
        self._rung, self._over = threading.Event(), threading.Event()
        self._follows = False
        self._thread = threading.Thread(target=self._listen, name="thinwire-bell", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *what: object) -> None:
        self._over.set()

    @property
    def follows(self) -> bool:
        """Will it ring? Else ask every now and then."""
        return self._follows

    def wait(self, seconds: float) -> bool:
        """Wait for it, so long at most. Did it ring since the last time?"""
        rung = self._rung.wait(seconds)
        self._rung.clear()
        return rung

    def wait_for_news(self, poll_s: float, slow_s: float, on_poll: Callable[[], None]) -> None:
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
        one = next(iter(self._job_ids)) if len(self._job_ids) == 1 else None
        try:
            for told in follow(
                self._client, one, "events", {"after": "now"}, lost=self._lost, opened=self._opened, sleep=self._pause
            ):
                if self._is_news(told):
                    self._rung.set()
                if self._over.is_set() or (one is not None and told.event == END):
                    break
        except (ClientError, RuntimeError):  # an older service, or the client is closed: it is polled, and says why
            pass
        self._follows = False
        self._rung.set()

    def _is_news(self, told: Told) -> bool:
        if told.event == SAMPLE and not self._each_step:
            sample = told.data.get("sample")
            before, self._world_size = self._world_size, sample.get("world_size") if isinstance(sample, dict) else None
            return self._world_size != before
        return told.event == GAP or told.data.get("job_id") in self._job_ids

    def _opened(self) -> None:
        # What has happened before, since it was last asked for, the stream does not tell.
        self._follows = True
        self._rung.set()

    def _lost(self, error: ClientError) -> None:
        self._follows = False
        self._rung.set()

    def _pause(self, seconds: float) -> None:
        if self._over.wait(seconds):
            raise RuntimeError("nobody waits for the bell any more")
