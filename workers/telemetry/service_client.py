"""What a job's process says to the service, with the job's own token (contract/reports.py, contract/remote_run.py).

ServiceClient   each call once
Poster          samples and events in order, through outages of the service
Heartbeat       the registration of one worker, again and again

Training never waits for it and no failure of the service reaches it: they are counted and logged.

ServiceError            a call to the service came to nothing
|- ServiceUnavailable   no answer, or one that may be another next time
|- Superseded           a newer attempt of the job is running; this one has nothing more to say
'- Refused              the service will never take this message
"""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import httpx
from pydantic import BaseModel, JsonValue, ValidationError

from thinwire.contract.jobs import History
from thinwire.contract.remote_run import KeptFile, LogKept, RunNow
from thinwire.contract.reports import (
    HEARTBEAT_S,
    MOST_HEARTBEAT_S,
    NEXT_HEADER,
    REPORT_S,
    Event,
    Failure,
    Sample,
    Telemetry,
    WorkerRegistration,
)
from thinwire.contract.run_folder import RunFolder
from thinwire.contract.tls import trusting

logger = logging.getLogger(__name__)

Method = Literal["GET", "PUT", "POST", "DELETE"]

RETRY_S = 1.0
"""Between two calls of a poster or a heartbeat while the service does not answer."""
POST_AT_SAMPLES = 200
MAX_PENDING = 500_000
"""Samples kept while the service does not answer, about half a gigabyte; beyond it the oldest go."""
_MAX_BATCH = 1000  # reports.Telemetry takes 2000; half of it keeps a batch after an outage well under a second


class ServiceError(Exception):
    """A call to the service came to nothing. Never holds the token."""


class ServiceUnavailable(ServiceError):
    """No answer, or one that may be another next time: try again."""


class Superseded(ServiceError):
    """A newer attempt of the job is running."""


class Refused(ServiceError):
    """The service will never take this message."""


