"""The place of a process in its run: where it keeps its files, and how it learns of the others.

Everything is in its run folder: there it is written first, and there it is read. Where the processes of a run share no
folder, each has one of its own, and what others have to know goes through the service as well: what this process says
is posted once it is written, and what the others say is brought into this folder before it is read.

Where the service cannot read the driver's log, it is sent while it grows. Ray has a driver's output written to a file
on the driver's machine: what the driver, Ray and the workers' processes say through it. A thread reads that file and
sends what is new. What was said in the last moments of a driver that is killed is in the file alone.

The driver of such a run exchanges a ticket for its job (`claim`), and every process makes its run folder of what the
driver was given (`Credentials`, contract/remote_run.py).
"""

from __future__ import annotations

import glob
import hashlib
import json
import logging
import os
import secrets
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from thinwire.contract.files import private_folder, write_first, write_private, write_whole
from thinwire.contract.remote_run import KEPT_FILES, LOG_PART_BYTES, Claim, Claimed, KeptFile
from thinwire.contract.reports import Failure, Sample, Telemetry, WantedWorkers
from thinwire.contract.run_folder import RunFolder
from thinwire.contract.tls import trusting
from thinwire.workers.telemetry.service_client import ServiceClient, ServiceError, ServiceUnavailable

logger = logging.getLogger(__name__)

CLAIM_S = 120.0
"""How long a driver tries to reach the service."""
LAST_WORD_S = 60.0
"""How long the end of a run waits for a service that does not answer."""
PACKAGE_S = 120.0
"""How long a driver waits for the package of its job."""
BEGIN_S = 10.0
"""How long is tried for what another process may have left: a file, when one begins, or the history, when one ends."""
ASK_S = 5.0
"""Between two questions whether another process has failed, while one waits."""
RETRY_S = 1.0
LOG_LOOK_S, LOG_END_S = 1.0, 10.0
"""Between two looks for what is new in the log; how long its end may take to be sent."""

T = TypeVar("T")


class ClaimRefused(Exception):
    """The service does not let this driver begin; the message says why. Holds no secret."""


def claim(service_url: str, job_id: str, ticket: str, patience_s: float = CLAIM_S, *, ca: str = "") -> Claimed:
    """Exchange the ticket, trying for so long where the service does not answer. ca: which it is trusted by, as PEM.

    Raises ClaimRefused.
    """
    body = Claim(claimant=secrets.token_urlsafe(32)).model_dump_json()
    headers = {"Authorization": f"Bearer {ticket}", "Content-Type": "application/json"}
    until, url = time.monotonic() + patience_s, f"{service_url.rstrip('/')}/v1/jobs/{job_id}/claim"
    with httpx.Client(timeout=15.0, trust_env=False, verify=trusting(ca) if ca else True) as http:
        while True:
            try:
                answer = http.post(url, content=body, headers=headers)
                if answer.is_success:
                    return Claimed.model_validate_json(answer.content)
                why = f"answered {answer.status_code}: {answer.text[:500]}"
                if answer.status_code in (401, 403, 404, 409, 422):
                    raise ClaimRefused(f"{service_url} {why}")
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                why = f"cannot be reached from this machine ({type(error).__name__}: {error})"
                if "CERTIFICATE_VERIFY_FAILED" in why:
                    raise ClaimRefused(
                        f"the service at {service_url} is not trusted ({error}): its certificate must be of that name, "
                        "and THINWIRE_TLS_CA of the service its CA, unless every machine trusts that"
                    ) from error
            if time.monotonic() + RETRY_S > until:
                raise ClaimRefused(
                    f"the service at {service_url} {why}, tried for {patience_s:g} s: set THINWIRE_PUBLIC_URL to an "
                    "address that the machines of the cluster reach, and let the service listen there"
                )
            logger.warning("service_awaited url=%s reason=%r", service_url, why)
            time.sleep(RETRY_S)


