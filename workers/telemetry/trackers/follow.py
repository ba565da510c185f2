"""Tracker: what a tool is told of a run. Follower: tells it, from a thread of its own, through outages.

A step hands samples over and goes on; neither a server that is gone nor a disk that is full costs it anything. What
could not be told is told again, in order, until the run ends; what is then still missing is said in the log.

A rank 0 that dies is replaced by one that knows the last samples (Reporter), and steps that are lost are made again. So
a tracker is told `Void`: all after this step is not so, and comes again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from pydantic import JsonValue

from thinwire.contract.redaction import redacted
from thinwire.contract.reports import Event, EventKind, Sample

logger = logging.getLogger(__name__)

EVERY_S = 1.0
RETRY_S, LONGEST_RETRY_S = 1.0, 60.0
"""Between two tries while a tool refuses, at first and after many."""
AT_ONCE = 1000
MOST_PENDING = 50_000
"""Samples and events that wait for a tool, some 80 MB; beyond it the oldest go."""

LONGEST_REASON = 500
"""Characters of an error, in an event."""

Ended = Literal["succeeded", "failed", "cancelled"]


@dataclass(frozen=True, slots=True)
class Void:
    """What was told of later steps is not so."""

    after: int


Item = Sample | Event | Void


class Tracker(Protocol):
    """A tool. Its methods are called by one thread, and may raise whatever they like and take as long."""

    name: str

    def write(self, items: Sequence[Item]) -> None:
        """Take these, in order, to where they outlive the process. After an error the same ones come again, with others
        behind them, whether or not some of them were taken."""

    def close(self, ended: Ended | None) -> None:
        """No more comes from this process. ended: how the run has; None where another process may go on with it."""


class CannotTrack(Exception):
    """This process will never be able to; the message says why, and what to do."""


class Follower:
    """Tells one tracker. Its methods return at once, and may be called from any thread, but for `close`.

    num_lost: samples and events that were never told. news: what happened to the tool, for the job to say; whoever
    says it takes it out.
    """

    def __init__(self, tracker: Tracker, every_s: float = EVERY_S, retry_s: float = RETRY_S) -> None:
        self.num_lost = 0
        self.news: deque[tuple[EventKind, dict[str, JsonValue]]] = deque()
        self._tracker, self._every_s, self._retry_s = tracker, every_s, retry_s
        self._pending: deque[Item] = deque()
        self._changed = threading.Condition()
        self._closing_at: float | None = None
        self._ended: Ended | None = None
        self._is_done = self._gave_up = False
        self._thread: threading.Thread | None = None

    def take(self, items: Sequence[Item]) -> None:
        """Tell it these, soon."""
        with self._changed:
            if self._gave_up:
                self.num_lost += len(items)
                return
            self._pending.extend(items)
            while len(self._pending) > MOST_PENDING:
                self.num_lost += not isinstance(self._pending.popleft(), Void)
            if self._thread is None and self._pending:
                name = f"thinwire-{self._tracker.name}"
                self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._thread.start()

    def void(self, after: int) -> None:
        """Nothing after this step is so: it comes again."""
        with self._changed:
            kept = [one for one in self._pending if not (isinstance(one, Sample) and one.step > after)]
            self._pending = deque(kept)
        self.take([Void(after)])

    def end(self, ended: Ended | None, timeout_s: float) -> None:
        """Begin to end: what is left is tried for so long."""
        with self._changed:
            self._ended = ended
            self._closing_at = time.monotonic() + timeout_s
            self._changed.notify_all()

    def close(self, timeout_s: float) -> None:
        """Wait for the end, and say what is missing."""
        if self._thread is None:
            return
        self._thread.join(max(0.0, timeout_s))
        left = sum(not isinstance(one, Void) for one in self._pending) + self.num_lost
        if left or not self._is_done:
            logger.error("tracking_incomplete tracker=%s missing=%d", self._tracker.name, left)

    def _run(self) -> None:
        tries = 0
        while True:
            batch = self._wait(tries)
            try:
                if batch:
                    self._tracker.write(batch)
                elif self._closing_at is not None:
                    self._tracker.close(self._ended)
                    self._is_done = True
                    return
            except CannotTrack as error:
                logger.warning("tracker_left_out tracker=%s reason=%s", self._tracker.name, error)
                self._say(EventKind.TRACKER_FAILED, f"it is left out: {error}")
                with self._changed:
                    self._gave_up = True
                return
            except Exception as error:  # noqa: BLE001 - whatever a library raises: a run does not end by it
                if not tries:
                    why = f"{type(error).__name__}: {error}"
                    logger.warning(
                        "tracker_failed tracker=%s reason=%r; training goes on, and it is tried again",
                        *(self._tracker.name, why),
                    )
                    self._say(EventKind.TRACKER_FAILED, why)
                tries += 1
                if self._closing_at is not None and time.monotonic() + self._retry_s > self._closing_at:
                    return
                continue
            if tries:
                logger.warning("tracker_back tracker=%s tries=%d", self._tracker.name, tries)
                self._say(EventKind.TRACKER_BACK)
                tries = 0
            with self._changed:
                for one in batch:
                    if self._pending and self._pending[0] is one:  # it may be void by now, or have been one too many
                        self._pending.popleft()

    def _say(self, kind: EventKind, reason: str | None = None) -> None:
        why = {} if reason is None else {"reason": redacted(reason)[:LONGEST_REASON]}
        self.news.append((kind, {"tracker": self._tracker.name, **why}))

    def _wait(self, tries: int) -> list[Item]:
        """What to tell next. tries: that have come to nothing since the last that did not."""
        with self._changed:
            if self._closing_at is None:
                longer_s = min(self._retry_s * 2.0 ** min(tries - 1, 30), LONGEST_RETRY_S)
                self._changed.wait(longer_s if tries else self._every_s)
            if self._closing_at is not None and tries:
                self._changed.wait(self._retry_s)
            return [self._pending[index] for index in range(min(AT_ONCE, len(self._pending)))]
