"""The launcher of a single machine: jobs run under a Ray head that the server starts itself, as a child.

Kill the server and the head and its jobs go on; the next server of the same home finds them. If the head dies while
serving it is started again, empty: every job is then ABSENT, and the service submits it anew.
"""

from __future__ import annotations

import logging
import os
import shlex
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from thinwire.contract.places import Room
from thinwire.service.launch.protocol import (
    LOG_PART_BYTES,
    Code,
    Launcher,
    LauncherError,
    LaunchState,
    LaunchStatus,
    LogChunk,
    read_part,
)
from thinwire.service.launch.ray_head import Head, RayHead
from thinwire.service.launch.ray_jobs import RayJobs

_log = logging.getLogger(__name__)

WATCH_S: Final = 2.0
"""Between two looks at the head; the lease is touched each time."""
MAX_BACKOFF_S: Final = 60.0
_POLL_S: Final = 0.1

Command = Callable[[Path, int], list[str]]


def worker_command(run_dir: Path, attempt: int) -> list[str]:
    """The driver of a training job, under this very interpreter."""
    return [sys.executable, "-m", "thinwire.workers.main", "--run-dir", str(run_dir), "--attempt", str(attempt)]


class LocalLauncher(Launcher):
    """Jobs run under a Ray head of its own in `home`."""

    name = "local"
    own_cluster = True

    def __init__(
        self,
        home: Path,
        *,
        command: Command = worker_command,
        lease_s: float = 900.0,
        start_timeout_s: float = 180.0,
    ) -> None:
        """`command(run_dir, attempt)` is what a job runs. Without a server the head lives `lease_s` longer."""
        self._head = RayHead(home.resolve() / "ray", lease_s, start_timeout_s)
        self._command = command
        self._closing = threading.Event()
        self._lifecycle = threading.Lock()  # held by start and close; never by the calls of a request
        self._watcher: threading.Thread | None = None
        self._serving: tuple[Head, RayJobs] | None = None  # replaced as a whole, so readers need no lock
        self._trouble = "the launcher is not started"

    def start(self, service_id: str = "") -> None:
        """Find the living head of this home again, or start one. Takes seconds. Raises LauncherError."""
        with self._lifecycle:
            if self._watcher is not None:
                return
            self._closing.clear()
            self._head.acquire()
            try:
                self._serve(self._head.adopt_or_start(self._closing))
            except LauncherError:
                self._head.release()
                raise
            except BaseException:  # an interrupt: the caller will not come back to close what was begun
                try:
                    self._head.abort()
                finally:
                    self._head.release()
                raise
            self._watcher = threading.Thread(target=self._watch, name="ray-head-watch", daemon=True)
            self._watcher.start()

    def close(self) -> None:
        """End the head, its jobs and all their processes, and verify it. Raises LauncherError if some remain."""
        self._closing.set()  # first: a start that waits for a slow head gives up and ends it
        while not self._lifecycle.acquire(timeout=_POLL_S):
            self._head.ask_no_more()  # again: it may have begun to ask just now
        try:
            if self._watcher is None:
                return
            while self._watcher.is_alive():
                self._head.ask_no_more()
                self._watcher.join(_POLL_S)
            self._watcher = None
            try:
                self._stop_serving("the launcher is closed")
                self._head.end()
                _log.info("ray_head_ended")
            finally:
                self._head.release()
        finally:
            self._lifecycle.release()

    def ready(self) -> str | None:
        """None when jobs can be submitted, else the reason they cannot."""
        serving = self._serving
        if serving is None:
            return self._trouble
        head, jobs = serving
        if not head.alive():
            return f"the Ray head has ended and will be started again; see {self._head.log_path}"
        return jobs.unready()

    def submit(
        self, submission_id: str, run_dir: Path, attempt: int, metadata: Mapping[str, str], code: Code | None = None
    ) -> None:
        """Start the job of `run_dir` under our id; a known id is a success. Raises LauncherError."""
        entrypoint = shlex.join(self._command(run_dir.resolve(), attempt))
        self._jobs().submit(submission_id, entrypoint, metadata, code)

    def status(self, submission_id: str) -> LaunchStatus:
        """What Ray says of it; UNKNOWN while there is no head to ask."""
        serving = self._serving
        if serving is None:
            return LaunchStatus(LaunchState.UNKNOWN, self._trouble)
        return serving[1].status(submission_id)

    def cancel(self, submission_id: str) -> None:
        """Ask for its end: SIGTERM, then SIGKILL. Over or absent is a success. Raises LauncherError."""
        self._jobs().stop(submission_id)

    def room(self) -> Room | None:
        """What the head has; none but this service's jobs are there. Raises LauncherError."""
        return replace(self._jobs().room(), cores=os.cpu_count())

    def logs(self, submission_id: str, offset: int, limit: int = LOG_PART_BYTES) -> LogChunk:
        """The driver's output from byte `offset` on. Gone with its head. Raises LauncherError.

        Out of the file that Ray has it written to: Ray's own API gives a log as a whole, at every poll.
        """
        serving = self._serving
        if serving is None:
            raise LauncherError(self._trouble)
        path = serving[0].log_of(submission_id)
        try:
            return read_part(path, offset, limit)
        except OSError as error:
            raise LauncherError(f"the log {path} cannot be read: {error.strerror or error}") from error

    def dashboard_url(self, submission_id: str) -> str | None:
        """The job's page in the Ray dashboard; None where this head has not run it: pages go with their head."""
        serving = self._serving
        if serving is None or not serving[0].log_of(submission_id).exists():
            return None
        return f"{serving[0].url}/#/jobs/{submission_id}"

    def _jobs(self) -> RayJobs:
        serving = self._serving
        if serving is None:
            raise LauncherError(self._trouble)
        return serving[1]

    def _serve(self, head: Head) -> None:
        self._serving = (head, self._head.jobs(head))

    def _stop_serving(self, trouble: str) -> None:
        self._trouble = trouble
        serving, self._serving = self._serving, None
        if serving is not None:
            serving[1].close()

    def _watch(self) -> None:
        """Renew the lease and replace a dead head, until the launcher closes. The thread's body."""
        backoff_s = 1.0
        wait_s = WATCH_S
        while not self._closing.wait(wait_s):
            wait_s = WATCH_S
            try:
                self._head.touch()
                if (serving := self._serving) is not None:
                    if serving[0].alive():
                        continue
                    self._stop_serving(f"the Ray head has ended and is being started again; see {self._head.log_path}")
                    _log.error("ray_head_lost keeper_pid=%d", serving[0].pid)
                self._serve(self._head.adopt_or_start(self._closing))
                backoff_s = 1.0
            except (LauncherError, OSError) as error:  # a full disk, no more processes: it may pass
                self._trouble = f"the Ray head has ended, and to start it again failed and is tried again: {error}"
                _log.error("ray_head_restart_failed next_in_s=%g error=%s", backoff_s, error)
                wait_s, backoff_s = backoff_s, min(2 * backoff_s, MAX_BACKOFF_S)
