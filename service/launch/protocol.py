"""What the service asks of a launcher. Calls block; the service makes them off its event loop.

A launcher keeps no truth: the database does. It can be asked the same thing twice, and a second submit of one
submission id finds the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Protocol

LOG_PART_BYTES = 1 << 20


class LaunchState(StrEnum):
    """What the launcher's cluster says of a submission."""

    UNKNOWN = "UNKNOWN"
    """The cluster cannot be asked now, or its answer cannot be trusted yet. Change nothing."""
    ABSENT = "ABSENT"
    """The cluster has no such submission: it was never submitted, or was lost with its cluster."""
    PENDING = "PENDING"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    STOPPED = "STOPPED"


OF_RAY: Final = {state.value: state for state in LaunchState if state not in (LaunchState.UNKNOWN, LaunchState.ABSENT)}
"""By the status of a job in Ray's Jobs API, which KubeRay repeats."""


@dataclass(frozen=True, slots=True)
class LaunchStatus:
    """A submission's state and, where it failed, the cluster's words."""

    state: LaunchState
    message: str = ""
    waits_for: str = ""
    """Of PENDING and RUNNING: what keeps the cluster from giving it all the pods that it asks for."""
    for_good: bool = False
    """Of FAILED: a further attempt would fail alike."""
    put_back: bool = False
    """Of PENDING: no process of it runs any more, if one did; what comes is a new start of it. So it is where a queue
    takes a job's machines for others."""
    began: bool = True
    """Of FAILED: not where the cluster could not start its process; then message says why, in one or two lines."""


@dataclass(frozen=True, slots=True)
class LogChunk:
    """Log text from an offset in bytes, and the offset to go on from."""

    text: str
    next_offset: int


@dataclass(frozen=True, slots=True)
class Code:
    """A script of the user's own and what it needs: put on every machine of the cluster before the job runs there.

    package: a zip on this machine, with its sha256; else working_dir, a folder on all machines. No secrets.
    """

    package: Path | None
    sha256: str | None
    working_dir: str | None
    pip: tuple[str, ...]
    env_vars: Mapping[str, str]

    def environment(self) -> dict[str, Any]:
        """A runtime environment of Ray's with all of it but the package, which each launcher brings in its own way."""
        found: dict[str, Any] = {}
        if self.package is None and self.working_dir is not None:
            found["working_dir"] = f"local://{self.working_dir}"
        if self.pip:
            found["pip"] = list(self.pip)
        if self.env_vars:
            found["env_vars"] = dict(self.env_vars)
        return found


class LauncherError(Exception):
    """The launcher could not do it now; the message says what, why and what to do. Trying again may help."""


class NoLog(LauncherError):
    """The cluster has no log of this submission: it has not come there yet, or was lost."""


class Launcher(Protocol):
    """Starts, follows and ends the processes of jobs."""

    name: str
    own_cluster: bool
    """Is the cluster this service's alone: it sees the run folders, and ends with the service? Else its processes speak
    to the service over HTTP only, with what a ticket gives them, and go on without it."""

    def start(self, service_id: str = "") -> None:
        """Bring up, or find again, what the launcher needs (its cluster). Raises LauncherError.

        service_id: what tells this service's submissions from those of others in the same cluster.
        """

    def close(self) -> None:
        """End everything that `start` brought up. Safe to call twice."""

    def ready(self) -> str | None:
        """None when jobs can be submitted, else the reason they cannot."""

    def submit(
        self, submission_id: str, run_dir: Path, attempt: int, metadata: Mapping[str, str], code: Code | None = None
    ) -> None:
        """Start the job whose run folder this is. A known submission id is a success. Raises LauncherError.

        code: where the job runs a script. Its package is given to the cluster before each attempt: it may have lost it.
        """

    def status(self, submission_id: str) -> LaunchStatus:
        """What the cluster says of it. Never raises for a cluster that does not answer: that is UNKNOWN."""

    def cancel(self, submission_id: str) -> None:
        """Ask for its end. A submission that is over or absent is a success. Raises LauncherError."""

    def resize(self, submission_id: str, least: int, most: int) -> None:
        """Let the cluster have room for so many workers of this submission, where it grows and shrinks with its jobs.
        Called again and again, whether or not they have changed. Raises LauncherError.
        """

    def logs(self, submission_id: str, offset: int, limit: int = LOG_PART_BYTES) -> LogChunk:
        """Log text of up to `limit` bytes from byte `offset` on; empty where there is none yet. Raises LauncherError,
        NoLog. It costs memory for what it gives, not for the whole log.
        """

    def dashboard_url(self, submission_id: str) -> str | None:
        """A page where a person can watch it; None where there is none, or none any more. It asks nobody and waits for
        nothing: a request calls it.
        """
