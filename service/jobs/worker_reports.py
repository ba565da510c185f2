"""What a running job says and asks: its workers' leases, its telemetry, what Prometheus may know of them; and the
driver, files and log of a run that shares no folder with the service (contract/remote_run.py).

A job may name its worker's own address for Prometheus, from where the registration came, with a port that workers use.
Prometheus asks whatever it is given, from inside of the cluster's network: who could name any address would read
through it what they cannot reach themselves.
Every report names its attempt. One from another attempt than the current is refused, so that a process which
outlives its cluster cannot write over the run that has replaced it.
What a run leaves is kept in the run folder on the service's machine, where a run that shares it would write it.
"""

from __future__ import annotations

import hmac
import json
import logging
import re
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Row

from thinwire.contract.files import NotPlain, read_plain, write_whole
from thinwire.contract.jobs import JobState, Problem, TargetGroup
from thinwire.contract.metric_names import MOST_SCRAPED
from thinwire.contract.redaction import redacted
from thinwire.contract.remote_run import (
    LARGEST_FILE_BYTES,
    LONGEST_LOG_BYTES,
    Claim,
    Claimed,
    KeptFile,
    LogKept,
    RunNow,
)
from thinwire.contract.reports import (
    HEARTBEAT_S,
    SCRAPE_PORTS,
    Event,
    EventKind,
    Failure,
    Sample,
    Telemetry,
    WorkerRegistration,
    wrong_with_reported,
)
from thinwire.contract.spec import LARGEST_STEP
from thinwire.service.auth import token_hash
from thinwire.service.db import Database
from thinwire.service.errors import (
    FileNotKept,
    Forbidden,
    InvalidRequest,
    JobFull,
    JobOver,
    StaleAttempt,
    TooMuch,
    Unavailable,
)
from thinwire.service.jobs.job_folder import JobFolder, RunFolders
from thinwire.service.jobs.kept import KeptOfPeople
from thinwire.service.jobs.pace import Pace
from thinwire.service.jobs.rate import Rates
from thinwire.service.jobs.repository import JobRepository, JobRow, Standing, last_step, transition
from thinwire.service.jobs.views import job_json
from thinwire.service.jobs.worker_numbers import is_newer, limits_now, newest_membership, refuse_invented
from thinwire.service.launch.driver import ticket_of
from thinwire.service.packages.store import PackageGone, Packages
from thinwire.service.people.quotas import kept_limits, kept_of

logger = logging.getLogger(__name__)

Network = IPv4Network | IPv6Network
LARGEST_PID = 2**31 - 1
LARGEST_FIELDS = 16 << 10
"""Characters of an event's fields, as JSON."""
LARGEST_SUMMARY = 256 << 10
BURST_BYTES, BYTES_A_SECOND = 64 << 20, 1 << 20
"""What one job or person may send at once and in the long run. A job posts a few hundred bytes a step."""

_HOST_PORT = re.compile(r"(?:(?P<name>[A-Za-z0-9_][A-Za-z0-9._-]*)|\[(?P<six>[0-9A-Fa-f:.]+)\]):(?P<port>[0-9]{1,5})\Z")


Reported = TypeVar("Reported", JobRow, Standing)


