"""The calls of a job's process to the service, with the job's own token (contract/reports.py, contract/remote_run.py).

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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import httpx
from pydantic import BaseModel, ValidationError

from thinwire.contract.jobs import History
from thinwire.contract.remote_run import KeptFile, LogKept, RunNow
from thinwire.contract.reports import Sample, Telemetry, WorkerRegistration
from thinwire.contract.run_folder import RunFolder

logger = logging.getLogger(__name__)

Method = Literal["GET", "PUT", "POST", "DELETE"]


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
        # Below the server's own limit of 5 s, or a call now and then would meet a connection that is being closed.
        limits = httpx.Limits(keepalive_expiry=2.0)
        # trust_env: the token must not travel through a proxy that the environment happens to name.
        self._http = httpx.Client(
            timeout=httpx.Timeout(timeout_s, connect=min(2.0, timeout_s)), limits=limits, trust_env=False
        )

    @property
    def attempt(self) -> int:
        """Which submission of the job this worker belongs to: its own, or a later one that has adopted it."""
        return self._attempt() if callable(self._attempt) else self._attempt

    def register(self, address: str) -> None:
        """Say where this worker's metrics are; good for reports.LEASE_S."""
        registration = WorkerRegistration(
            address=address, attempt=self.attempt, pid=os.getpid(), node=socket.gethostname(), leads=self.leads
        )
        self._request("PUT", f"workers/{self.rank}", registration.model_dump_json())

    def deregister(self) -> None:
        """End the registration; that of a newer attempt stays."""
        self._request("DELETE", f"workers/{self.rank}", query={"attempt": self.attempt})

    def post(self, telemetry: Telemetry) -> None:
        """Hand over history; a batch the service has seen before changes nothing."""
        self._request("POST", "telemetry", telemetry.model_dump_json())

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
            answer = self._http.request(method, url, params=query or None, content=content, headers=headers)
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
