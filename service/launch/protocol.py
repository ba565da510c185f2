"""What the service asks of a launcher, and how it starts one. Calls block; the service makes them off its event loop.

A launcher keeps no truth: the database does. It can be asked the same thing twice, and a second submit of one
submission id finds the first.
"""

from __future__ import annotations

import codecs
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from thinwire.contract.files import open_plain
from thinwire.contract.places import Room
from thinwire.contract.script import runtime_environment

logger = logging.getLogger(__name__)

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

    def environment(self) -> dict[str, object]:
        """A runtime environment of Ray's with all of it but the package, which each launcher brings in its own way."""
        working_dir = self.working_dir if self.package is None else None
        return runtime_environment(working_dir, self.pip, self.env_vars)


def read_part(path: Path, offset: int, limit: int) -> LogChunk:
    """Up to `limit` bytes of a log file from `offset` on, at the cost of these alone.

    Empty where there is no file, or none beyond. Raises OSError.
    """
    try:
        with open_plain(path) as file:
            file.seek(offset)
            return decoded(file.read(limit), offset)
    except FileNotFoundError:
        return LogChunk("", offset)


def decoded(data: bytes, offset: int) -> LogChunk:
    """These bytes, which begin at `offset`, as text: a character that they cut off is left for the next part.

    What is not UTF-8 becomes U+FFFD.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(data)
    return LogChunk(text, offset + len(data) - len(decoder.getstate()[0]))


class LauncherError(Exception):
    """The launcher could not do it now; the message says what, why and what to do. Trying again may help."""


class NoLog(LauncherError):
    """The cluster has no log of this submission: it has not come there yet, or was lost."""


class Launcher(ABC):
    """Starts, follows and ends the processes of jobs. Threads may share it."""

    name: str
    own_cluster: bool
    """Is the cluster this service's alone: it sees the run folders, and ends with the service? Else its processes speak
    to the service over HTTP only, with what a ticket gives them, and go on without it."""

    @abstractmethod
    def start(self, service_id: str = "") -> None:
        """Bring up, or find again, what the launcher needs (its cluster). Raises LauncherError.

        service_id: what tells this service's submissions from those of others in the same cluster.
        """

    @abstractmethod
    def close(self) -> None:
        """End everything that `start` brought up. Safe to call twice."""

    @abstractmethod
    def ready(self) -> str | None:
        """None when jobs can be submitted, else the reason they cannot."""

    @abstractmethod
    def submit(
        self, submission_id: str, run_dir: Path, attempt: int, metadata: Mapping[str, str], code: Code | None = None
    ) -> None:
        """Start the job whose run folder this is. A known submission id is a success. Raises LauncherError.

        code: where the job runs a script. Its package is given to the cluster before each attempt: it may have lost it.
        """

    @abstractmethod
    def status(self, submission_id: str) -> LaunchStatus:
        """What the cluster says of it. Never raises for a cluster that does not answer: that is UNKNOWN."""

    @abstractmethod
    def cancel(self, submission_id: str) -> None:
        """Ask for its end. A submission that is over or absent is a success. Raises LauncherError."""

    def resize(self, submission_id: str, least: int, most: int) -> None:
        """Let the cluster have room for so many workers of this submission, where it grows and shrinks with its jobs.
        Called again and again, whether or not they have changed. Raises LauncherError. By default it does nothing.
        """
        return None

    def room(self) -> Room | None:
        """What the cluster has for workers, so that a job is started where all of workers.min fit, and waits in the
        service's queue where not. None, the default: its machines come with the job, or when it asks for them.
        Raises LauncherError where that cannot be said now.
        """
        return None

    @abstractmethod
    def logs(self, submission_id: str, offset: int, limit: int = LOG_PART_BYTES) -> LogChunk:
        """Log text of up to `limit` bytes from byte `offset` on; empty where there is none yet. Raises LauncherError,
        NoLog. It costs memory for what it gives, not for the whole log.
        """

    def dashboard_url(self, submission_id: str) -> str | None:
        """A page where a person can watch it; None where there is none, or none any more. It asks nobody and waits for
        nothing: a request calls it.
        """
        return None


class LauncherStarter:
    """Calls `launcher.start` in a thread until it has worked, `retry_s` seconds apart, and keeps what it said last.

    Requests never ask a launcher: one that hangs would hold every thread that serves them. The reconciler looks in each
    of its turns, in a thread of its own, and requests are answered from what it found.
    service_id: asked for then: it is in the database.
    silent_s: a launcher that has not answered for so long counts as one that cannot be used.
    """

    def __init__(
        self, launcher: Launcher, service_id: Callable[[], str] = str, *, silent_s: float, retry_s: float = 5.0
    ) -> None:
        self._launcher = launcher
        self._service_id = service_id
        self._silent_s = silent_s
        self._retry_s = retry_s
        self._stop = threading.Event()
        self._waiting: str | None = "it is starting"
        self._last: tuple[float, str | None] | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin; returns at once."""
        self._thread = threading.Thread(target=self._loop, name="thinwire-launcher", daemon=True)
        self._thread.start()

    def look(self) -> str | None:
        """Ask the launcher, and keep what it says. None when jobs can be submitted, else why not. Blocks as it does."""
        if self._waiting is not None:
            return self._waiting
        said = self._launcher.ready()
        self._last = (time.monotonic(), said)
        return said

    def reason(self) -> str | None:
        """None when jobs can be submitted, else why not, as of the last look. It waits for nothing."""
        if self._waiting is not None or self._last is None:
            return self._waiting
        answered, said = self._last
        age_s = time.monotonic() - answered
        if age_s <= self._silent_s:
            return said
        return f"it has not answered for {age_s:.0f} s" + (f"; before that: {said}" if said is not None else "")

    def age_s(self) -> float | None:
        """Seconds since the launcher last answered; None where it has not been started."""
        return None if self._last is None else time.monotonic() - self._last[0]

    def close(self, timeout_s: float = 60.0) -> None:
        """Close the launcher, and whatever a start that is under way brings up. Safe to call twice.

        Raises: LauncherError, where the launcher could not end everything.
        """
        self._stop.set()
        self._waiting = "the service is ending"
        self._launcher.close()  # makes a slow start give up
        if self._thread is not None and self._thread.is_alive():
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                logger.warning("launcher_still_starting timeout_s=%g", timeout_s)
            self._launcher.close()  # a start that began just as the first close ended

    def _loop(self) -> None:
        while not self._stop.is_set():
            try:
                self._launcher.start(self._service_id())
            except LauncherError as error:
                logger.warning(
                    "launcher_start_failed name=%s retry_s=%g error=%s", self._launcher.name, self._retry_s, error
                )
                why = str(error)
            except Exception as error:
                logger.exception("launcher_start_failed name=%s retry_s=%g", self._launcher.name, self._retry_s)
                why = f"{type(error).__name__}: {error}"
            else:
                logger.info("launcher_started name=%s", self._launcher.name)
                self._last = (time.monotonic(), None)
                if not self._stop.is_set():
                    self._waiting = None
                return
            if not self._stop.is_set():
                self._waiting = why
            self._stop.wait(self._retry_s)