class WorkerReports:
    """The workers' side of the jobs domain. Methods may be called from any thread.

    lease_s: how long a registration holds; one that is to be renewed more seldom than after HEARTBEAT_S holds longer by
    as much. pace: how often they report. clock: unix seconds. networks: whose addresses may be registered too.
    grace_s: how long after its end a job may say what is missing. job_bytes, person_bytes: how much is kept of the
    samples, events and logs of a job, and of all jobs of a person.
    """

    def __init__(
        self,
        db: Database,
        folders: RunFolders,
        packages: Packages,
        *,
        lease_s: float,
        clock: Callable[[], float],
        networks: Sequence[Network] = (),
        pace: Pace | None = None,
        grace_s: float,
        job_bytes: int,
        person_bytes: int,
    ) -> None:
        self._db, self._folders, self._packages = db, folders, packages
        self._lease_s = lease_s
        self._clock = clock
        self._networks = networks
        self._pace = pace or Pace()
        self._grace_s, self._job_bytes, self._person_bytes = grace_s, job_bytes, person_bytes
        self._kept = KeptOfPeople()
        self._rates = Rates(BURST_BYTES, BYTES_A_SECOND)
        # Who leads, by job: not in the database, for each says so again within a heartbeat.
        self._leads: dict[str, int] = {}
        self._lock = threading.Lock()

    def register(self, job_id: str, rank: int, worker: WorkerRegistration, came_from: str) -> float:
        """Make or renew a worker's lease; seconds until it is to be renewed. came_from: the sender's address.

        Raises JobNotFound, JobOver, StaleAttempt, InvalidRequest.
        """
        wrong = refused(worker.address, came_from, self._networks)
        if wrong is not None:
            raise InvalidRequest.at("address", worker.address, wrong)
        if worker.pid > LARGEST_PID:
            raise InvalidRequest.at("pid", str(worker.pid), f"must be at most {LARGEST_PID}")
        with self._db.write() as session:
            row = self._current(JobRepository(session).lock_standing(job_id), worker.attempt)
            if JobState(row.state).terminal:
                raise JobOver(job_id, JobState(row.state), "its workers are no longer registered")
            if not self._pace.knows(job_id, rank):
                refuse_invented(session, job_id, rank, self._clock())
            next_s = self._pace.registered(job_id, rank)
            said = worker.model_dump(exclude={"leads"})
            expires_at = self._clock() + self._lease_s + next_s - HEARTBEAT_S
            lease = {"job_id": job_id, "rank": rank, "expires_at": expires_at}
            JobRepository(session).put_lease(lease | said)
        if worker.leads:
            with self._lock:
                self._leads[job_id] = rank
        return next_s

    def leave(self, job_id: str, rank: int, attempt: int | None = None) -> None:
        """End a worker's lease, only that of `attempt` where it is given; none is fine. Raises JobNotFound."""
        with self._db.write() as session:
            jobs = JobRepository(session)
            jobs.found(job_id)
            jobs.drop_lease(job_id, rank, attempt)

    def post(self, job_id: str, telemetry: Telemetry) -> float:
        """Store a batch; the same batch again changes nothing. Returns seconds until the next one.

        A batch that arrives soon after the job's end is stored too: it is the end of its history. A summary that is
        there by then stays. Raises JobNotFound, JobOver, StaleAttempt, InvalidRequest; JobFull where no more
        samples and events are kept: all else of the batch is stored.
        """
        _refuse_unbounded(telemetry)
        samples, events = telemetry.samples, telemetry.events
        full, added = None, 0
        with self._db.write() as session:
            jobs = JobRepository(session)
            row = self._current(jobs.lock(job_id), telemetry.attempt)
            now = self._clock()
            progress = _progress(row, telemetry.attempt, samples, now)
            if membership := newest_membership(row, telemetry.attempt, events, now):
                progress["newest_membership"] = membership
            state = JobState(row.state)
            if telemetry.summary is not None and not (state.terminal and row.summary is not None):
                row.summary = telemetry.summary
            if telemetry.failure is not None and not state.terminal:
                row.failure = telemetry.failure.model_dump(mode="json")
            if samples and state in (JobState.SUBMITTING, JobState.PENDING):
                transition(session, row, JobState.RUNNING, self._clock())
            if samples or events:
                room, full = self._room(jobs, row)
                if full is None:
                    by_step = {sample.step: sample.model_dump(mode="json") for sample in samples}
                    added = jobs.put_samples(job_id, telemetry.attempt, by_step, replace=not state.terminal)
                    added += jobs.put_events(
                        job_id, telemetry.attempt, [event.model_dump(mode="json") for event in events]
                    )
                    progress["kept_bytes"] = row.kept_bytes + added
                    if added >= room:
                        fields = {"kept_bytes": row.kept_bytes + added}
                        last = {"kind": EventKind.HISTORY_FULL.value, "step": last_step(row), "time": self._clock()}
                        jobs.put_events(job_id, row.attempt, [{**last, "fields": fields}])
            if told := [progress[name] for name in ("newest_sample", "newest_membership") if name in progress]:
                number = jobs.next_numbers(1)
                for one in told:
                    one["number"] = number
            if progress:
                session.flush()
                jobs.note_plain(job_id, progress)
        self._count(row, added)
        if full is not None:
            raise JobFull(
                f"no more samples and events of job {job_id} are kept here: {full}. Its run folder has them, and it "
                "goes on"
            )
        return self._pace.reported(job_id)

    def targets(self, project: str | None) -> list[TargetGroup]:
        """The workers that can be scraped now, as Prometheus HTTP service discovery wants it; of one project, or all.

        Of each job at most MOST_SCRAPED: the one that leads, and the first of the others.
        """
        with self._db.read() as session:
            leases = self._scraped(JobRepository(session).live_leases(self._clock(), project))
        # Labels that begin with __meta_ are dropped after relabelling, so they never clash with the metrics' own.
        return [
            TargetGroup(
                targets=[lease.address],
                labels={
                    "__meta_thinwire_job_id": lease.job_id,
                    "__meta_thinwire_rank": str(lease.rank),
                    "__meta_thinwire_node": lease.node,
                    "__meta_thinwire_attempt": str(lease.attempt),
                },
            )
            for lease in leases
        ]

    # a run that shares no folder with the service

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
                jobs.note([job_id], claimant_hash=claimant)
            elif not hmac.compare_digest(row.claimant_hash, claimant):
                raise Forbidden(
                    f"the ticket of attempt {row.attempt} of job {job_id} was used by another process: if that was no "
                    "driver of yours, somebody reads your cluster's job list; cancel the job"
                )
            unique_name = f"{jobs.service_id()}.{job_id}"
            job = job_json(row, self._folders.told_to(job_id))
            return Claimed(job=job, token=token, attempt=row.attempt, unique_name=unique_name)

    def now(self, job_id: str) -> RunNow:
        """What its processes have to know of the run. Raises JobNotFound."""
        with self._db.read() as session:
            row = JobRepository(session).found(job_id)
        return RunNow(
            attempt=row.attempt,
            wanted=limits_now(row),
            failure=Failure.model_validate(row.failure) if row.failure else None,
            succeeded=row.summary is not None,
        )

    def put_file(self, job_id: str, name: KeptFile, attempt: int, content: bytes) -> None:
        """Keep a file, in the place of the one before; after the job's end none that is there is replaced.

        Raises JobNotFound, JobOver, StaleAttempt, Unavailable.
        """
        state, path = JobState(self._check(job_id, attempt)[0].state), self._folders.of(job_id).path / name
        if state.terminal and path.exists():
            raise JobOver(job_id, state, f"its {name} is no longer replaced")
        try:
            write_whole(path, content)
        except OSError as error:
            raise Unavailable(f"{name} cannot be written on the service's machine: {error.strerror}") from error

    def get_file(self, job_id: str, name: KeptFile) -> bytes:
        """The file, a text without secrets. Raises JobNotFound, FileNotKept, Unavailable."""
        with self._db.read() as session:
            JobRepository(session).found(job_id)
        try:
            content = read_plain(self._folders.of(job_id).path / name, LARGEST_FILE_BYTES)
            return redacted(content.decode("utf-8", "replace")).encode() if name.endswith(".json") else content
        except (FileNotFoundError, NotPlain):
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
        Raises JobNotFound, JobOver, StaleAttempt, Unavailable.
        """
        row, room = self._check(job_id, attempt)
        try:
            with self._folders.lock:
                size, added = self._folders.of(job_id).append_log(attempt, offset, content, room)
        except OSError as error:
            raise Unavailable(f"the log cannot be written on the service's machine: {error.strerror}") from error
        if added:
            with self._db.write() as session:
                JobRepository(session).keep_more(job_id, added)
            self._count(row, added)
        return LogKept(next_offset=size, full=size >= LONGEST_LOG_BYTES or added >= room)

    def charge(self, who: str, size: int) -> None:
        """Count these bytes against what a sender may send, before they are read. Raises TooMuch.

        who: the sender in words: a job, its ticket, or a person's token.
        """
        wait_s = self._rates.take(who, size, time.monotonic())
        if wait_s:
            raise TooMuch(f"{who} sends more than one sender may", wait_s)

    def room(self, job_id: str) -> int:
        """How many bytes more are kept of the job. Raises JobNotFound."""
        with self._db.read() as session:
            jobs = JobRepository(session)
            return self._room(jobs, jobs.found(job_id))[0]

    def _check(self, job_id: str, attempt: int) -> tuple[JobRow, int]:
        """The job, and how many bytes more are kept of it. Raises JobNotFound, JobOver, StaleAttempt."""
        with self._db.read() as session:
            row = self._current(JobRepository(session).found(job_id), attempt)
            return row, self._room(JobRepository(session), row)[0]

    def _current(self, row: Reported, attempt: int) -> Reported:
        """The row, where a report of this attempt may still come. Raises JobOver, StaleAttempt."""
        if row.attempt != attempt:
            raise StaleAttempt(row.id, attempt, row.attempt)
        if row.finished_at is not None and self._clock() > row.finished_at + self._grace_s:
            raise JobOver(row.id, JobState(row.state), f"it takes no report {self._grace_s:g} s after its end")
        return row

    def _room(self, jobs: JobRepository, row: JobRow) -> tuple[int, str | None]:
        """How many bytes more are kept of the job; None, or why none are."""
        of_job = self._job_bytes - row.kept_bytes
        if of_job <= 0:
            kept = f"{row.kept_bytes} bytes of it are kept"
            return 0, f"{kept}, at most {self._job_bytes} of one job (THINWIRE_JOB_MAX_BYTES)"
        if row.submitted_by is None:  # of a version that did not note it
            return of_job, None
        of_person = self._kept.room(row.submitted_by, self._person_bytes, jobs.kept_of)
        if of_person <= 0:
            most = f"at most {self._person_bytes} bytes of all jobs of {row.submitted_by} (THINWIRE_PERSON_MAX_BYTES)"
            return 0, f"{most}; `thinwire delete` those that are not needed"
        left = min(of_job, of_person)
        for whose, who, limit in kept_limits(jobs.session, row):
            size = self._kept.room(_key(row, who), limit, partial(_kept_of, jobs, row, who))
            if size <= 0:
                return 0, f"at most {limit} bytes of {whose} (kept_bytes); `thinwire delete` jobs that are not needed"
            left = min(left, size)
        return left, None

    def _count(self, row: JobRow, size: int) -> None:
        """So many bytes more are kept of the job, and committed."""
        for key in (row.submitted_by, _key(row, None), _key(row, row.submitted_by)):
            self._kept.add(key, size)

    def _scraped(self, leases: Sequence[Row[Any]]) -> list[Row[Any]]:
        of_job: dict[str, list[Row[Any]]] = {}
        for lease in leases:
            of_job.setdefault(lease.job_id, []).append(lease)
        with self._lock:
            self._leads = {job: rank for job, rank in self._leads.items() if job in of_job}
            leads = dict(self._leads)
        found = []
        for job, own in of_job.items():
            own.sort(key=lambda lease: (lease.rank != leads.get(job), lease.rank))
            found += sorted(own[:MOST_SCRAPED], key=lambda lease: lease.rank)
        return found


def _kept_of(jobs: JobRepository, row: JobRow, who: str | None, _: str) -> int:
    """What such a sum is."""
    return kept_of(jobs.session, row.project, who)


def _key(row: JobRow, who: str | None) -> str:
    """Of a sum over its project, or over this person's jobs there; no name of a person has a slash."""
    return f"{row.project}/{who or ''}"


