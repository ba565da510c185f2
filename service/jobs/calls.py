"""Calls that block, made beside one another: one a job, so many at once, and none that keeps the others waiting.

A call that is slow gives its place to another one and goes on beside it; only how many there are in all is bounded.
What calls answer is fetched by one thread, which does with it what must be done in order.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

SLOW_S = 1.0
"""A call that has taken so long gives its place to another."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Answer(Generic[Result]):
    """What a call said, or what it raised; and how long it took."""

    key: str
    result: Result | None
    error: Exception | None
    seconds: float


class Calls(Generic[Result]):
    """Calls of one kind. at_once: those that have just begun; at_most: with the slow ones. answered: called after each.

    `start`, `wait` and `answers` are for one thread. The threads of the calls end with the process: one may hang.
    """

    def __init__(self, at_once: int, at_most: int, answered: Callable[[], None] = lambda: None) -> None:
        self._at_once, self._at_most, self._answered = at_once, at_most, answered
        self._began: dict[str, float] = {}
        self._answers: deque[Answer[Result]] = deque()
        self._changed = threading.Condition()
        self._queue: SimpleQueue[tuple[str, Callable[[], Result]] | None] = SimpleQueue()
        self._threads = 0

    def start(self, key: str, call: Callable[[], Result]) -> bool:
        """Make the call in a thread.

        False where there is no room, the system gives no thread, or one with this key has not been answered.
        """
        with self._changed:
            now = time.monotonic()
            young = sum(now - began < SLOW_S for began in self._began.values())
            if key in self._began or young >= self._at_once or len(self._began) >= self._at_most:
                return False
            self._began[key] = now
            spare = self._threads >= len(self._began)
            self._threads += not spare
        if not spare:
            try:
                threading.Thread(target=self._work, name="thinwire-call", daemon=True).start()
            except RuntimeError as error:
                logger.warning("call_not_begun key=%s error=%s", key, error)
                with self._changed:
                    del self._began[key]
                    self._threads -= 1
                return False
        self._queue.put((key, call))
        return True

    def age(self, key: str) -> float | None:
        """For how many seconds the call of this key has been under way; None where there is none."""
        with self._changed:
            began = self._began.get(key)
        return None if began is None else time.monotonic() - began

    def wait(self, keys: Collection[str], until: float) -> bool:
        """Wait for the end of the calls of these keys. until: time.monotonic(). False where some go on."""
        wanted = frozenset(keys)
        with self._changed:
            return self._changed.wait_for(
                lambda: wanted.isdisjoint(self._began), timeout=max(0.0, until - time.monotonic())
            )

    def wait_for_one(self, until: float) -> bool:
        """Wait until a call has ended or become slow, at most until then. False where the time is up."""
        with self._changed:
            now = time.monotonic()
            if now >= until:
                return False
            slow = min((began + SLOW_S for began in self._began.values() if now - began < SLOW_S), default=until)
            self._changed.wait(timeout=min(until, slow) - now)
        return True

    def answers(self) -> list[Answer[Result]]:
        """What has been answered since the last time, in the order of the answers."""
        with self._changed:
            found = list(self._answers)
            self._answers.clear()
        return found

    def close(self) -> None:
        """Let the threads end that wait for a call."""
        for _ in range(self._threads):
            self._queue.put(None)

    def _work(self) -> None:
        while (asked := self._queue.get()) is not None:
            key, call = asked
            began, result, error = time.monotonic(), None, None
            try:
                result = call()
            except Exception as raised:  # noqa: BLE001 - part of the answer
                error = raised
            except BaseException as raised:  # noqa: BLE001 - a cancellation or a panic of a library ends its call alone
                error = RuntimeError(f"the call ended with {type(raised).__name__}: {raised}")
                error.__cause__ = raised
            with self._changed:
                del self._began[key]
                self._answers.append(Answer(key, result, error, time.monotonic() - began))
                self._changed.notify_all()
            self._answered()
