"""What a person can do with jobs: submit, look, read logs and history, resize, cancel, delete; and how long they stay.

A submission is one row first; the run folder and the launcher's part follow from it, and the reconciler finishes
whatever a crash leaves open.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import JsonValue
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from thinwire.contract.jobs import CheckpointList, Draft, History, Job, JobChange, JobList, JobState, Logs, Problem
from thinwire.contract.jobs import Starts as StartsWhen
from thinwire.contract.places import Room
from thinwire.contract.projects import DEFAULT
from thinwire.contract.redaction import HIDDEN, hidden_in, redacted
from thinwire.contract.script import ScriptRecipe
from thinwire.contract.spec import ScriptSpec, TrainSpec
from thinwire.service.auth import new_token, token_hash
from thinwire.service.cursors import cursor, key_of
from thinwire.service.db import Database
from thinwire.service.errors import (
    IdempotencyKeyReused,
    InvalidRequest,
    JobNeeded,
    JobNotOver,
    JobOver,
    LogGone,
    QuotaReached,
    ServiceError,
    Unavailable,
)
from thinwire.service.jobs.checkpoint_files import checkpoints_before, open_checkpoint
from thinwire.service.jobs.cloning import cloned
from thinwire.service.jobs.data_files import check_data
from thinwire.service.jobs.job_folder import RunFolders
from thinwire.service.jobs.listing import Filter, cursor_of, newest, place_of, put_labels, relabel
from thinwire.service.jobs.repository import JobRepository, JobRow, record, stored_key, transition
from thinwire.service.jobs.starts import Starts, heirs_of, unshared
from thinwire.service.jobs.thinning import kept_steps
from thinwire.service.jobs.views import (
    event_view,
    job_item,
    job_json,
    job_view,
    queued,
    sample_view,
    shown_spec,
    submission_id,
)
from thinwire.service.jobs.worker_numbers import limits_now, refuse_never, resize, write_wanted
from thinwire.service.launch.protocol import Launcher, LauncherError, LogChunk, NoLog, read_part
from thinwire.service.occasions import Occasion
from thinwire.service.packages.store import Packages
from thinwire.service.people.audit import Change, deleted_jobs
from thinwire.service.people.quotas import refuse_beyond, refuse_growth, waits_for

logger = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"
"""The list's name in its cursors."""
LABELS = {"labels"}
"""Of a spec, what does not stand in the row's: its own column has them as they are now."""
LAST_ARRIVAL = 2**62
"""Of a job that there is not yet: it comes after all others."""
MOST_EVENTS = 5000
MOST_SAMPLE_BYTES, MOST_EVENT_BYTES, MOST_JOB_BYTES = 2 << 20, 1 << 20, 4 << 20
"""In one answer, of samples, of events, and of what jobs in a list have in the database."""
MOST_SPEC_BYTES = 64 << 20
"""Of the jobs of one person that are not over: each turn of the reconciler reads them."""
LOG_OFFSET_BITS = 40
"""A log offset is (attempt - 1) << 40 plus bytes: each attempt has a log of its own."""
LINE_BYTES, KEY_BYTES = 4096, 16384
"""Of a line, and of a private key, that a part of a log begins in, so many are looked at."""
DAY_S = 86_400.0
DELETED_AT_ONCE = 20
"""Jobs deleted in one call: a folder of checkpoints may take a second to remove."""