def _progress(row: JobRow, attempt: int, samples: list[Sample], now: float) -> dict[str, Any]:
    """The changes of newest_sample and newest_validation: the newest by attempt, time and step, and when it came."""
    changes: dict[str, Any] = {}
    validated = [sample for sample in samples if sample.validation_loss is not None]
    for column, candidates in (("newest_sample", samples), ("newest_validation", validated)):
        if not candidates:
            continue
        newest = max(candidates, key=lambda sample: (sample.time, sample.step))
        known = getattr(row, column)
        if known is not None and JobState(row.state).terminal and newest.step <= known["sample"]["step"]:
            continue  # it is over: nothing is replaced
        before = known and (known["attempt"], known["sample"]["step"], known["sample"]["time"])
        if before is None or is_newer(before, (attempt, newest.step, newest.time), now):
            changes[column] = {"attempt": attempt, "at": now, "sample": newest.model_dump(mode="json")}
    return changes


def _refuse_unbounded(telemetry: Telemetry) -> None:
    """A step that the database cannot hold, what is too large to be kept, an event that is the service's own.

    Numbers that are not finite have not come so far: the models refuse them, or have made them none.
    Raises InvalidRequest.
    """
    problems: list[Problem] = []
    if telemetry.summary is not None and (size := _size(telemetry.summary)) > LARGEST_SUMMARY:
        problems.append(_problem("summary", None, f"has {size} characters as JSON; at most {LARGEST_SUMMARY}"))
    for index, event in enumerate(telemetry.events):
        if (size := _size(event.fields)) > LARGEST_FIELDS:
            problems.append(
                _problem(f"events.{index}.fields", None, f"{size} characters as JSON; at most {LARGEST_FIELDS}")
            )
        if event.kind.startswith("job_"):
            message = "a kind that begins with job_ is the service's own; call it otherwise"
            problems.append(_problem(f"events.{index}.kind", event.kind, message))
    for index, sample in enumerate(telemetry.samples):
        if (wrong := wrong_with_reported(sample.reported or ())) is not None:
            problems.append(_problem(f"samples.{index}.reported", None, wrong))
    batches: dict[str, Sequence[Sample | Event]] = {"samples": telemetry.samples, "events": telemetry.events}
    for name, batch in batches.items():
        for index, one in enumerate(batch):
            if one.step > LARGEST_STEP:
                message = f"must be at most {LARGEST_STEP}"
                problems.append(_problem(f"{name}.{index}.step", str(one.step), message))
    if problems:
        raise InvalidRequest.of(problems[:20])