@dataclass(frozen=True)
class Credentials:
    """What a process needs to take part in a run. It travels inside the train function: Ray shows that to nobody."""

    job: dict[str, Any] = field(repr=False)
    token: str = field(repr=False)
    service_url: str
    service_ca: str = field(default="", repr=False)

    def new_folder(self) -> Path:
        """A new run folder of this process's own, with these in it, mode 0700. Raises OSError.

        Those that processes of this job have left here which have ended meanwhile are removed: a worker that is killed
        cannot do it itself.
        """
        self._remove_left()
        folder = RunFolder(
            private_folder(Path(tempfile.mkdtemp(prefix=f"{self._prefix}{os.getpid()}-")) / self._job_id)
        )
        write_private(folder.token, self.token + "\n")
        write_private(folder.service_url, self.service_url + "\n")
        if self.service_ca:
            write_private(folder.service_ca, self.service_ca)
        write_private(folder.job, json.dumps(self.job, indent=1) + "\n")
        return folder.path

    @property
    def _job_id(self) -> str:
        return str(self.job["job_id"])

    @property
    def _prefix(self) -> str:
        return f"thinwire-{self._job_id}-"

    def _remove_left(self) -> None:
        for left in Path(tempfile.gettempdir()).glob(f"{glob.escape(self._prefix)}*"):
            pid = left.name.removeprefix(self._prefix).partition("-")[0]
            if pid.isdecimal() and int(pid) != os.getpid() and not Path(f"/proc/{pid}").exists():
                shutil.rmtree(left, ignore_errors=True)  # another may be at it; another user's stays


class PackageDiffers(Exception):
    """What was fetched is not the job's package."""


class Place:
    """The place of one process. Its methods may be called from any thread.

    credentials: what makes a place of its own for another process; None where all share this folder.
    wanted_look_s: how often to look whether other workers are wanted.
    """

    def __init__(
        self, run_dir: Path, attempt: int | Callable[[], int] = 1, credentials: Credentials | None = None
    ) -> None:
        """attempt: which submission of the job this process belongs to, asked again where a later one may adopt it."""
        self.run_dir, self.folder, self.credentials = run_dir, RunFolder(run_dir), credentials
        self._attempt = attempt
        self._service = None if credentials is None else self.new_client(0)
        self.wanted_look_s = 0.5 if self._service is None else 1.0
        self._asked_at, self._succeeded = -ASK_S, False
        self._left: set[KeptFile] = set()
        self._log: LogCopy | None = None

    @classmethod
    def of_its_own(cls, credentials: Credentials, attempt: int | Callable[[], int]) -> Self:
        """That of a process which shares no folder: a new one. Raises OSError."""
        return cls(credentials.new_folder(), attempt, credentials)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Send the rest of the log, and close the connections."""
        if self._log is not None:
            self._log.close()
        if self._service is not None:
            self._service.close()

    @property
    def is_shared(self) -> bool:
        """Do all processes of the run, and the service, see this folder?"""
        return self._service is None

    @property
    def has_service(self) -> bool:
        """Is there a service that wants to know of the run?"""
        return self.folder.service_url.exists()

    def new_client(self, rank: int, adopt_s: float = 0.0) -> ServiceClient:
        """The service's, for the worker of that name; see ServiceClient. To be closed by the caller."""
        return ServiceClient(self.run_dir, rank, self._attempt, adopt_s=adopt_s)

    def begin(self) -> None:
        """Bring into the run folder what an earlier process of the run has left, before a worker begins."""
        service = self._service
        if service is None:
            return
        try:
            content = _patiently(lambda: service.kept_file("buckets.json"), BEGIN_S)
        except ServiceError as error:
            logger.warning("file_not_fetched name=buckets.json reason=%r", str(error))
            return
        if content:
            write_whole(self.folder.buckets, content)

    def package(self, sha256: str) -> Path:
        """The zip of the job's script, brought into the run folder. Raises: ServiceError, PackageDiffers, OSError."""
        assert self._service is not None, "where the folder is shared the service has given it to Ray"
        content = _patiently(self._service.package, PACKAGE_S)
        found = hashlib.sha256(content).hexdigest()
        if found != sha256:
            raise PackageDiffers(f"the service gave a package of sha256 {found}, and the job's is {sha256}")
        path = self.run_dir / f"{sha256}.zip"
        write_whole(path, content)
        return path

    def send_log(self) -> None:
        """Send what this process writes to its standard output, from here on, where the service cannot read it."""
        if self._service is not None and self._log is None:
            self._log = LogCopy.of_this_process(self._service)

    def leave_files(self) -> None:
        """Leave with the service what is there of the files that it keeps, each once. Raises ServiceError, OSError."""
        if self._service is None:
            return
        for name in KEPT_FILES:
            if name not in self._left and (self.run_dir / name).exists():
                self._service.keep_file(name, (self.run_dir / name).read_bytes())
                self._left.add(name)

    def others_history(self) -> list[Sample]:
        """What has been reported to the service, where this folder need not have it all. Raises ServiceError."""
        return [] if self._service is None else _patiently(self._service.history, BEGIN_S)

    def wanted(self) -> WantedWorkers | None:
        """How many workers are wanted now; None where nobody has said it, or it cannot be read (which is logged)."""
        self._bring()
        file = self.folder.workers
        if file.exists():
            try:
                return WantedWorkers.model_validate_json(file.read_text())
            except (OSError, ValidationError) as error:
                logger.warning("wanted_workers_unreadable path=%s reason=%r", file, str(error))
        return None

    def has_failed(self) -> bool:
        """Has a process of this run said that it cannot go on?"""
        if not self.folder.failure.exists() and time.monotonic() - self._asked_at >= ASK_S:
            self._bring()
        return self.folder.failure.exists()

    def fail(self, failure: Failure) -> None:
        """Say so: of several processes the first one is heard. Raises OSError.

        Where the service has to hear it, it is tried for LAST_WORD_S; what is left of it then is the log.
        """
        if not write_first(self.folder.failure, failure.model_dump_json(indent=2) + "\n"):
            logger.info("failure_already_told path=%s", self.folder.failure)
        service = self._service
        if service is None:
            return

        def post() -> None:
            if service.run_now().failure is None:
                service.post(Telemetry(attempt=service.attempt, failure=failure))

        try:
            _patiently(post, LAST_WORD_S)
        except ServiceError as error:
            logger.error("failure_undelivered reason=%r", str(error))

    def failure(self) -> Failure | None:
        """What was said; where the service does not answer, by this process itself."""
        self._bring()
        file = self.folder.failure
        return Failure.model_validate_json(file.read_text()) if file.exists() else None

    def has_succeeded(self) -> bool:
        """Is the summary there? The service is asked for LAST_WORD_S."""
        until = time.monotonic() + LAST_WORD_S
        while not self._bring() and time.monotonic() < until:
            time.sleep(RETRY_S)
        return self._succeeded or self.folder.summary.exists()

    def _bring(self) -> bool:
        """What others say of the run now, into this folder. Returns whether that could be found out."""
        if self._service is None:
            return True
        self._asked_at = time.monotonic()
        try:
            now = self._service.run_now()
            _put(self.folder.workers, now.wanted)
            if now.failure is not None:
                _put(self.folder.failure, now.failure)
        except ServiceError:  # logged by the client, once
            return False
        except OSError as error:
            logger.warning("run_not_brought path=%s reason=%s", self.run_dir, error)
            return False
        self._succeeded = now.succeeded
        return True


