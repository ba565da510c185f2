"""What a process of a run asks of the service, and leaves with it, where they share no folder (contract/remote_run.py).

claim         by the driver, once: a ticket for what it needs to begin
Papers        what every process of the run is given; it makes a run folder of its own of them
RemoteRun     the run as the service knows it, and the files that it keeps
"""

from __future__ import annotations

import glob
import hashlib
import json
import logging
import os
import secrets
import shutil
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from thinwire.contract.files import private_folder, write_private, write_whole
from thinwire.contract.jobs import History
from thinwire.contract.remote_run import Claim, Claimed, KeptFile, LogKept, RunNow
from thinwire.contract.reports import Sample
from thinwire.contract.run_folder import RunFolder
from thinwire.workers.telemetry.delivery import ServiceClient, ServiceError, ServiceUnavailable

logger = logging.getLogger(__name__)

CLAIM_S = 120.0
"""How long a driver tries to reach the service."""
BEGIN_S = 10.0
"""How long a process that begins waits for a file that a process before it may have left."""
RETRY_S = 1.0


class ClaimRefused(Exception):
    """The service does not let this driver begin; the message says why. Holds no secret."""


def claim(service_url: str, job_id: str, ticket: str, patience_s: float = CLAIM_S) -> Claimed:
    """Exchange the ticket, trying for so long where the service does not answer. Raises ClaimRefused."""
    body = Claim(claimant=secrets.token_urlsafe(32)).model_dump_json()
    headers = {"Authorization": f"Bearer {ticket}", "Content-Type": "application/json"}
    until, url = time.monotonic() + patience_s, f"{service_url.rstrip('/')}/v1/jobs/{job_id}/claim"
    with httpx.Client(timeout=15.0, trust_env=False) as http:
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
            if time.monotonic() + RETRY_S > until:
                raise ClaimRefused(
                    f"the service at {service_url} {why}, tried for {patience_s:g} s: set THINWIRE_PUBLIC_URL to an "
                    "address that the machines of the cluster reach, and let the service listen there"
                )
            logger.warning("service_awaited url=%s reason=%r", service_url, why)
            time.sleep(RETRY_S)


class PackageDiffers(Exception):
    """What was fetched is not the job's package."""


@dataclass(frozen=True)
class Papers:
    """What a process needs to take part in a run. It travels inside the train function: Ray shows that to nobody."""

    job: dict[str, Any] = field(repr=False)
    token: str = field(repr=False)
    service_url: str

    def settle(self) -> Path:
        """A new run folder of this process's own, with these papers in it, mode 0700. Raises OSError.

        Those that processes of this job have left here which have ended meanwhile are removed: a worker that is killed
        cannot do it itself.
        """
        self._remove_left()
        folder = RunFolder(
            private_folder(Path(tempfile.mkdtemp(prefix=f"{self._prefix}{os.getpid()}-")) / self._job_id)
        )
        write_private(folder.token, self.token + "\n")
        write_private(folder.service_url, self.service_url + "\n")
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


class RemoteRun:
    """The run as the service knows it. client: of this process; it is not closed here."""

    def __init__(self, run_dir: Path, client: ServiceClient) -> None:
        self._folder, self._client = RunFolder(run_dir), client

    def now(self) -> RunNow:
        """What holds at this moment. Raises ServiceError."""
        return RunNow.model_validate_json(self._client.ask("run"))

    def fetch(self, name: KeptFile, patience_s: float = BEGIN_S) -> bool:
        """Bring a file into the run folder. False where nobody has left it, or the service is away for so long."""
        until = time.monotonic() + patience_s
        while True:
            try:
                content = self._client.ask(f"files/{name}", or_none=True)
            except ServiceUnavailable as error:
                if time.monotonic() + RETRY_S < until:
                    time.sleep(RETRY_S)
                    continue
                logger.warning("file_not_fetched name=%s reason=%r", name, str(error))
                return False
            except ServiceError as error:
                logger.warning("file_not_fetched name=%s reason=%r", name, str(error))
                return False
            if content:
                write_whole(self._folder.path / name, content)
            return bool(content)

    def package(self, sha256: str, patience_s: float = CLAIM_S) -> Path:
        """The zip of the job's script, brought into the run folder. Raises: ServiceError, PackageDiffers, OSError."""
        until = time.monotonic() + patience_s
        while True:
            try:
                content = self._client.ask("package")
                break
            except ServiceUnavailable:
                if time.monotonic() + RETRY_S > until:
                    raise
                time.sleep(RETRY_S)
        found = hashlib.sha256(content).hexdigest()
        if found != sha256:
            raise PackageDiffers(f"the service gave a package of sha256 {found}, and the job's is {sha256}")
        path = self._folder.path / f"{sha256}.zip"
        write_whole(path, content)
        return path

    def leave(self, name: KeptFile) -> None:
        """Leave a file of the run folder with the service. Raises ServiceError, OSError."""
        self._client.leave(f"files/{name}", (self._folder.path / name).read_bytes())

    def add_log(self, offset: int, content: bytes) -> LogKept:
        """Add to the log of this attempt. Raises ServiceError."""
        return LogKept.model_validate_json(self._client.leave("log", content, offset=offset))

    def history(self) -> list[Sample]:
        """Every sample that the service has, in order of step. Raises ServiceError."""
        samples: list[Sample] = []
        after = -1
        while True:
            # No event is of this kind: only samples are wanted.
            part = History.model_validate_json(self._client.ask("metrics", after_step=after, event_kind="none"))
            samples += part.samples
            if part.next_after_step is None:
                return samples
            after = part.next_after_step
