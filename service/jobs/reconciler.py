"""Brings what runs and what the database believes together, again and again, in a thread of its own.

A turn reads the jobs that are not over, asks the launcher about each, decides (thinwire.service.jobs.decide) and
applies. No network call is made inside a transaction; a job that has moved between the reading and the applying is
left to the next turn.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from sqlalchemy.exc import OperationalError
from sqlalchemy.orm.exc import StaleDataError

from thinwire.contract.jobs import JobState
from thinwire.contract.reports import Failure
from thinwire.service.auth import new_token, token_hash
from thinwire.service.db import Database
from thinwire.service.errors import NotOwner
from thinwire.service.jobs.decide import (
    Action,
    Cancel,
    Fail,
    JobView,
    Retry,
    Run,
    StopRun,
    Submit,
    Succeed,
    Wait,
    decide,
)
from thinwire.service.jobs.models import JobRow
from thinwire.service.jobs.repository import JobRepository, transition
from thinwire.service.jobs.run_folder import RunFolders
from thinwire.service.jobs.views import job_json, submission_id
from thinwire.service.jobs.worker_numbers import wanted_workers, write_wanted
from thinwire.service.launch.protocol import Launcher, LauncherError, LaunchState, LaunchStatus

logger = logging.getLogger(__name__)


class Moved(Exception):
    """The job has changed since it was read; the next turn sees it as it is now."""


class Reconciler:
    """Follows every job to its end.

    launcher_reason: None when the launcher can be used, else why not. clock: unix seconds.
    confirm_owner: raises NotOwner where another service owns the database.
    observe_turn: told the seconds that each turn took. prune: deletes what need not be kept; called in each turn.
    """

    def __init__(
        self,
        db: Database,
        launcher: Launcher,
        folders: RunFolders,
        *,
        launcher_reason: Callable[[], str | None],
        confirm_owner: Callable[[], None],
        clock: Callable[[], float],
        interval_s: float,
        observe_turn: Callable[[float], None] = lambda seconds: None,
        prune: Callable[[], None] = lambda: None,
    ) -> None:
        self._db = db
        self._launcher = launcher
        self._folders = folders
        self._launcher_reason = launcher_reason
        self._confirm_owner = confirm_owner
        self._clock = clock
        self._interval_s = interval_s
        self._observe_turn = observe_turn
        self._prune = prune
        self._absent: dict[str, int] = {}
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to turn, in a thread."""
        self._thread = threading.Thread(target=self._loop, name="thinwire-reconciler", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Turn soon: something has changed."""
        self._wake.set()

    def stop(self) -> None:
        """Let the thread end, without waiting for it."""
        self._stop.set()
        self._wake.set()

    def close(self, timeout_s: float = 30.0) -> None:
        """End the thread after the turn it is in. Safe to call twice."""
        self.stop()
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                logger.warning("reconciler_still_busy timeout_s=%g", timeout_s)

    def turn(self) -> None:
        """One pass over every job that is not over. An error with one job does not keep the others waiting.

        Raises: NotOwner where another service owns the database.
        """
        self._confirm_owner()
        self._drop_expired_leases()
        with self._db.read() as session:
            rows = JobRepository(session).unfinished()
        self._absent = {row.id: self._absent[row.id] for row in rows if row.id in self._absent}
        unready = self._launcher_reason() if rows else None
        for row in rows:
            if self._stop.is_set():
                return
            try:
                self._settle(row, unready)
            except (Moved, StaleDataError):
                logger.debug("job_moved job_id=%s", row.id)
            except NotOwner:
                raise
            except Exception:
                logger.exception("reconcile_failed job_id=%s", row.id)
        self._prune()

    def _loop(self) -> None:
        while not self._stop.is_set():
            self._wake.clear()
            began = time.monotonic()
            try:
                self.turn()
            except NotOwner as error:
                logger.warning("reconcile_refused error=%s", error)
            except OperationalError:
                logger.exception("reconcile_failed where=database")
            except Exception:
                logger.exception("reconcile_failed where=turn")
            self._observe_turn(time.monotonic() - began)
            self._wake.wait(self._interval_s)

    def _settle(self, row: JobRow, unready: str | None) -> None:
        self._keep_wanted(row)
        if unready is not None:
            if row.state == JobState.SUBMITTING.value:
                self._explain_waiting(row, unready)
            return
        status = self._status(row)
        action = decide(self._view(row, status), status)
        self._count_absent(row, status)
        self._apply(row, action)

    def _keep_wanted(self, row: JobRow) -> None:
        """Write workers.json where a request could not, or where it is of before the job's row."""
        if self._folders.of(row.id).read_wanted() == wanted_workers(row):
            return
        try:
            write_wanted(self._db, self._folders, row.id)
        except OSError:
            logger.exception("wanted_workers_not_written job_id=%s", row.id)

    def _status(self, row: JobRow) -> LaunchStatus:
        if row.state == JobState.SUBMITTING.value:
            return LaunchStatus(LaunchState.UNKNOWN)  # decide() does not look at it
        return self._launcher.status(submission_id(row.id, row.attempt))

    def _view(self, row: JobRow, status: LaunchStatus) -> JobView:
        """The row with what the run has left: what it posted, else what is in its folder."""
        summary, failure = row.summary, Failure.model_validate(row.failure) if row.failure else None
        if status.state not in (LaunchState.UNKNOWN, LaunchState.PENDING, LaunchState.RUNNING):
            folder = self._folders.of(row.id)
            summary = summary if summary is not None else folder.read_summary()
            failure = failure if failure is not None else folder.read_failure()
        return JobView(
            id=row.id,
            state=JobState(row.state),
            attempt=row.attempt,
            max_attempts=row.max_attempts,
            max_restarts=int(row.spec["workers"]["max_restarts"]),
            version=row.version,
            absent_polls=self._absent.get(row.id, 0),
            summary=summary,
            failure=failure,
        )

    def _count_absent(self, row: JobRow, status: LaunchStatus) -> None:
        if status.state is LaunchState.ABSENT:
            self._absent[row.id] = self._absent.get(row.id, 0) + 1
        else:
            self._absent.pop(row.id, None)

    def _apply(self, row: JobRow, action: Action) -> None:
        match action:
            case Wait():
                return
            case Submit():
                self._submit(row)
            case Run():
                self._move(row, JobState.RUNNING)
            case Retry(reason):
                self._absent.pop(row.id, None)
                self._move(row, JobState.SUBMITTING, reason, next_attempt=row.attempt + 1)
                self._wake.set()
            case Succeed(summary):
                self._move(row, JobState.SUCCEEDED, summary=summary)
            case Fail(reason):
                self._move(row, JobState.FAILED, reason)
            case StopRun():
                self._stop_run(row)
            case Cancel():
                self._move(row, JobState.CANCELLED)

    def _submit(self, row: JobRow) -> None:
        with self._folders.lock:
            self._complete_folder(row)
        write_wanted(self._db, self._folders, row.id)  # where the disk refuses, the job waits: it would start as it was
        metadata = {"job_id": row.id, "job_name": row.name, "attempt": str(row.attempt)}
        submission = submission_id(row.id, row.attempt)
        self._confirm_owner()
        try:
            self._launcher.submit(submission, self._folders.of(row.id).path, row.attempt, metadata)
        except LauncherError as error:
            logger.warning("submit_failed job_id=%s submission_id=%s error=%s", row.id, submission, error)
            self._explain_waiting(row, str(error))
            return
        logger.info("job_submitted job_id=%s submission_id=%s", row.id, submission)
        self._move(row, JobState.PENDING)

    def _complete_folder(self, row: JobRow) -> None:
        """Write the run folder where a request could not. Only the hash of its token is known: mint another."""
        with self._db.read() as session:
            now = JobRepository(session).get(row.id)
        folder = self._folders.of(row.id)
        if now is None or folder.complete(now.token_hash):
            return
        token = new_token()
        with self._db.write() as session:
            JobRepository(session).set_token_hash(row.id, token_hash(token))
        folder.write(job_json(row), wanted_workers(now), token, self._folders.service_url)
        logger.info("run_folder_completed job_id=%s", row.id)

    def _stop_run(self, row: JobRow) -> None:
        self._confirm_owner()
        try:
            self._launcher.cancel(submission_id(row.id, row.attempt))
        except LauncherError as error:
            logger.warning("cancel_failed job_id=%s error=%s", row.id, error)

    def _explain_waiting(self, row: JobRow, why: str) -> None:
        reason = f"waiting for the launcher: {why}"
        if row.reason == reason:
            return
        with self._db.write() as session:
            self._unmoved(JobRepository(session).lock(row.id), row).reason = reason

    def _move(
        self,
        row: JobRow,
        to: JobState,
        reason: str | None = None,
        *,
        next_attempt: int | None = None,
        summary: dict[str, object] | None = None,
    ) -> None:
        with self._db.write() as session:
            jobs = JobRepository(session)
            current = self._unmoved(jobs.lock(row.id), row)
            if next_attempt is not None:
                current.attempt = next_attempt
                current.failure = None
                jobs.drop_leases(row.id)
            if summary is not None:
                current.summary = summary
            transition(session, current, to, self._clock(), reason)
        logger.info("job_moved job_id=%s from=%s to=%s attempt=%d", row.id, row.state, to, next_attempt or row.attempt)

    @staticmethod
    def _unmoved(current: JobRow | None, seen: JobRow) -> JobRow:
        if current is None or current.version != seen.version:
            raise Moved
        return current

    def _drop_expired_leases(self) -> None:
        now = self._clock()
        with self._db.read() as session:
            expired = JobRepository(session).has_expired_leases(now)
        if expired:
            with self._db.write() as session:
                JobRepository(session).drop_expired_leases(now)