def _put(path: Path, value: BaseModel) -> None:
    """Write it where it says something else. Raises OSError."""
    content = value.model_dump_json(indent=2) + "\n"
    if not path.exists() or path.read_text() != content:
        write_private(path, content)


def _patiently(call: Callable[[], T], patience_s: float) -> T:
    """Call again for so long while the service does not answer. Raises ServiceError."""
    until = time.monotonic() + patience_s
    while True:
        try:
            return call()
        except ServiceUnavailable:
            if time.monotonic() + RETRY_S > until:
                raise
            time.sleep(RETRY_S)


class LogCopy:
    """Sends the file at `path` until it is closed."""

    def __init__(self, path: Path, service: ServiceClient, look_s: float = LOG_LOOK_S) -> None:
        self._path, self._service, self._look_s = path, service, look_s
        self._offset, self._full = 0, False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="thinwire-log", daemon=True)
        self._thread.start()

    @classmethod
    def of_this_process(cls, service: ServiceClient) -> Self | None:
        """Of what this process writes to its standard output; None where that is no file."""
        if not stat.S_ISREG(os.fstat(1).st_mode):
            return None
        return cls(Path(os.readlink("/proc/self/fd/1")), service)

    def close(self, timeout_s: float = LOG_END_S) -> None:
        """Send what is there, for so long at most."""
        self._closing.set()
        self._thread.join(timeout_s)

    def _follow(self) -> None:
        try:
            last = False
            while not last and not self._full:
                last = self._closing.wait(self._look_s)  # what was written before the close is sent after it
                self._send_new()
        except OSError as error:
            logger.warning("log_unsent path=%s reason=%s", self._path, error)

    def _send_new(self) -> None:
        """All that is new; where the service does not answer, later. Raises OSError."""
        with self._path.open("rb", buffering=0) as file:
            while not self._full:
                file.seek(self._offset)
                part = file.read(LOG_PART_BYTES)
                if not part:
                    return
                try:
                    kept = self._service.add_log(self._offset, part)
                except ServiceError:  # logged by the client, once
                    return
                self._offset, self._full = kept.next_offset, kept.full
