"""The service's side of a run that shares no folder with it (contract/remote_run.py).

What such a run leaves is kept in the run folder on the service's machine, where a run that shares it would write it.
"""

from __future__ import annotations

import hmac
import time
from pathlib import Path

from thinwire.contract.files import private_folder, write_whole
from thinwire.contract.jobs import JobState
from thinwire.contract.remote_run import LONGEST_LOG_BYTES, Claim, Claimed, KeptFile, LogKept, RunNow
from thinwire.contract.reports import Failure
from thinwire.service.auth import token_hash
from thinwire.service.db import Database
from thinwire.service.errors import (
    FileNotKept,
    Forbidden,
    JobOver,
    StaleAttempt,
    TooMuch,
    Unavailable,
)
from thinwire.service.jobs.job_folder import JobFolder, RunFolders
from thinwire.service.jobs.models import JobRow
from thinwire.service.jobs.rate import Rates
from thinwire.service.jobs.repository import JobRepository
from thinwire.service.jobs.views import job_json
from thinwire.service.jobs.worker_numbers import wanted_workers
from thinwire.service.packages.store import PackageGone, Packages
from thinwire.service.tickets import ticket_of

BURST_BYTES, BYTES_A_SECOND = 16 << 20, 1 << 20
"""What one job may leave of logs and files at once and in the long run."""


class RemoteRuns:
    """Methods may be called from any thread, and block."""

    def __init__(self, db: Database, folders: RunFolders, packages: Packages) -> None:
        self._db, self._folders, self._packages = db, folders, packages
        self._rates = Rates(BURST_BYTES, BYTES_A_SECOND)

    def claim(self, job_id: str, claim: Claim) -> Claimed:
        """Let the driver begin that shows the ticket; the same claimant may ask again.

        Raises: JobNotFound, JobOver, StaleAttempt; Forbidden where somebody else has used the ticket; Unavailable.
        """
        folder, claimant = self._folders.of(job_id), token_hash(claim.claimant)
        with self._db.write() as session:
            jobs = JobRepository(session)
            row = jobs.lock(job_id)
            state = JobState(row.state)
            if state.terminal or state is JobState.CANCELLING:
                raise JobOver(job_id, state, "its driver is not to begin")
            token = _token(folder, row)
            if row.ticket_hash != token_hash(ticket_of(token, row.attempt)):
                raise StaleAttempt(job_id, row.attempt - 1, row.attempt)
            if row.claimant_hash is None:
                jobs.set_ticket(job_id, row.ticket_hash, claimant)
            elif not hmac.compare_digest(row.claimant_hash, claimant):
                raise Forbidden(
                    f"the ticket of attempt {row.attempt} of job {job_id} was used by another process: if that was no "
                    "driver of yours, somebody reads your cluster's job list; cancel the job"
                )
            unique_name = f"{jobs.service_id()}.{job_id}"
            return Claimed(job=job_json(row), token=token, attempt=row.attempt, unique_name=unique_name)

    def now(self, job_id: str) -> RunNow:
        """What its processes have to know of the run. Raises JobNotFound."""
        with self._db.read() as session:
            row = JobRepository(session).found(job_id)
        return RunNow(
            attempt=row.attempt,
            wanted=wanted_workers(row),
            failure=Failure.model_validate(row.failure) if row.failure else None,
            succeeded=row.summary is not None,
        )

    def put_file(self, job_id: str, name: KeptFile, attempt: int, content: bytes) -> None:
        """Keep a file, in the place of the one before. Raises JobNotFound, StaleAttempt, TooMuch, Unavailable."""
        self._take(job_id, len(content))
        self._check(job_id, attempt)
        try:
            write_whole(private_folder(self._folders.of(job_id).path) / name, content)
        except OSError as error:
            raise Unavailable(f"{name} cannot be written on the service's machine: {error.strerror}") from error

    def get_file(self, job_id: str, name: KeptFile) -> bytes:
        """The file. Raises JobNotFound, FileNotKept, Unavailable."""
        with self._db.read() as session:
            JobRepository(session).found(job_id)
        try:
            return (self._folders.of(job_id).path / name).read_bytes()
        except FileNotFoundError:
            raise FileNotKept(job_id, name) from None
        except OSError as error:
            raise Unavailable(f"{name} cannot be read on the service's machine: {error.strerror}") from error

    def package(self, job_id: str) -> Path:
        """The zip of the job's script, whole. Raises JobNotFound, FileNotKept, Unavailable."""
        with self._db.read() as session:
            row = JobRepository(session).found(job_id)
        sha256 = row.spec.get("recipe", {}).get("package")
        if sha256 is None:
            raise FileNotKept(job_id, "package")
        try:
            return self._packages.whole(sha256)
        except PackageGone as error:
            raise Unavailable(str(error)) from error
        except OSError as error:
            raise Unavailable(f"the package {sha256} cannot be read: {error.strerror}") from error

    def add_log(self, job_id: str, attempt: int, offset: int, content: bytes) -> LogKept:
        """Add what comes from byte `offset` on; what is there already stays as it is.

        Nothing is added where something before it is missing: the answer says from where to send.
        Raises JobNotFound, StaleAttempt, TooMuch, Unavailable.
        """
        self._take(job_id, len(content))
        self._check(job_id, attempt)
        try:
            with self._folders.lock:
                size = self._folders.of(job_id).append_log(attempt, offset, content)
        except OSError as error:
            raise Unavailable(f"the log cannot be written on the service's machine: {error.strerror}") from error
        return LogKept(next_offset=size, full=size >= LONGEST_LOG_BYTES)

    def _take(self, job_id: str, size: int) -> None:
        wait_s = self._rates.take(job_id, max(size, 4096), time.monotonic())
        if wait_s:
            raise TooMuch(job_id, wait_s)

    def _check(self, job_id: str, attempt: int) -> None:
        with self._db.read() as session:
            row = JobRepository(session).found(job_id)
        if row.attempt != attempt:
            raise StaleAttempt(job_id, attempt, row.attempt)


def _token(folder: JobFolder, row: JobRow) -> str:
    """The job's token, out of its run folder. Raises Unavailable."""
    if not folder.complete(row.token_hash):
        raise Unavailable(f"the run folder of job {row.id} on the service's machine is not complete: try again")
    return folder.token.read_text(encoding="utf-8").strip()