class JobService:
    """The operator's side of the jobs domain. Methods may be called from any thread.

    room: what the cluster has, as far as is known. would: whether a new job would be started now.
    confirm_owner: raises where another service owns the database.
    wake: called when there is something to reconcile at once. clock: unix seconds. new_suffix: the random end of an id.
    shared_folders: of all machines of the cluster.
    keep_jobs, keep_days: how many jobs that are over are kept, and for how long; None: however many, for ever.
    person_jobs, person_bytes: how many jobs of one person may not be over, and what is kept of all jobs of one.
    """

    def __init__(
        self,
        db: Database,
        launcher: Launcher,
        folders: RunFolders,
        packages: Packages,
        *,
        launcher_reason: Callable[[], str | None],
        room: Callable[[], Room | None],
        refuse_full: Callable[[], None],
        would: Callable[[JobRow], tuple[StartsWhen, str | None, dict[str, Any] | None]],
        confirm_owner: Callable[[], None],
        wake: Callable[[], None],
        clock: Callable[[], float],
        new_suffix: Callable[[], str] = lambda: secrets.token_hex(3),
        shared_folders: Sequence[Path] = (),
        keep_jobs: int | None = None,
        keep_days: float | None = None,
        person_jobs: int = 1000,
        person_bytes: int = 20 << 30,
    ) -> None:
        self._db = db
        self._launcher = launcher
        self._folders = folders
        self._packages = packages
        self._launcher_reason = launcher_reason
        self._room, self._refuse_full = room, refuse_full
        self._would = would
        self._confirm_owner = confirm_owner
        self._wake = wake
        self._clock = clock
        self._new_suffix = new_suffix
        self._shared_folders = shared_folders
        self._keep_jobs, self._keep_days = keep_jobs, keep_days
        self._person_jobs, self._person_bytes = person_jobs, person_bytes
        self._prunes, self._sweeps = Occasion(clock), Occasion(clock)
        self._undeletable: set[str] = set()
        self._starts = Starts(db, folders, own_cluster=launcher.own_cluster, shared=shared_folders)

    def submit(self, spec: TrainSpec | ScriptSpec, idempotency_key: str | None, change: Change, project: str) -> Job:
        """Accept a job of a project: its row, then its run folder. The same key and spec of the same person again give
        the same job.

        Raises: IdempotencyKeyReused, InvalidRequest (a data file that cannot be read, a package or
        a start that is not there, more workers than the cluster can ever have), QuotaReached, ProjectNotFound,
        InsufficientStorage.
        """
        change.project = project
        _refuse_hidden(spec)
        # Of what was written: a default that a later version adds or changes leaves a request the same request. Labels
        # say nothing of the run.
        digest = hashlib.sha256(spec.model_dump_json(exclude_unset=True, exclude=LABELS).encode()).hexdigest()
        earlier = self._earlier(change, idempotency_key, digest, spec)
        if earlier is not None:
            change.job_id, change.about = earlier.id, "repeated"
            return earlier
        self._refuse_full()
        given, spec = spec, self._checked(spec, project)
        token = new_token()
        with self._folders.lock:
            row = self._insert(spec, digest, idempotency_key, token, change)
            while row is None:  # the id is taken, or another request with this key was faster
                earlier = self._earlier(change, idempotency_key, digest, given)
                if earlier is not None:
                    change.job_id, change.about = earlier.id, "repeated"
                    return earlier
                row = self._insert(spec, digest, idempotency_key, token, change)
            try:
                folder = self._folders.of(row.id)
                folder.write(
                    job_json(row, self._folders.told_to(row.id)), limits_now(row), token, self._folders.service
                )
            except OSError:
                # The job is accepted: its row is written. The reconciler completes the folder.
                logger.exception("run_folder_incomplete job_id=%s", row.id)
        logger.info("job_accepted job_id=%s steps=%s recipe=%s", row.id, spec.steps, spec.recipe.name)
        self._wake()
        return self._view(row, workers=0)

    def validate(self, spec: TrainSpec | ScriptSpec, who: str, project: str) -> Draft:
        """The job that would be made for this person in a project, and whether it would start now. Nothing is written.

        Raises what `submit` raises for a job that it would refuse.
        """
        _refuse_hidden(spec)
        spec = self._checked(spec, project)
        row = self._row(spec, "", None, "", who, project)
        row.arrival = LAST_ARRIVAL
        with self._db.read() as session:
            self._refuse_too_much(session, row)
        starts, reason, queue = self._would(row)
        return Draft(spec=shown_spec(row), starts=starts, reason=reason, queue=queued(queue))

    def clone(self, job_id: str, changes: Mapping[str, JsonValue], idempotency_key: str | None, change: Change) -> Job:
        """A new job of the spec of another one, as that was submitted, with its labels as they are now, and these
        changes (RFC 7396).

        A secret in the spec is taken along for the person who has written it alone: it could be read by what the
        changes let run. Raises: JobNotFound, and what `submit` raises.
        """
        with self._db.read() as session:
            row = JobRepository(session).found(job_id)
        change.about = f"of {job_id}"
        mine = row.submitted_by == change.who
        return self.submit(cloned(row, changes, mine=mine), idempotency_key, change, row.project)

    def list(self, limit: int, wanted: Filter, before: str | None = None) -> JobList:
        """The newest of the jobs that are wanted; with `before`, `next` of an earlier list, those that follow.

        Raises InvalidRequest.
        """
        now = self._clock()
        with self._db.read() as session:
            place = None if before is None else place_of(session, before, wanted.project)
            rows, more = newest(session, limit, MOST_JOB_BYTES, wanted, place)
            workers = JobRepository(session).count_live_leases([row.id for row in rows], now)
            items = [
                job_item(row, workers.get(row.id, 0), self._folders.of(row.id).path, self._page(row)) for row in rows
            ]
        return JobList(jobs=items, next=cursor_of(rows[-1]) if more else None)

    def get(self, job_id: str) -> Job:
        """One job. Raises JobNotFound."""
        now = self._clock()
        with self._db.read() as session:
            row = JobRepository(session).found(job_id)
            workers = JobRepository(session).count_live_leases([job_id], now)
        return self._view(row, workers.get(job_id, 0))

    def change(self, job_id: str, wanted: JobChange, change: Change) -> Job:
        """Want another number of workers, or other labels, or both; the same again changes nothing.

        Raises: JobNotFound, JobOver (of workers), InvalidRequest; then nothing is changed.
        """
        with self._db.write() as session:
            row = JobRepository(session).lock(job_id)
            if wanted.workers is not None:
                refuse_growth(session, row, wanted.workers, self._room())
                resize(session, row, wanted.workers, self._clock(), self._room())
            if wanted.labels is not None:
                relabel(session, row, wanted.labels)
            change.project = row.project
            change.write(session, job_id, _said(wanted))
        if wanted.workers is None:
            return self.get(job_id)
        try:
            write_wanted(self._db, self._folders, job_id)
        except OSError:
            # The row has it. The reconciler writes the file.
            logger.exception("wanted_workers_not_written job_id=%s", job_id)
        self._wake()
        return self.get(job_id)

    def cancel(self, job_id: str, change: Change) -> Job:
        """Ask for the job's end; asking again changes nothing. Raises JobNotFound, JobOver."""
        with self._db.write() as session:
            row = JobRepository(session).lock(job_id)
            state = JobState(row.state)
            if state in (JobState.SUCCEEDED, JobState.FAILED):
                raise JobOver(job_id, state, "it has finished and cannot be cancelled")
            if not state.terminal and state is not JobState.CANCELLING:
                transition(session, row, JobState.CANCELLING, self._clock())
                change.project = row.project
                change.write(session, job_id)
        self._wake()
        return self.get(job_id)

    def delete(self, job_id: str, change: Change) -> None:
        """Remove a job that is over: its run folder with checkpoints, history and logs, then its rows.

        A checkpoint.store outside of the run folder stays. Raises: JobNotFound, JobNotOver, JobNeeded; Unavailable
        where the folder cannot be removed: the job is then still there, and can be deleted again.
        """
        with self._db.read() as session:
            state = JobState(JobRepository(session).found(job_id).state)
            heirs = heirs_of(self._folders.of(job_id).path, session)
        if not state.terminal:  # and from there it moves no more
            raise JobNotOver(job_id, state)
        if heirs:
            raise JobNeeded(job_id, heirs)
        self._confirm_owner()
        try:
            self._folders.of(job_id).remove()  # outside of a transaction: a folder of checkpoints takes its time
        except OSError as error:
            raise Unavailable(
                f"the folder of job {job_id} cannot be removed: {error}; mend that, and delete the job again"
            ) from error
        with self._db.write() as session:
            row = JobRepository(session).lock(job_id)
            JobRepository(session).remove(row)
            change.project = row.project
            change.write(session, job_id)
        logger.info("job_deleted job_id=%s state=%s", job_id, state)

    def prune(self, change: Callable[[], Change]) -> None:
        """Delete some of the jobs that need not be kept, oldest first. One that cannot be deleted keeps no other."""
        if (self._keep_jobs is None and self._keep_days is None) or not self._prunes.has_come():
            return
        before = None if self._keep_days is None else self._clock() - self._keep_days * DAY_S
        with self._db.read() as session:
            limit = DELETED_AT_ONCE + len(self._undeletable)
            ids = JobRepository(session).finished(before=before, beyond=self._keep_jobs, limit=limit)
        # Those that were refused come last: else they would be tried for ever in the place of others.
        for job_id in sorted(ids, key=self._undeletable.__contains__)[:DELETED_AT_ONCE]:
            try:
                self.delete(job_id, change())
            except ServiceError as error:
                logger.warning("job_not_deleted job_id=%s error=%s", job_id, error)
                self._undeletable.add(job_id)
        self._undeletable &= set(ids)
        if len(ids) == limit:
            self._prunes.come_again()

    def sweep(self) -> None:
        """Remove what lies in the folders of jobs that have been deleted: their processes may have gone on writing.

        Of jobs alone whose deletion is in the audit: a database that was put back knows others no more, and they may
        run. Raises OSError.
        """
        if not self._sweeps.has_come():
            return
        found = self._folders.job_ids()  # first: the row of a new job is there before its folder
        with self._db.read() as session:
            gone = deleted_jobs(session, found - JobRepository(session).ids())
        for job_id in gone:
            try:
                self._folders.of(job_id).remove()
                logger.info("left_folder_removed job_id=%s", job_id)
            except OSError as error:  # tried again with the next look
                logger.warning("left_folder_stays job_id=%s error=%s", job_id, error)

    def history(
        self,
        job_id: str,
        steps: range,
        limit: int,
        event_kinds: Sequence[str] | None = None,
        before_event: int | None = None,
        points: int | None = None,
    ) -> History:
        """The first `limit` samples of these steps, in their order, and the newest events in order of time.

        As many of each as one answer holds. event_kinds: only these; None for all. before_event: only older ones.
        points: of all samples of the steps so many that show their shape (thinning.py).
        Raises: JobNotFound, InvalidRequest.
        """
        with self._db.read() as session:
            jobs = JobRepository(session)
            jobs.found(job_id)
            before = None if before_event is None else jobs.event(job_id, before_event)
            if before is None and before_event is not None:
                words = "must be `next_before_event` of an earlier answer for this job: begin again without it"
                raise InvalidRequest.at("before_event", before_event, words)
            kept = None if points is None else kept_steps(session, job_id, steps, points)
            found, more = jobs.samples(
                job_id, steps, limit, MOST_SAMPLE_BYTES, lambda row: (row.step, sample_view(row)), kept
            )
            samples = [sample for _, sample in found if sample is not None]
            events, older = jobs.events(
                job_id, event_kinds, limit=MOST_EVENTS, most_bytes=MOST_EVENT_BYTES, before=before
            )
        return History(
            job_id=job_id,
            samples=samples,
            events=[event_view(row) for row in events],
            next_after_step=found[-1][0] if more else None,
            next_before_event=events[0].id if older else None,
            unreadable=len(found) - len(samples),
        )

    def logs(self, job_id: str, offset: int, limit: int) -> Logs:
        """Log text of the current attempt from `offset` on, up to `limit` bytes.

        An offset into the log of an earlier attempt goes on at the beginning of the current one's.
        Raises: JobNotFound, LogGone, Unavailable.
        """
        with self._db.read() as session:
            row = JobRepository(session).found(job_id)
        state, base = JobState(row.state), (row.attempt - 1) << LOG_OFFSET_BITS
        if state in (JobState.SUBMITTING, JobState.QUEUED):
            return Logs(text="", next_offset=offset, complete=False)
        if not self._launcher.own_cluster:
            return self._sent_log(row, max(0, offset - base), limit)
        reason = self._launcher_reason()
        if reason is not None:
            raise Unavailable(f"the launcher cannot be asked for the log now: {reason}")
        try:
            own = max(0, offset - base)
            chunk = without_secrets(partial(self._launcher.logs, submission_id(row.id, row.attempt)), own, limit)
        except NoLog as error:
            if state.terminal:
                raise LogGone(f"the log of job {job_id} is gone with its cluster, or it never ran: {error}") from error
            return Logs(text="", next_offset=offset, complete=False)
        except LauncherError as error:
            raise Unavailable(f"the launcher has no log to give: {error}") from error
        # Where a job is over and nothing follows is the end: nobody writes any more.
        complete = state.terminal and chunk.next_offset == own
        return Logs(text=chunk.text, next_offset=base + chunk.next_offset, complete=complete)

    def _sent_log(self, row: JobRow, offset: int, limit: int) -> Logs:
        """What the driver has sent of its log. Raises LogGone, Unavailable."""
        path, over = self._folders.of(row.id).log_of(row.attempt), JobState(row.state).terminal
        try:
            if over and not path.exists():
                raise LogGone(f"job {row.id} has sent no log, and its cluster has none")
            chunk = without_secrets(partial(read_part, path), offset, limit)
        except OSError as error:
            raise Unavailable(f"the log {path} cannot be read: {error.strerror or error}") from error
        next_offset = ((row.attempt - 1) << LOG_OFFSET_BITS) + chunk.next_offset
        return Logs(text=chunk.text, next_offset=next_offset, complete=over and chunk.next_offset == offset)

    def checkpoints(self, job_id: str, limit: int, before: str | None = None) -> CheckpointList:
        """The last `limit` checkpoints in the job's own folder, by step; with `before`, `next` of an earlier list,
        those before these. Raises: JobNotFound, InvalidRequest, Unavailable.
        """
        last = None if before is None else key_of(CHECKPOINTS, before, (str,), "before")[0]
        with self._db.read() as session:
            store = JobRepository(session).found(job_id).spec.get("checkpoint", {}).get("store")
        if store is not None:
            return CheckpointList(store=redacted(store), checkpoints=[])
        found, first = checkpoints_before(self._folders.of(job_id).checkpoints, limit, last)
        return CheckpointList(checkpoints=found, next=None if first is None else cursor(CHECKPOINTS, first))

    def checkpoint_file(self, job_id: str, folder: str, file: str) -> tuple[BinaryIO, int]:
        """One file of a checkpoint, opened, and its size. Raises: JobNotFound, CheckpointNotFound, Unavailable."""
        with self._db.read() as session:
            JobRepository(session).found(job_id)
        return open_checkpoint(self._folders.of(job_id).checkpoints, folder, file)

    def count_by_state(self, project: str | None = None) -> dict[JobState, int]:
        """How many jobs each state has, of one project or of all."""
        with self._db.read() as session:
            counts = JobRepository(session).count_by_state(project)
        return {state: counts.get(state.value, 0) for state in JobState}

    def excuse_running_attempts(self) -> None:
        """An orderly end of the service takes its runs with it: that attempt does not count against max_restarts."""
        with self._db.write() as session:
            for row in JobRepository(session).unfinished():
                if row.state in (JobState.PENDING.value, JobState.RUNNING.value):
                    row.max_attempts += 1

    def rewrite_service_urls(self) -> None:
        """Tell the run folder of every job that is not over where the service listens now."""
        with self._db.read() as session:
            ids = [row.id for row in JobRepository(session).unfinished()]
        for job_id in ids:
            try:
                self._folders.of(job_id).write_service(self._folders.service)
            except OSError:
                logger.exception("service_url_not_written job_id=%s", job_id)

    def _checked(self, spec: TrainSpec | ScriptSpec, project: str) -> TrainSpec | ScriptSpec:
        """The job, which says where its start lies. Raises InvalidRequest, Unavailable where it could not run here."""
        self._starts.refuse_foreign(spec, project)
        if isinstance(spec, ScriptSpec):
            self._check_package(spec.recipe, project)
        self._check_places(spec)
        refuse_never(spec.workers, self._room())
        return self._starts.found(spec, project)

    def _check_package(self, recipe: ScriptRecipe, project: str) -> None:
        """Refuse a package that is not there, or lacks the script; keep one that is. Raises InvalidRequest."""
        if recipe.package is None:
            return
        if not self._packages.use(recipe.package, project):
            words = (
                f"the service keeps no package of this hash: PUT /v1/packages/{recipe.package} with the zip of the "
                "script's folder, or let `thinwire submit` do it, and submit again"
            )
            raise InvalidRequest.at("recipe.package", recipe.package, words)
        wrong = self._packages.lacks(recipe.package, recipe.entry)
        if wrong is not None:
            raise InvalidRequest.at("recipe.entry", recipe.entry, wrong)

    def _check_places(self, spec: TrainSpec | ScriptSpec) -> None:
        """Refuse what the job's machines cannot reach, or its cluster does not have. Raises InvalidRequest."""
        if spec.kueue is not None and self._launcher.name != "kuberay":
            words = (
                f"Kueue queues jobs on Kubernetes, and this service's launcher is {self._launcher.name}: leave it out"
            )
            raise InvalidRequest.at("kueue.queue", spec.kueue.queue, words)
        if not self._launcher.own_cluster:  # data are on the cluster's machines, which this one cannot see
            if where := unshared(spec.checkpoint.store, self._shared_folders):
                store = spec.checkpoint.store
                raise InvalidRequest.at("checkpoint.store", store, where)
        elif isinstance(spec, TrainSpec):
            check_data(spec)

    def _earlier(self, change: Change, key: str | None, digest: str, spec: TrainSpec | ScriptSpec) -> Job | None:
        if key is None or change.project is None:
            return None
        with self._db.read() as session:
            row = JobRepository(session).by_idempotency_key(change.who, key, change.project)
        if row is None:
            return None
        if row.spec_digest != digest and row.spec != spec.model_dump(mode="json", exclude=LABELS):
            raise IdempotencyKeyReused(key, row.id)
        return self.get(row.id)

    def _insert(
        self, spec: TrainSpec | ScriptSpec, digest: str, key: str | None, token: str, change: Change
    ) -> JobRow | None:
        """The new row, committed with its first event; None where its id or its key has been taken meanwhile."""
        row = self._row(spec, digest, key, token, change.who, change.project or DEFAULT)
        try:
            with self._db.write() as session:
                row.reason = self._refuse_too_much(session, row)
                change.write(session, row.id)
                # From here on every other transaction that numbers anything waits for this one.
                row.arrival = JobRepository(session).next_arrival()
                JobRepository(session).add(row)
                put_labels(session, row, row.labels)
                record(session, [row], row.created_at)
        except IntegrityError:
            change.written = False  # it was taken back with the rest
            return None
        return row

    def _row(
        self, spec: TrainSpec | ScriptSpec, digest: str, key: str | None, token: str, who: str, project: str
    ) -> JobRow:
        """The row of a new job, with an id that may be taken."""
        return JobRow(
            id=f"{spec.name}-{self._new_suffix()}",
            name=spec.name,
            labels=dict(spec.labels),
            spec=spec.model_dump(mode="json", exclude=LABELS),
            spec_digest=digest,
            idempotency_key=None if key is None else stored_key(who, key, project),
            token_hash=token_hash(token),
            state=JobState.SUBMITTING.value,
            attempt=1,
            max_attempts=1 + spec.workers.max_restarts,
            created_at=self._clock(),
            submitted_by=who,
            project=project,
        )

    def _refuse_too_much(self, session: Session, row: JobRow) -> str | None:
        """Refuse a job that its person or its project may not have; why it waits for others of theirs, if it does.

        Raises: QuotaReached, ProjectNotFound.
        """
        who, jobs = str(row.submitted_by), JobRepository(session)
        refuse_beyond(session, row, self._room())  # it holds the project: of two at once one waits for the other
        too_much = jobs.too_much_of(who, self._person_jobs, MOST_SPEC_BYTES, self._person_bytes)
        if too_much is not None:
            raise QuotaReached(f"{who} has {too_much}: cancel or delete some, and submit this one again")
        return waits_for(session, row)

    def _page(self, row: JobRow) -> str | None:
        return self._launcher.dashboard_url(submission_id(row.id, row.attempt))

    def _view(self, row: JobRow, workers: int) -> Job:
        return job_view(row, workers, self._folders.of(row.id).path, self._page(row))


