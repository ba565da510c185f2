"""The launcher of a standing Ray cluster: of its Jobs API at an address, with a token, and of nothing else.

The cluster is somebody else's: it was there before the service, goes on without it, and may serve other services, whose
submissions are never looked at. Its machines share no folder with the service. What a driver needs it fetches with the
ticket that stands in its command line (contract/remote_run.py); the job's token is in no entrypoint, metadata,
environment or log.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from thinwire.contract.places import Room
from thinwire.service.launch.driver import PYTHON, driver_command
from thinwire.service.launch.protocol import (
    LOG_PART_BYTES,
    Code,
    Launcher,
    LauncherError,
    LaunchStatus,
    LogChunk,
    NoLog,
    decoded,
)
from thinwire.service.launch.ray_jobs import RayJobs

_log = logging.getLogger(__name__)


class RayLauncher(Launcher):
    """Jobs run in a Ray cluster that is there.

    address: the cluster's dashboard, http://head:8265. token_file: holds the cluster's token; None: it asks for none.
    The file is read again when the cluster refuses the token that it held. grows: an autoscaler adds machines where
    jobs wait for them.
    """

    name = "ray"
    own_cluster = False

    def __init__(self, address: str, token_file: Path | None, *, grows: bool = False) -> None:
        self.address = address.rstrip("/")
        self._token_file = token_file
        self._grows = grows
        self._token = ""
        self._service_id = ""
        self._jobs: RayJobs | None = None

    def start(self, service_id: str = "") -> None:
        """Nothing to bring up: the cluster is asked for its version. Raises LauncherError where it does not answer."""
        self._service_id = service_id
        self._reread()
        if (reason := self.ready()) is not None:
            raise LauncherError(reason)
        _log.info("ray_cluster_found url=%s service_id=%s", self.address, service_id)

    def close(self) -> None:
        """Drop the connections. The jobs go on; started again, the service follows them."""
        if self._jobs is not None:
            self._jobs.close()

    def ready(self) -> str | None:
        """None when jobs can be submitted, else the reason they cannot."""
        reason = self._cluster().unready()
        if reason is not None and self._reread():
            reason = self._cluster().unready()
        if reason is not None and self._token_file is not None:
            return f"{reason}; its token is read from {self._token_file}"
        return reason

    def submit(
        self, submission_id: str, run_dir: Path, attempt: int, metadata: Mapping[str, str], code: Code | None = None
    ) -> None:
        """Start the job under our id, with this attempt's ticket; a known id is a success. Raises LauncherError."""
        # Of several on the path, Ray puts the one with the job's requirements first.
        python = "python" if code is not None and code.pip else PYTHON
        entrypoint = driver_command(run_dir, attempt, metadata, python=python)
        self._cluster().submit(self.named(submission_id), entrypoint, metadata, code)

    def status(self, submission_id: str) -> LaunchStatus:
        """What Ray says of it; UNKNOWN where it does not answer."""
        return self._cluster().status(self.named(submission_id))

    def cancel(self, submission_id: str) -> None:
        """Ask for its end: SIGTERM, then SIGKILL. Over or absent is a success. Raises LauncherError."""
        self._cluster().stop(self.named(submission_id))

    def room(self) -> Room | None:
        """What the cluster's machines have, and what others hold of it. Raises LauncherError."""
        return None if self._grows else self._cluster().room(self.named(""))

    def logs(self, submission_id: str, offset: int, limit: int = LOG_PART_BYTES) -> LogChunk:
        """The driver's output as Ray has it. Raises LauncherError, NoLog.

        Ray gives a log whole or not at all: ask where the driver cannot say it itself any more.
        """
        text = self._cluster().log(self.named(submission_id))
        if text is None:
            raise NoLog(f"the cluster has no submission {self.named(submission_id)!r}")
        return decoded(text.encode()[offset : offset + limit], offset)

    def dashboard_url(self, submission_id: str) -> str | None:
        """The job's page in the Ray dashboard."""
        return f"{self.address}/#/jobs/{self.named(submission_id)}"

    def named(self, submission_id: str) -> str:
        """What the cluster knows the submission by: other services may have jobs of the same id."""
        return f"{self._service_id}.{submission_id}"

    def _cluster(self) -> RayJobs:
        if self._jobs is None:
            self._jobs = RayJobs(self.address, self._token)
        return self._jobs

    def _reread(self) -> bool:
        """Read the token again; True where it is another. Raises LauncherError."""
        if self._token_file is None:
            return False
        try:
            token = self._token_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise LauncherError(
                f"THINWIRE_RAY_TOKEN_FILE={self._token_file} cannot be read ({error}): it holds the cluster's token, "
                "on the head in the file that `thinwire up --head` has named"
            ) from error
        if not token or not token.isascii() or not token.isprintable():
            raise LauncherError(f"THINWIRE_RAY_TOKEN_FILE={self._token_file} holds no token")
        if token == self._token:
            return False
        before, self._token = self._jobs, token
        self._jobs = RayJobs(self.address, token)
        if before is not None:
            before.close()
        return True