def _size(value: object) -> int:
    return len(json.dumps(value, ensure_ascii=False))


def _problem(path: str, value: str | None, message: str) -> Problem:
    return Problem(path=path, value=value, message=message)


def refused(address: str, came_from: str, networks: Sequence[Network]) -> str | None:
    """Why this address is not asked, in words; None where it is.

    address: IP:port as the worker gives it. came_from: the address that the registration came from. networks: others
    that may be named, because a proxy stands before the service.
    """
    found = _HOST_PORT.match(address)
    if found is None or int(found["port"]) not in SCRAPE_PORTS:
        return f"must be IP:port, with a port from {SCRAPE_PORTS[0]} to {SCRAPE_PORTS[-1]}, where workers have theirs"
    host = _ip(found["name"] or found["six"])
    if host is None:
        return "must name its host by an IP address"
    if host == _ip(came_from):
        return None
    # Addresses of a machine itself, of a cloud's metadata: no network of workers, however wide it was written.
    if host.is_loopback or host.is_link_local or host.is_multicast or host.is_unspecified:
        return "must be an address of a network of workers, which is neither of a machine itself nor link-local"
    if any(host.version == network.version and host in network for network in networks):
        return None
    return (
        f"must be on the host that registers it, {came_from}; where workers reach the service through a proxy, the "
        "operator names their networks in THINWIRE_SCRAPE_NETWORKS"
    )


def _ip(text: str) -> IPv4Address | IPv6Address | None:
    try:
        found = ip_address(text)
    except ValueError:
        return None
    return (found.ipv4_mapped or found) if isinstance(found, IPv6Address) else found


def _token(folder: JobFolder, row: JobRow) -> str:
    """The job's token, out of its run folder. Raises Unavailable."""
    if not folder.complete(row.token_hash):
        raise Unavailable(f"the run folder of job {row.id} on the service's machine is not complete: try again")
    return folder.read_token()
