"""A launcher in memory, for tests and for the development of clients. It runs nothing and posts nothing.

Two ways to drive it:

* scripted: `FakeLauncher()`; every submission stays PENDING until a test calls `put`, `lose` or sets `unreachable`;
* by time: `FakeLauncher(timeline=Timeline(pending_s=2, running_s=20))`, what `thinwire serve --launcher fake` uses:
  PENDING, RUNNING, SUCCEEDED, with a line of log at each. Such a job has a history only if somebody posts one.

Its submissions die with the process, so after a restart of the service it says ABSENT of all of them: the way a
cluster looks that was lost.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from thinwire.contract.places import Room
from thinwire.service.launch.protocol import (
    LOG_PART_BYTES,
    Code,
    Launcher,
    LauncherError,
    LaunchState,
    LaunchStatus,
    LogChunk,
    NoLog,
    decoded,
)


@dataclass(frozen=True, slots=True)
class Timeline:
    """How long a simulated run stays PENDING, then RUNNING; then it has SUCCEEDED."""

    pending_s: float = 2.0
    running_s: float = 20.0

    def at(self, age_s: float) -> LaunchState:
        """The state of a run submitted `age_s` seconds ago."""
        if age_s < self.pending_s:
            return LaunchState.PENDING
        return LaunchState.RUNNING if age_s < self.pending_s + self.running_s else LaunchState.SUCCEEDED


@dataclass(slots=True)
class Submission:
    """What `submit` was given, and what has become of it."""

    run_dir: Path
    attempt: int
    metadata: dict[str, str]
    submitted_at: float
    status: LaunchStatus = field(default_factory=lambda: LaunchStatus(LaunchState.PENDING))
    by_time: bool = False
    cancels: int = 0
    log: str = ""
    code: Code | None = None


_OVER = frozenset({LaunchState.SUCCEEDED, LaunchState.FAILED, LaunchState.STOPPED})


class FakeLauncher(Launcher):
    """A Launcher whose cluster is a dictionary.

    Attributes a test may set: `unreachable` (every status is UNKNOWN, every other call fails),
    `not_ready` (the reason that `ready` gives), `start_error` (what `start` raises),
    `ignore_cancel` (a cancel is counted and has no effect), `own_cluster`, `has_room` (what `room` says).
    """

    name = "fake"
    own_cluster = True

    def __init__(self, timeline: Timeline | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.unreachable = False
        self.not_ready: str | None = None
        self.start_error: str | None = None
        self.ignore_cancel = False
        self.has_room: Room | None = None
        self.starts = 0
        self.closes = 0
        self.submissions: dict[str, Submission] = {}
        self.resized: dict[str, tuple[int, int]] = {}
        self._timeline = timeline
        self._clock = clock
        self._lock = threading.Lock()

    # the script of a test

    def put(
        self, submission_id: str, state: LaunchState, message: str = "", *, waits_for: str = "", for_good: bool = False
    ) -> None:
        """Let the cluster say this of a submission from now on. Raises KeyError for one that is not known."""
        with self._lock:
            submission = self.submissions[submission_id]
            submission.status, submission.by_time = LaunchStatus(state, message, waits_for, for_good), False

    def write_log(self, submission_id: str, text: str) -> None:
        """Append to a submission's log. Raises KeyError for one that is not known."""
        with self._lock:
            self.submissions[submission_id].log += text

    def lose(self, submission_id: str) -> None:
        """Forget a submission, as a cluster does that was lost. Raises KeyError for one that is not known."""
        with self._lock:
            del self.submissions[submission_id]

    # the Launcher

    def start(self, service_id: str = "") -> None:
        """Nothing to bring up. Raises LauncherError where `start_error` is set."""
        self.starts += 1
        if self.start_error is not None:
            raise LauncherError(self.start_error)

    def close(self) -> None:
        """Nothing to end."""
        self.closes += 1

    def ready(self) -> str | None:
        """None, or `not_ready`."""
        return self.not_ready

    def submit(
        self, submission_id: str, run_dir: Path, attempt: int, metadata: Mapping[str, str], code: Code | None = None
    ) -> None:
        """Remember it as PENDING; a known id is a success. Raises LauncherError where `unreachable` is set."""
        self._reach()
        with self._lock:
            if submission_id not in self.submissions:
                self.submissions[submission_id] = Submission(
                    run_dir, attempt, dict(metadata), self._clock(), by_time=self._timeline is not None, code=code
                )

    def status(self, submission_id: str) -> LaunchStatus:
        """What the script or the timeline says."""
        if self.unreachable:
            return LaunchStatus(LaunchState.UNKNOWN, "the fake cluster does not answer")
        with self._lock:
            submission = self.submissions.get(submission_id)
            if submission is None:
                return LaunchStatus(LaunchState.ABSENT)
            self._advance(submission_id, submission)
            return submission.status

    def cancel(self, submission_id: str) -> None:
        """STOPPED, unless it is over or absent. Raises LauncherError where `unreachable` is set."""
        self._reach()
        with self._lock:
            submission = self.submissions.get(submission_id)
            if submission is None:
                return
            submission.cancels += 1
            self._advance(submission_id, submission)
            if submission.status.state not in _OVER and not self.ignore_cancel:
                submission.status, submission.by_time = LaunchStatus(LaunchState.STOPPED), False

    def resize(self, submission_id: str, least: int, most: int) -> None:
        """Noted in `resized`."""
        self.resized[submission_id] = (least, most)

    def room(self) -> Room | None:
        """`has_room`. Raises LauncherError where `unreachable` is set."""
        self._reach()
        return self.has_room

    def logs(self, submission_id: str, offset: int, limit: int = LOG_PART_BYTES) -> LogChunk:
        """The log from byte `offset` on. Raises NoLog for an unknown submission, LauncherError where unreachable."""
        self._reach()
        with self._lock:
            submission = self.submissions.get(submission_id)
            if submission is None:
                raise NoLog(f"the fake cluster has no submission {submission_id!r}")
            self._advance(submission_id, submission)
            return decoded(submission.log.encode()[offset : offset + limit], offset)

    def _reach(self) -> None:
        if self.unreachable:
            raise LauncherError("the fake cluster does not answer; try again when it is reachable")

    def _advance(self, submission_id: str, submission: Submission) -> None:
        """Bring a submission that is driven by time to where it is now, a line of log for each state."""
        if not submission.by_time or self._timeline is None:
            return
        state = self._timeline.at(self._clock() - submission.submitted_at)
        if state is not submission.status.state or not submission.log:
            submission.status = LaunchStatus(state)
            submission.log += f"fake submission={submission_id} state={state}\n"
