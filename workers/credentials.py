"""How a process begins that shares no folder with the service: the driver claims its job, and every process of the run
makes a run folder of its own of what the driver was given (contract/remote_run.py)."""

from __future__ import annotations

import glob
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

from thinwire.contract.files import private_folder, write_private
from thinwire.contract.remote_run import Claim, Claimed
from thinwire.contract.run_folder import RunFolder

logger = logging.getLogger(__name__)

CLAIM_S = 120.0
"""How long a driver tries to reach the service."""
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


@dataclass(frozen=True)
class Credentials:
    """What a process needs to take part in a run. It travels inside the train function: Ray shows that to nobody."""

    job: dict[str, Any] = field(repr=False)
    token: str = field(repr=False)
    service_url: str

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