class ServiceClient:
    """The calls of one process to the service. May be shared by threads. Each call raises ServiceError.

    The address and the token are read from the run folder before each call, since the service may have moved. One line
    is logged when the service stops answering, one when it is back. `num_failures` counts calls without answer.
    """

    def __init__(
        self,
        run_dir: Path,
        rank: int,
        attempt: int | Callable[[], int],
        *,
        timeout_s: float = 5.0,
        adopt_s: float = 0.0,
    ) -> None:
        """attempt: asked before each call, where a later one may adopt this worker.

        adopt_s: how long a newer attempt may take to adopt this worker; until then it is not superseded by it.
        """
        self.rank = rank
        self.leads = False  # is it rank 0 of those that train now?
        self._adopt_s, self._stale_since = adopt_s, math.inf
        self._attempt = attempt
        self.num_failures = 0
        self._folder = RunFolder(run_dir)
        self._silent_since: float | None = None
        self._lock = threading.Lock()
        self._timeout = httpx.Timeout(timeout_s, connect=min(2.0, timeout_s))
        self._ca, self._http = "", self._trusting("")

    def _trusting(self, ca: str) -> httpx.Client:
        return httpx.Client(
            timeout=self._timeout,
            # Below the server's own limit of 5 s, or a call now and then would meet a connection that is being closed.
            limits=httpx.Limits(keepalive_expiry=2.0),
            trust_env=False,  # the token must not travel through a proxy that the environment happens to name
            verify=trusting(ca) if ca else True,
        )

    @property
    def attempt(self) -> int:
        """Which submission of the job this worker belongs to: its own, or a later one that has adopted it."""
        return self._attempt() if callable(self._attempt) else self._attempt

    def register(self, address: str) -> float:
        """Say where this worker's metrics are; seconds until to say it again, 0 where the service does not tell."""
        registration = WorkerRegistration(
            address=address, attempt=self.attempt, pid=os.getpid(), node=socket.gethostname(), leads=self.leads
        )
        return _next_s(self._request("PUT", f"workers/{self.rank}", registration.model_dump_json()))

    def deregister(self) -> None:
        """End the registration; that of a newer attempt stays."""
        self._request("DELETE", f"workers/{self.rank}", query={"attempt": self.attempt})

    def post(self, telemetry: Telemetry) -> float:
        """Hand over history; a batch the service has seen before changes nothing. Returns as `register` does."""
        return _next_s(self._request("POST", "telemetry", telemetry.model_dump_json()))

    def run_now(self) -> RunNow:
        """What the service knows of the run at this moment."""
        return RunNow.model_validate_json(self._request("GET", "run").content)

    def history(self) -> list[Sample]:
        """Every sample that the service has, in order of step."""
        samples: list[Sample] = []
        after = -1
        while True:
            # No event is of this kind: only samples are wanted.
            answer = self._request("GET", "metrics", query={"after_step": after, "event_kind": "none"})
            part = History.model_validate_json(answer.content)
            samples += part.samples
            if part.next_after_step is None:
                return samples
            after = part.next_after_step

    def package(self) -> bytes:
        """The zip of the job's script."""
        return self._request("GET", "package").content

    def kept_file(self, name: KeptFile) -> bytes:
        """A file that a process of the run has left; empty where none has."""
        return self._request("GET", f"files/{name}", or_none=True).content

    def keep_file(self, name: KeptFile, content: bytes) -> None:
        """Leave a file for the next process, or for people."""
        self._leave("PUT", f"files/{name}", content)

    def add_log(self, offset: int, content: bytes) -> LogKept:
        """Add to the log of this attempt."""
        return LogKept.model_validate_json(self._leave("POST", "log", content, offset=offset).content)

    def close(self) -> None:
        """Close the connections. Safe to call twice."""
        self._http.close()

    def _leave(self, method: Method, path: str, content: bytes, **query: int) -> httpx.Response:
        query["attempt"] = self.attempt
        return self._request(method, path, content, media="application/octet-stream", query=query)

    def _request(
        self,
        method: Method,
        path: str,
        content: str | bytes | None = None,
        *,
        media: str = "application/json",
        query: Mapping[str, str | int] | None = None,
        or_none: bool = False,
    ) -> httpx.Response:
        try:
            url = f"{self._read(self._folder.service_url).rstrip('/')}/v1/jobs/{self._job_id()}/{path}"
            headers = {"Authorization": f"Bearer {self._token()}", "Content-Type": media}
            answer = self._client().request(method, url, params=query or None, content=content, headers=headers)
            if or_none and answer.status_code == httpx.codes.NOT_FOUND:
                answer = httpx.Response(200, request=answer.request)
            _judge(answer)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            unavailable = ServiceUnavailable(f"{type(error).__name__}: {error}")
            self._note(unavailable)
            raise unavailable from error
        except ServiceUnavailable as error:
            self._note(error)
            raise
        except Superseded as error:
            self._note(None)
            self._stale_since = min(self._stale_since, time.monotonic())
            if time.monotonic() - self._stale_since < self._adopt_s:
                raise ServiceUnavailable(f"a newer attempt may adopt this worker: {error}") from error
            raise
        except ServiceError:
            self._note(None)
            raise
        self._stale_since = math.inf
        self._note(None)
        return answer

    def _client(self) -> httpx.Client:
        """That trusts the service by what the run folder says now."""
        file = self._folder.service_ca
        ca = self._read(file) if file.exists() else ""
        with self._lock:
            if ca != self._ca:  # the calls of other threads end with the one before
                try:
                    self._ca, self._http = ca, self._trusting(ca)
                except (OSError, ValueError) as error:
                    raise ServiceUnavailable(f"{file} holds no certificate: {error}") from error
            return self._http

    def _job_id(self) -> str:
        try:
            return _JobFile.model_validate_json(self._read(self._folder.job)).job_id
        except ValidationError as error:
            raise ServiceUnavailable(f"{self._folder.job} holds no job_id") from error

    def _token(self) -> str:
        token = self._read(self._folder.token)
        if not (token.isascii() and token.isprintable() and token and " " not in token):
            # Checked here: the HTTP library would print the header that it refuses.
            raise ServiceUnavailable(f"{self._folder.token} holds no token")
        return token

    @staticmethod
    def _read(file: Path) -> str:
        try:
            return file.read_text().strip()
        except OSError as error:
            raise ServiceUnavailable(f"cannot read {file}: {error.strerror}") from error

    def _note(self, failure: ServiceUnavailable | None) -> None:
        """Count and log the passage from answering to silent and back."""
        with self._lock:
            now = time.monotonic()
            if failure is not None:
                self.num_failures += 1
                if self._silent_since is None:
                    self._silent_since = now
                    logger.warning("service_silent rank=%d reason=%r; training goes on", self.rank, str(failure))
            elif self._silent_since is not None:
                logger.warning("service_back rank=%d silent_s=%.1f", self.rank, now - self._silent_since)
                self._silent_since = None


def _next_s(answer: httpx.Response) -> float:
    """Seconds until the next, as the service asks for; 0 where it does not, or for what makes no sense."""
    try:
        seconds = float(answer.headers.get(NEXT_HEADER, 0.0))
    except ValueError:
        return 0.0
    return min(seconds, MOST_HEARTBEAT_S) if seconds > 0.0 else 0.0


