"""What a worker says about itself while it trains: metrics to be scraped, registrations and history for the service.

    WorkerMetrics   (exporter.py) the metrics of this worker, scraped over HTTP
    ServiceClient   (service_client.py) the three calls of reports.py, with the job's token
    Heartbeat       a thread that keeps the registration alive
    Poster          a thread of rank 0 that posts history and events, through outages of the service

Training never waits for any of them and no failure of the service reaches it: they are counted and logged.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque

from pydantic import JsonValue

from thinwire.contract.reports import HEARTBEAT_S, Event, Failure, Sample, Telemetry
from thinwire.workers.telemetry.exporter import WorkerMetrics
from thinwire.workers.telemetry.service_client import Refused, ServiceClient, ServiceUnavailable, Superseded

__all__ = ["Heartbeat", "Poster", "ServiceClient", "WorkerMetrics"]

logger = logging.getLogger(__name__)

RETRY_S = 1.0
"""Between calls while the service does not answer."""
POST_EVERY_S = 1.0
POST_AT_SAMPLES = 200
MAX_PENDING = 500_000
"""Samples kept while the service does not answer, about half a gigabyte; beyond it the oldest go."""
_MAX_BATCH = 1000  # reports.Telemetry takes 2000; half of it keeps a batch after an outage well under a second


class Heartbeat:
    """Keeps one worker's registration alive from a thread of its own; ends it at close."""

    def __init__(
        self, client: ServiceClient, address: str, *, interval_s: float = HEARTBEAT_S, retry_s: float = RETRY_S
    ) -> None:
        self._client = client
        self._address = address
        self._interval_s = interval_s
        self._retry_s = retry_s
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="thinwire-heartbeat", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        """False after close, and after the service has said that a newer attempt is running."""
        return self._thread.is_alive()

    def close(self, timeout_s: float = 10.0) -> None:
        """Stop, and end the registration if the service answers at once; else its lease runs out."""
        self._closing.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._closing.wait(self._beat())
            self._client.deregister()
        except ServiceUnavailable as error:
            logger.info("registration_left rank=%d reason=%r", self._client.rank, str(error))
        except (Superseded, Refused) as error:
            logger.warning("heartbeat_ended rank=%d reason=%r", self._client.rank, str(error))

    def _beat(self) -> float:
        """Register once; seconds to the next time."""
        try:
            self._client.register(self._address)
        except ServiceUnavailable:  # counted and logged by the client
            return self._retry_s
        return self._interval_s


class Poster:
    """Posts rank 0's samples and events in order from a thread of its own, and keeps them while nobody answers.

    `num_lost` counts what the service refused to take or what outgrew MAX_PENDING; the run folder still has it.
    """

    def __init__(self, client: ServiceClient, *, interval_s: float = POST_EVERY_S, retry_s: float = RETRY_S) -> None:
        self.num_lost = 0
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
        self._thread.start()

    @property
    def superseded(self) -> bool:
        """True once the service has said that a newer attempt of this job is running."""
        return self._superseded

    @property
    def running(self) -> bool:
        """False once it has posted its last word, has given up or is superseded."""
        return self._thread.is_alive()

    def add_sample(self, sample: Sample) -> None:
        """Take a sample to post. Returns at once."""
        with self._changed:
            if self._superseded:
                return
            if len(self._samples) >= MAX_PENDING:
                self._samples.popleft()
                self._lose(1, f"more than {MAX_PENDING} samples wait for the service")
            self._samples.append(sample)
            if len(self._samples) == POST_AT_SAMPLES:
                self._changed.notify()

    def add_event(self, event: Event) -> None:
        """Take an event to post. Returns at once."""
        with self._changed:
            if not self._superseded:
                self._events.append(event)

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
            self._give_up_at = time.monotonic() + timeout_s
            self._changed.notify()
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

    def _run(self) -> None:
        try:
            while self._wait():
                self._post_pending()
            self._post_pending()
            if self._last_word is not None:
                self._post(self._last_word)
            self._finished = True
        except Superseded as error:
            with self._changed:
                self._superseded = True
                self._samples.clear()
                self._events.clear()
            logger.warning("telemetry_superseded attempt=%d reason=%r", self._client.attempt, str(error))
        except ServiceUnavailable:
            return  # the time that close() gave is over; close() says what is missing

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
