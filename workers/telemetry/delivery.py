"""What a process of a job has to say, posted to the service in order, through outages of it.

Training never waits for it and no failure of the service reaches it: they are counted and logged.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from pydantic import JsonValue

from thinwire.contract.reports import Event, Failure, Sample, Telemetry
from thinwire.workers.telemetry.service_client import (
    Refused,
    ServiceClient,
    ServiceError,
    ServiceUnavailable,
    Superseded,
)

logger = logging.getLogger(__name__)

RETRY_S = 1.0
"""Between calls while the service does not answer."""
POST_EVERY_S = 1.0
POST_AT_SAMPLES = 200
MAX_PENDING = 500_000
"""Samples kept while the service does not answer, about half a gigabyte; beyond it the oldest go."""
_MAX_BATCH = 1000  # reports.Telemetry takes 2000; half of it keeps a batch after an outage well under a second


class Poster:
    """A sink of a reporter (reporter.py) that posts samples and events in order, from a thread of its own, and keeps
    them while nobody answers.

    `num_lost` counts what the service refused to take or what outgrew MAX_PENDING; the run folder still has it.
    """

    def __init__(
        self,
        client: ServiceClient,
        *,
        interval_s: float = POST_EVERY_S,
        retry_s: float = RETRY_S,
        leave: Callable[[], None] | None = None,
    ) -> None:
        """leave: called after each batch, and before the last word, to leave what else there is with the service."""
        self.num_lost = 0
        self._leave = leave
        self._client = client
        self._interval_s = interval_s
        self._retry_s = retry_s
        self._samples: deque[Sample] = deque()
        self._events: deque[Event] = deque()
        self._in_flight = (0, 0)  # samples and events of the batch that is being posted
        self._last_word: Telemetry | None = None
        self._give_up_at: float | None = None  # set when closing, on the monotonic clock
        self._finished = False
        self._superseded = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="thinwire-poster", daemon=True)
        self._has_begun = False

    @property
    def superseded(self) -> bool:
        """True once the service has said that a newer attempt of this job is running."""
        return self._superseded

    @property
    def running(self) -> bool:
        """From the first thing to post until the last word is posted, or it has given up or is superseded."""
        return self._thread.is_alive()

    def begin(self, seen: Sequence[Sample]) -> None:
        """Post what the rank 0 before may not have posted any more: what the service has it does not take twice."""
        self.samples(seen)

    def samples(self, samples: Sequence[Sample]) -> None:
        """Take samples to post. Returns at once."""
        with self._changed:
            if self._superseded:
                return
            self._samples.extend(samples)
            if (excess := len(self._samples) - MAX_PENDING) > 0:
                for _ in range(excess):
                    self._samples.popleft()
                self._lose(excess, f"more than {MAX_PENDING} samples wait for the service")
            self._wake(urgent=len(self._samples) >= POST_AT_SAMPLES)

    def forget_after(self, step: int) -> None:
        """Nothing: the steps come again, and the service takes the later sample of each."""

    def event(self, event: Event) -> None:
        """Take an event to post. Returns at once."""
        with self._changed:
            if not self._superseded:
                self._events.append(event)
                self._wake(urgent=False)

    def complete(self) -> None:
        """Nothing: it is the service that has what others have posted."""

    def close(
        self,
        summary: dict[str, JsonValue] | None = None,
        failure: Failure | None = None,
        timeout_s: float = 60.0,
    ) -> bool:
        """Post what is left and then the last word, a summary or a failure, trying for `timeout_s`.

        True if the service has it all; else what is missing is logged, and the run folder still has it.
        """
        with self._changed:
            if summary is not None or failure is not None:
                self._last_word = Telemetry(attempt=self._client.attempt, summary=summary, failure=failure)
            elif not self._has_begun:
                return True
            self._give_up_at = time.monotonic() + timeout_s
            self._wake(urgent=True)
        self._thread.join(timeout_s)
        if not self._finished and not self._superseded:
            logger.error(
                "telemetry_undelivered samples=%d events=%d last_word=%s failed_calls=%d",
                len(self._samples) + self._in_flight[0],
                len(self._events) + self._in_flight[1],
                self._last_word is not None,
                self._client.num_failures,
            )
        return self._finished and self.num_lost == 0

    def _wake(self, *, urgent: bool) -> None:
        """There is something to post, at once where it is urgent. Under the lock."""
        if not self._has_begun:
            self._has_begun = True
            self._thread.start()
        elif urgent:
            self._changed.notify()

    def _run(self) -> None:
        try:
            while self._wait():
                self._post_pending()
                self._leave_all()
            self._post_pending()
            self._leave_all()
            if self._last_word is not None:
                self._post(self._last_word)
                self._leave_all()
            self._finished = True
        except Superseded as error:
            with self._changed:
                self._superseded = True
                self._samples.clear()
                self._events.clear()
            logger.warning("telemetry_superseded attempt=%d reason=%r", self._client.attempt, str(error))
        except ServiceUnavailable:
            return  # the time that close() gave is over; close() says what is missing

    def _leave_all(self) -> None:
        if self._leave is None:
            return
        try:
            self._leave()
        except (ServiceError, OSError) as error:  # tried again after the next batch
            logger.info("files_not_left reason=%r", str(error))

    def _wait(self) -> bool:
        """Wait for the next time to post; False when closing."""
        with self._changed:
            if self._give_up_at is None and len(self._samples) < POST_AT_SAMPLES:
                self._changed.wait(self._interval_s)
            return self._give_up_at is None

    def _post_pending(self) -> None:
        while True:
            with self._changed:
                samples = [self._samples.popleft() for _ in range(min(_MAX_BATCH, len(self._samples)))]
                events = [self._events.popleft() for _ in range(min(_MAX_BATCH, len(self._events)))]
                self._in_flight = (len(samples), len(events))
            if not samples and not events:
                return
            self._post(Telemetry(attempt=self._client.attempt, samples=samples, events=events))

    def _post(self, batch: Telemetry) -> None:
        """Post one batch, again and again while the service does not answer. Raises Superseded, ServiceUnavailable."""
        while True:
            try:
                return self._client.post(batch.model_copy(update={"attempt": self._client.attempt}))
            except ServiceUnavailable:
                if self._give_up_at is not None and time.monotonic() + self._retry_s > self._give_up_at:
                    raise
                time.sleep(self._retry_s)
            except Refused as error:
                self._lose(max(1, len(batch.samples) + len(batch.events)), str(error))
                return

    def _lose(self, num: int, reason: str) -> None:
        if self.num_lost == 0:
            logger.error("telemetry_lost num=%d reason=%r", num, reason)
        self.num_lost += num