def without_secrets(read: Callable[[int, int], LogChunk], offset: int, limit: int) -> LogChunk:
    """A part of a log as it is shown: a secret stays hidden also where a part begins or ends in its line.

    read: the log, from an offset on, up to so many bytes.
    """
    chunk = read(offset, limit)
    if not chunk.text:
        return chunk
    before = min(offset, KEY_BYTES)
    earlier = read(offset - before, before).text if before else ""
    key = earlier.rfind("-----BEGIN ")
    line = earlier.rfind("\n", 0, key if key >= 0 else None) + 1
    head = earlier[max(line, 0 if key >= 0 else len(earlier) - LINE_BYTES) :]
    tail = read(chunk.next_offset, LINE_BYTES).text.partition("\n")[0]
    whole = redacted(head + chunk.text + tail)
    begin, end = (_shared(redacted(part), whole) for part in (head, head + chunk.text))
    return LogChunk(whole[begin:end], chunk.next_offset)


def _shared(begin: str, whole: str) -> int:
    """How many characters both begin with."""
    if whole.startswith(begin):
        return len(begin)
    return next(index for index, (one, other) in enumerate(zip(begin, f"{whole}\0", strict=False)) if one != other)


def _refuse_hidden(spec: TrainSpec | ScriptSpec) -> None:
    """A job as it was shown, sent again, would run with HIDDEN for its secret. Raises InvalidRequest."""
    message = f"is {HIDDEN}, which is shown in the place of a secret: write the value itself, or take it from each box"
    problems = [Problem(path=path, message=message) for path in hidden_in(spec.model_dump(mode="json"))]
    if problems:
        raise InvalidRequest.of(problems)


def _said(wanted: JobChange) -> str:
    """What is asked for, in the words of the audit."""
    limits = {} if wanted.workers is None else wanted.workers.model_dump(exclude_none=True)
    words = ["workers", *(f"{name}={value}" for name, value in limits.items())] if limits else []
    if wanted.labels is not None:
        labels = wanted.labels.items()
        words += ["labels", *(f"-{key}" if value is None else f"{key}={value}" for key, value in labels)]
    return " ".join(words)