class _JobFile(BaseModel):
    job_id: str


def _judge(answer: httpx.Response) -> None:
    """Raise what the answer's status means."""
    if answer.is_success:
        return
    words = f"{answer.request.method} {answer.url.path} answered {answer.status_code}: {answer.text[:300]}"
    if answer.status_code == httpx.codes.CONFLICT:
        raise Superseded(words)
    if answer.status_code in (400, 413, 422):
        raise Refused(words)
    raise ServiceUnavailable(words)


class Poster:
    """Posts samples and events in order, from a thread of its own, and keeps them while nobody answers.

    Samples wait as long as the service asks for, unless there are many: no more of them wait than every worker
    remembers, so that a new rank 0 has them all. Events do not.

    num_lost: what the service refused to take or what outgrew MAX_PENDING; the run folder still has it. superseded:
    the service has said that a newer attempt of this job is running.
    """

    def __init__(
        self,
        client: ServiceClient,
        *,
        interval_s: float = REPORT_S,
        retry_s: float = RETRY_S,
        leave: Callable[[], None] | None = None,
    ) -> None:
        """leave: called after each batch, and before the last word, to leave what else there is with the service."""
        self.num_lost = 0
        self.superseded = False
        self._leave = leave
        self._client = client
        self._interval_s = interval_s
        self._retry_s = retry_s
        self._next_s = 0.0  # as the service has asked for
        self._samples: deque[Sample] = deque()
        self._events: deque[Event] = deque()
        self._in_flight = (0, 0)  # samples and events of the batch that is being posted
        self._last_word: Telemetry | None = None
        self._give_up_at: float | None = None  # set when closing, on the monotonic clock
        self._finished = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="thinwire-poster", daemon=True)
        self._has_begun = False

    @property
    def running(self) -> bool:
        """From the first thing to post until the last word is posted, or it has given up or is superseded."""
        return self._thread.is_alive()

    def samples(self, samples: Sequence[Sample]) -> None:
        """Take samples to post. Returns at once."""
        with self._changed:
            if self.superseded:
                return
            self._samples.extend(samples)
            if (excess := len(self._samples) - MAX_PENDING) > 0:
                for _ in range(excess):
                    self._samples.popleft()
                self._lose(excess, f"more than {MAX_PENDING} samples wait for the service")
            self._wake(urgent=len(self._samples) >= POST_AT_SAMPLES)

    def event(self, event: Event) -> None:
        """Take an event to post. Returns at once."""
        with self._changed:
            if not self.superseded:
                self._events.append(event)
                self._wake(urgent=True)

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
        if not self._finished and not self.superseded:
            logger.error(
                "telemetry_undelivered samples=%d events=%d last_word=%s failed_calls=%d",
                len(self._samples) + self._in_flight[0],
                len(self._events) + self._in_flight[1],
                self._last_word is not None,
                self._client.num_failures,
            )
        return self._finished and self.num_lost == 0

    def _wake(self, *, urgent: bool) -> None:
        """There is something to post; where it is urgent, sooner than the service asks for. Under the lock."""
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
                self.superseded = True
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
            began = time.monotonic()
            while self._give_up_at is None and len(self._samples) < POST_AT_SAMPLES:
                wait_s = self._interval_s if self._events else max(self._interval_s, self._next_s)
                if (left_s := began + wait_s - time.monotonic()) <= 0.0:
                    break
                self._changed.wait(left_s)
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
                self._next_s = self._client.post(batch.model_copy(update={"attempt": self._client.attempt}))
                return
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


class Heartbeat:
    """Keeps one worker's registration alive from a thread of its own; ends it at close.

    As seldom as the service asks for; but a worker that leads now, or no longer, or is of another attempt, says so
    within `interval_s`.
    """

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
                said, due = self._said, time.monotonic() + self._beat()
                while (left_s := due - time.monotonic()) > 0.0 and said == self._said and not self._closing.is_set():
                    self._closing.wait(min(left_s, self._interval_s))
            self._client.deregister()
        except ServiceUnavailable as error:
            logger.info("registration_left rank=%d reason=%r", self._client.rank, str(error))
        except (Superseded, Refused) as error:
            logger.warning("heartbeat_ended rank=%d reason=%r", self._client.rank, str(error))

    def _beat(self) -> float:
        """Register once; seconds to the next time."""
        try:
            return max(self._interval_s, self._client.register(self._address))
        except ServiceUnavailable:  # counted and logged by the client
            return self._retry_s

    @property
    def _said(self) -> tuple[int, bool]:
        """Of what a registration says, what may change."""
        return self._client.attempt, self._client.leads
