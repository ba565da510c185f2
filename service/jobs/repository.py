"""All SQL of the jobs domain, and a job's move to another state. The caller owns session and transaction."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeVar

from sqlalchemy import (
    JSON,
    BigInteger,
    ColumnElement,
    ForeignKey,
    Index,
    Integer,
    Row,
    Select,
    String,
    Text,
    UniqueConstraint,
    bindparam,
    cast,
    delete,
    func,
    literal,
    select,
    tuple_,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from thinwire.contract.jobs import TERMINAL, JobState
from thinwire.contract.projects import DEFAULT
from thinwire.contract.redaction import redacted, redacted_json
from thinwire.contract.reports import EventKind
from thinwire.service.db import NUMBERED, Base
from thinwire.service.errors import JobNotFound

JsonDict = dict[str, Any]
Made = TypeVar("Made")

SAMPLE_BYTES, EVENT_BYTES = 64, 256
"""What a row takes beside its JSON, indices included, about."""
IN_PART = 100
"""Rows that are read at once of what is bounded by bytes."""


def json_bytes(column: Any) -> ColumnElement[int]:
    """How long its JSON is: ASCII, as it is stored."""
    return func.length(cast(column, Text))


def stored_key(who: str, key: str, project: str = DEFAULT) -> str:
    """What is stored of somebody's Idempotency-Key: two people may have chosen the same, or one in two projects."""
    who = who if project == DEFAULT else f"{project}/{who}"
    return hashlib.sha256(f"{who}\0{key}".encode()).hexdigest()


class JobRow(Base):
    """One job. `version` is the optimistic lock: a change on a row that has moved meanwhile is refused."""

    __tablename__ = "jobs"
    __table_args__ = (
        Index("jobs_of_person", "submitted_by", "project", "kept_bytes"),
        # By which lists are read: all that they are filtered by stands in it, so that no row is read for nothing.
        Index("jobs_listed", "created_at", "id", "state", "submitted_by", "name"),
        Index("jobs_of_project", "project", "created_at", "id", "state", "submitted_by", "name"),
    )

    id: Mapped[str] = mapped_column(String(80), primary_key=True)
    name: Mapped[str] = mapped_column(String(63))
    spec: Mapped[JsonDict] = mapped_column(JSON)
    spec_digest: Mapped[str] = mapped_column(String(64))
    idempotency_key: Mapped[str | None] = mapped_column(String(255), unique=True)
    """The `stored_key` who submitted it; the key itself where a version before that did."""
    token_hash: Mapped[str] = mapped_column(String(64), unique=True)
    state: Mapped[str] = mapped_column(String(16), index=True)
    reason: Mapped[str | None] = mapped_column(default=None)
    attempt: Mapped[int] = mapped_column(default=1)
    max_attempts: Mapped[int]
    created_at: Mapped[float] = mapped_column()
    started_at: Mapped[float | None] = mapped_column(default=None)
    finished_at: Mapped[float | None] = mapped_column(default=None)
    newest_sample: Mapped[JsonDict | None] = mapped_column(JSON(none_as_null=True), default=None)
    """{"attempt", "sample", "number"}: kept here, so that a list of jobs need not search all samples."""
    newest_validation: Mapped[JsonDict | None] = mapped_column(JSON(none_as_null=True), default=None)
    wanted_workers: Mapped[JsonDict | None] = mapped_column(JSON(none_as_null=True), default=None)
    """A WantedWorkers; None as long as nobody has asked for other numbers than the spec's."""
    newest_membership: Mapped[JsonDict | None] = mapped_column(JSON(none_as_null=True), default=None)
    """A worker_numbers.Membership: what the workers have last said of their number."""
    summary: Mapped[JsonDict | None] = mapped_column(JSON(none_as_null=True), default=None)
    failure: Mapped[JsonDict | None] = mapped_column(JSON(none_as_null=True), default=None)
    ticket_hash: Mapped[str | None] = mapped_column(String(64), index=True, default=None)
    """Of the ticket of the attempt that was submitted last; None where drivers need none."""
    claimant_hash: Mapped[str | None] = mapped_column(String(64), default=None)
    """Of the secret of who has used it; None as long as nobody has."""
    granted: Mapped[int | None] = mapped_column(default=None)
    """Places in the cluster that are this job's, held or not; None where it has none, or there is no queue."""
    queue: Mapped[JsonDict | None] = mapped_column(JSON(none_as_null=True), default=None)
    """Where it stands in the queue, as admission.py writes it; None where it does not wait there."""
    submitted_by: Mapped[str | None] = mapped_column(String(63), default=None)
    """The name of the token; None where a version before names submitted it."""
    project: Mapped[str] = mapped_column(String(63), default=DEFAULT, server_default=DEFAULT)
    kept_bytes: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    """Of its samples, events and logs, about."""
    arrival: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    """Which job of the service it was; 0 where a version that did not count took it."""
    labels: Mapped[dict[str, str]] = mapped_column(JSON, default=dict, server_default="{}")
    """As they are now; `labels.py` writes them, here and in the table that they are looked up in."""
    version: Mapped[int] = mapped_column()

    __mapper_args__ = {"version_id_col": version}  # noqa: RUF012 - what SQLAlchemy asks for


class ServiceRow(Base):
    """Which service this is, at whatever process owns the database; the table has one row."""

    __tablename__ = "service"

    id: Mapped[str] = mapped_column(String(16), primary_key=True)
    arrivals: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    """Jobs that it has taken so far."""
    numbers: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    """The largest that an event, or a newest sample, was given so far; `JobRepository.next_numbers` gives them."""
    numbers_gone: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    """The largest of an event that was removed with its job."""


class SampleRow(Base):
    """One step of a job's history; a later attempt replaces the steps that it repeats."""

    __tablename__ = "samples"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    attempt: Mapped[int]
    sample: Mapped[JsonDict] = mapped_column(JSON)


class EventRow(Base):
    """Something that happened once, said by the workers or by the service. The same event twice is one."""

    __tablename__ = "events"
    __table_args__ = (
        UniqueConstraint("job_id", "attempt", "kind", "step", "time", name="events_once"),
        Index("events_of_job", "job_id", "time"),
        Index("events_in_order", "job_id", "id"),
    )

    id: Mapped[int] = mapped_column(BigInteger().with_variant(Integer, "sqlite"), primary_key=True)
    """Its number among all events and samples."""
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"))
    attempt: Mapped[int]
    kind: Mapped[str] = mapped_column(String(64))
    step: Mapped[int]
    time: Mapped[float]
    fields: Mapped[JsonDict] = mapped_column(JSON)


class LeaseRow(Base):
    """A worker that can be scraped until `expires_at`, unless it says again that it is there."""

    __tablename__ = "worker_leases"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    rank: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    attempt: Mapped[int]
    address: Mapped[str] = mapped_column(String(255))
    pid: Mapped[int]
    node: Mapped[str] = mapped_column(String(255))
    expires_at: Mapped[float] = mapped_column(index=True)


class Standing(NamedTuple):
    """What a report has to know of its job."""

    id: str
    state: str
    attempt: int
    finished_at: float | None


# What every report and registration asks: made once, and of columns where no row is changed, for to build a statement
# and a row's object takes longer than the database does.
_JOBS: Any = JobRow.__table__
_SERVICE: Any = ServiceRow.__table__
_SAMPLES: Any = SampleRow.__table__
_THIS_JOB = _JOBS.c.id == bindparam("job_id")
LOCKED = select(JobRow).where(_THIS_JOB).with_for_update().execution_options(populate_existing=True)
LOCKED_STANDING = select(_JOBS.c.id, _JOBS.c.state, _JOBS.c.attempt, _JOBS.c.finished_at).where(_THIS_JOB)
LOCKED_STANDING = LOCKED_STANDING.with_for_update()
OF_TOKEN = select(_JOBS.c.id, _JOBS.c.state, _JOBS.c.finished_at).where(_JOBS.c.token_hash == bindparam("token_hash"))
NUMBERS = update(_SERVICE).values(numbers=_SERVICE.c.numbers + bindparam("more")).returning(_SERVICE.c.numbers)
NOTED = update(_JOBS).where(_THIS_JOB)
SIZES = select(_SAMPLES.c.step, json_bytes(_SAMPLES.c.sample) + SAMPLE_BYTES).where(
    _SAMPLES.c.job_id == bindparam("job_id"), _SAMPLES.c.step.in_(bindparam("steps", expanding=True))
)


class JobRepository:
    """Jobs, samples, events and leases of one session."""

    def __init__(self, session: Session) -> None:
        self.session = session

    # jobs

    def add(self, job: JobRow) -> None:
        """Insert the job now, so that a key that is taken shows itself here. Raises IntegrityError."""
        self.session.add(job)
        self.session.flush()

    def get(self, job_id: str) -> JobRow | None:
        """The job of this id."""
        return self.session.get(JobRow, job_id)

    def found(self, job_id: str) -> JobRow:
        """The job of this id. Raises JobNotFound."""
        row = self.get(job_id)
        if row is None:
            raise JobNotFound(job_id)
        return row

    def lock(self, job_id: str) -> JobRow:
        """The job of this id, held against other writers until the transaction ends. Raises JobNotFound."""
        row = self.session.scalars(LOCKED, {"job_id": job_id}).one_or_none()
        if row is None:
            raise JobNotFound(job_id)
        return row

    def lock_standing(self, job_id: str) -> Standing:
        """The same of a job of which no more is asked. Raises JobNotFound."""
        found = self.session.execute(LOCKED_STANDING, {"job_id": job_id}).one_or_none()
        if found is None:
            raise JobNotFound(job_id)
        return Standing(*found)

    def lock_all(self, job_ids: Sequence[str]) -> dict[str, JobRow]:
        """The jobs of these ids, held as `lock` does; one that is gone is left out."""
        query = select(JobRow).where(JobRow.id.in_(job_ids)).order_by(JobRow.id).with_for_update()
        return {row.id: row for row in self.session.scalars(query)}

    def by_idempotency_key(self, who: str, key: str, project: str) -> JobRow | None:
        """The job of this project that they have made with this key, or that was made with it when nobody had
        a name.
        """
        theirs = (JobRow.submitted_by == who) | JobRow.submitted_by.is_(None)
        stored = JobRow.idempotency_key.in_(
            (stored_key(who, key, project), key)
        )  # the key itself: by a version before `stored_key`
        return self.session.scalar(select(JobRow).where(theirs, stored, JobRow.project == project).limit(1))

    def packages(self) -> set[str]:
        """The hashes of the packages that jobs name."""
        package = JobRow.spec["recipe"]["package"].as_string()
        return {found for found in self.session.scalars(select(package).distinct()) if found}

    def by_token_hash(self, token_hash: str) -> tuple[str, JobState, float | None] | None:
        """The job whose token this is: its id, its state, and when it was over."""
        found = self.session.execute(OF_TOKEN, {"token_hash": token_hash}).one_or_none()
        return None if found is None else (found.id, JobState(found.state), found.finished_at)

    def id_by_ticket_hash(self, ticket_hash: str) -> str | None:
        """The id of the job whose ticket this is, used or not."""
        return self.session.scalar(select(JobRow.id).where(JobRow.ticket_hash == ticket_hash))

    def ids(self) -> set[str]:
        """Of all jobs."""
        return set(self.session.scalars(select(JobRow.id)))

    def service_id(self) -> str:
        """Of the service: the same, whichever process owns the database."""
        return self.session.scalars(select(ServiceRow.id)).one()

    def next_arrival(self) -> int:
        """The number of one more job: of two requests at once one waits for the other."""
        counted = update(ServiceRow).values(arrivals=ServiceRow.arrivals + 1).returning(ServiceRow.arrivals)
        return self.session.scalars(counted).one()

    def next_numbers(self, count: int) -> int:
        """The last of `count` numbers for what streams tell, each larger than all before.

        From here to the end of the transaction nobody else gets any, so they are committed in their order: who has read
        up to `ServiceRow.numbers` misses none that is committed later. Lock the jobs first: of two transactions one
        would have a job and wait for numbers, and the other the reverse.
        """
        self.session.info[NUMBERED] = True
        return int(self.session.scalars(NUMBERS, {"more": count}).one())

    def too_much_of(self, who: str, most_jobs: int, most_spec_bytes: int, most_bytes: int) -> str | None:
        """None where this person may have one more job, else what they have too much of."""
        open_states = [state.value for state in JobState if not state.terminal]
        mine = JobRow.submitted_by == who
        query = select(func.count(), func.coalesce(func.sum(json_bytes(JobRow.spec)), 0))
        jobs, specs = self.session.execute(query.where(mine, JobRow.state.in_(open_states))).one()
        if jobs >= most_jobs:
            return f"{jobs} jobs that are not over; at most {most_jobs} (THINWIRE_PERSON_MAX_JOBS)"
        if specs >= most_spec_bytes:
            return f"jobs that are not over with {specs} bytes of job files; at most {most_spec_bytes}"
        kept = self.kept_of(who)
        if kept >= most_bytes:
            return f"jobs with {kept} bytes of history and logs; at most {most_bytes} (THINWIRE_PERSON_MAX_BYTES)"
        return None

    def kept_of(self, who: str | None) -> int:
        """Bytes that are kept of all jobs of this person."""
        return self.session.scalar(select(func.sum(JobRow.kept_bytes)).where(JobRow.submitted_by == who)) or 0

    def keep_more(self, job_id: str, size: int) -> None:
        """So many bytes more are kept of it."""
        self.note([job_id], kept_bytes=JobRow.__table__.c.kept_bytes + size)

    def remove(self, row: JobRow) -> None:
        """Delete the job with all that belongs to it."""
        last = self.session.scalar(select(func.max(EventRow.id)).where(EventRow.job_id == row.id)) or 0
        for table in (SampleRow, EventRow, LeaseRow):
            self.session.execute(delete(table).where(table.job_id == row.id))
        self.session.delete(row)
        self.session.flush()
        self.next_numbers(1)  # so that streams look, and find the job no more
        gone = update(ServiceRow).where(ServiceRow.numbers_gone < last).values(numbers_gone=last)
        self.session.execute(gone)

    def finished(self, *, before: float | None = None, beyond: int | None = None, limit: int = 100) -> Sequence[str]:
        """Ids of jobs that were over `before` a time, or are not among the `beyond` newest of those over.

        Oldest first, up to `limit`.
        """
        over = JobRow.state.in_([state.value for state in TERMINAL])
        due = 0
        if before is not None:
            due = self.session.scalar(select(func.count()).where(over, JobRow.finished_at < before)) or 0
        if beyond is not None:
            due = max(due, (self.session.scalar(select(func.count()).where(over)) or 0) - beyond)
        oldest = select(JobRow.id).where(over).order_by(JobRow.finished_at, JobRow.id)
        return self.session.scalars(oldest.limit(min(due, limit))).all()

    def unfinished(self, project: str | None = None) -> Sequence[JobRow]:
        """Every job that is not over, of one project or of all, oldest first."""
        # By the states that it may have: for those that it may not have, no index helps.
        open_states = [state.value for state in JobState if not state.terminal]
        query = select(JobRow).where(JobRow.state.in_(open_states)).order_by(JobRow.created_at)
        if project is not None:
            query = query.where(JobRow.project == project)
        return self.session.scalars(query).all()

    def count_by_state(self, project: str | None = None) -> dict[str, int]:
        """How many jobs each state has, of one project or of all; a state without jobs is left out."""
        query = select(JobRow.state, func.count()).group_by(JobRow.state)
        if project is not None:
            query = query.where(JobRow.project == project)
        return {row[0]: row[1] for row in self.session.execute(query)}

    def note(self, job_ids: Sequence[str], in_states: Collection[JobState] | None = None, **values: Any) -> None:
        """Write what no decision depends on, so that the rows' versions stay: of those alone that are `in_states`."""
        rows: ColumnElement[bool] = _JOBS.c.id.in_(job_ids)
        if in_states is not None:
            rows = rows & _JOBS.c.state.in_([state.value for state in in_states])
        self.session.execute(update(_JOBS).where(rows).values(**values))

    def note_plain(self, job_id: str, values: dict[str, Any]) -> None:
        """The same of one job, of values that are no expressions: what every report writes."""
        self.session.execute(NOTED, {"job_id": job_id, **values})

    # history

    def put_samples(
        self, job_id: str, attempt: int, samples: dict[int, dict[str, Any]], *, replace: bool = True
    ) -> int:
        """Write samples by step; how many bytes that has added. A step of a later attempt stays as it is.

        replace: else every step that is there stays.
        """
        if not samples:
            return 0
        rows = [{"job_id": job_id, "attempt": attempt, "step": step, "sample": s} for step, s in samples.items()]
        known = self.session.execute(SIZES, {"job_id": job_id, "steps": list(samples)}).all()
        before: dict[int, int] = {step: size for step, size in known}  # noqa: C416 - of rows mypy makes no dict
        written = self.session.execute(_samples_written(self._dialect, replace), rows)
        return sum(size - before.get(step, 0) for step, size in written)

    def put_events(self, job_id: str, attempt: int, events: Sequence[dict[str, Any]]) -> int:
        """Write events (kind, step, time, fields); one that is known is left out. How many bytes that has added."""
        return self.put_all_events([{"job_id": job_id, "attempt": attempt, **event} for event in events])

    def put_all_events(self, events: Sequence[dict[str, Any]]) -> int:
        """The same for events of many jobs, each with its job_id and attempt."""
        if not events:
            return 0
        statement = _insert(self._dialect, EventRow).on_conflict_do_nothing(
            index_elements=["job_id", "attempt", "kind", "step", "time"]
        )
        size = json_bytes(EventRow.fields) + EVENT_BYTES
        first = self.next_numbers(len(events)) - len(events) + 1
        shown = [
            {**event, "id": number, "fields": redacted_json(event["fields"])}
            for number, event in enumerate(events, first)
        ]
        return sum(self.session.scalars(statement.returning(size), shown))

    def samples(
        self,
        job_id: str,
        steps: range,
        limit: int,
        most_bytes: int,
        view: Callable[[SampleRow], Made],
        kept: Sequence[int] | None = None,
    ) -> tuple[list[Made], bool]:
        """What `view` makes of the first `limit` samples of these steps, in their order, and whether there are more.

        Of `most_bytes` in all, but one at least. No row is held: of many, they are most of the memory. kept: of these
        steps alone.
        """
        query = select(SampleRow, json_bytes(SampleRow.sample)).order_by(SampleRow.step)
        query = query.where(SampleRow.job_id == job_id, SampleRow.step >= steps.start, SampleRow.step < steps.stop)
        if kept is not None:
            query = query.where(SampleRow.step.in_(kept))
        return first_rows(self.session, query, limit, most_bytes, view)

    def events(
        self,
        job_id: str,
        kinds: Sequence[str] | None = None,
        *,
        limit: int,
        most_bytes: int,
        before: EventRow | None = None,
    ) -> tuple[list[EventRow], bool]:
        """The newest `limit` events of the job, in order of time, and whether there are older ones.

        Of all or of some kinds; older than `before` where that is given; of `most_bytes` in all, but one at least.
        """
        size = json_bytes(EventRow.fields) + EVENT_BYTES
        query = select(EventRow, size).where(EventRow.job_id == job_id)
        if kinds is not None:
            query = query.where(EventRow.kind.in_(kinds))
        if before is not None:
            order = tuple_(EventRow.time, EventRow.id)
            query = query.where(order < tuple_(literal(before.time), literal(before.id)))
        newest, more = first_rows(
            self.session, query.order_by(EventRow.time.desc(), EventRow.id.desc()), limit, most_bytes
        )
        return newest[::-1], more

    def samples_at(self, steps: Collection[tuple[str, int]]) -> dict[tuple[str, int], SampleRow]:
        """Of jobs, the samples of these steps, as far as they are kept."""
        found: dict[tuple[str, int], SampleRow] = {}
        wanted = sorted(steps)
        for first in range(0, len(wanted), IN_PART):
            key = tuple_(SampleRow.job_id, SampleRow.step)
            rows = self.session.scalars(select(SampleRow).where(key.in_(wanted[first : first + IN_PART])))
            found.update({(row.job_id, row.step): row for row in rows})
        return found

    def event(self, job_id: str, number: int) -> EventRow | None:
        """The event of this number, where it is the job's."""
        return self.session.scalar(select(EventRow).where(EventRow.id == number, EventRow.job_id == job_id))

    # leases

    def put_lease(self, lease: dict[str, Any]) -> None:
        """Make or renew a worker's lease. lease: all columns of a LeaseRow."""
        self.session.execute(_lease_written(self._dialect), lease)

    def drop_lease(self, job_id: str, rank: int, attempt: int | None = None) -> None:
        """End a worker's lease, only that of `attempt` where it is given; none is fine."""
        lease = delete(LeaseRow).where(LeaseRow.job_id == job_id, LeaseRow.rank == rank)
        self.session.execute(lease if attempt is None else lease.where(LeaseRow.attempt == attempt))

    def drop_leases(self, job_ids: Sequence[str]) -> None:
        """End all leases of these jobs."""
        self.session.execute(delete(LeaseRow).where(LeaseRow.job_id.in_(job_ids)))

    def has_expired_leases(self, now: float) -> bool:
        """True where `drop_expired_leases` has something to do."""
        return self.session.scalar(select(LeaseRow.rank).where(LeaseRow.expires_at <= now).limit(1)) is not None

    def drop_expired_leases(self, now: float) -> None:
        """End the leases that have run out."""
        self.session.execute(delete(LeaseRow).where(LeaseRow.expires_at <= now))

    def live_leases(self, now: float, project: str | None = None) -> Sequence[Row[Any]]:
        """Every lease that has not run out, by job and rank; of jobs of this project alone where one is given."""
        query = select(LeaseRow.__table__).where(LeaseRow.expires_at > now).order_by(LeaseRow.job_id, LeaseRow.rank)
        if project is not None:
            query = query.join(JobRow, JobRow.id == LeaseRow.job_id).where(JobRow.project == project)
        return self.session.execute(query).all()

    def count_live_leases(self, job_ids: Sequence[str], now: float) -> dict[str, int]:
        """How many live leases each of these jobs has; a job without any is left out."""
        query = (
            select(LeaseRow.job_id, func.count())
            .where(LeaseRow.job_id.in_(job_ids), LeaseRow.expires_at > now)
            .group_by(LeaseRow.job_id)
        )
        return {row[0]: row[1] for row in self.session.execute(query)}

    @property
    def _dialect(self) -> str:
        return self.session.get_bind().dialect.name


def _insert(dialect: str, row: type[DeclarativeBase]) -> Any:
    """An insert that can name its conflicts; SQLAlchemy has one for each database."""
    table: Any = row.__table__  # of the row itself the session would go through its objects
    return postgresql.insert(table) if dialect == "postgresql" else sqlite.insert(table)


@cache
def _samples_written(dialect: str, replace: bool) -> Any:
    """Samples are written, and how large those rows are by their step is what it returns: of those alone."""
    insert, table, key = _insert(dialect, SampleRow), SampleRow.__table__, ["job_id", "step"]
    changes = {"attempt": insert.excluded.attempt, "sample": insert.excluded.sample}
    newer = insert.excluded.attempt >= table.c.attempt
    written = insert.on_conflict_do_update(index_elements=key, set_=changes, where=newer)
    if not replace:
        written = insert.on_conflict_do_nothing(index_elements=key)
    return written.returning(table.c.step, json_bytes(table.c.sample) + SAMPLE_BYTES)


@cache
def _lease_written(dialect: str) -> Any:
    insert, key = _insert(dialect, LeaseRow), {"job_id", "rank"}
    changes = {column.name: insert.excluded[column.name] for column in LeaseRow.__table__.c if column.name not in key}
    return insert.on_conflict_do_update(index_elements=sorted(key), set_=changes)


def first_rows(
    session: Session,
    query: Select[Any, int],
    limit: int,
    most_bytes: int,
    view: Callable[[Any], Any] = lambda row: row,
) -> tuple[list[Any], bool]:
    """What `view` makes of the first rows of a query for rows and their sizes, and whether there are more. No more of
    them are read: up to `limit`, and of `most_bytes` in all, but one at least.
    """
    found: list[Any] = []
    size = 0
    with session.execute(query.limit(limit + 1).execution_options(yield_per=IN_PART)) as rows:
        for row, its_size in rows:
            size += its_size
            if found and (len(found) == limit or size > most_bytes):
                return found, True
            found.append(view(row))
    return found, False


def storable(reason: str) -> str:
    """As every database takes it, and without secrets: in a cluster's or a run's words there may be NUL, half of a
    surrogate pair, or the URL that could not be opened.
    """
    return redacted(reason.replace("\0", "\ufffd").encode("utf-8", "replace").decode())


def transition(session: Session, row: JobRow, to: JobState, now: float, reason: str | None = None) -> None:
    """Move `row` to a state and record it. row: modified; its leases end with it where the state is terminal."""
    transition_all(session, [(row, to, reason)], now)


def transition_all(session: Session, moves: Sequence[tuple[JobRow, JobState, str | None]], now: float) -> None:
    """The same for many rows: to which state, for what reason. A new attempt has no leases yet either."""
    for row, to, reason in moves:
        row.state = to.value
        row.reason = reason and storable(reason)
        if to is JobState.RUNNING and row.started_at is None:
            row.started_at = now
        if to.terminal:
            row.finished_at = now
    left = [row.id for row, to, _ in moves if to.terminal or to is JobState.SUBMITTING]
    if left:
        JobRepository(session).drop_leases(left)
    record(session, [row for row, _, _ in moves], now)


def record(session: Session, rows: Sequence[JobRow], now: float) -> None:
    """Write the events that the jobs have come to their states: kind job_submitting, job_running and so on."""
    events = [
        {
            "job_id": row.id,
            "attempt": row.attempt,
            "kind": EventKind(f"job_{row.state.lower()}").value,
            "step": last_step(row),
            "time": now,
            "fields": {"reason": row.reason} if row.reason else {},
        }
        for row in rows
    ]
    session.flush()
    JobRepository(session).put_all_events(events)
    if any(JobState(row.state).terminal for row in rows):
        JobRepository(session).next_numbers(1)  # of a stream's end, which follows on the event


def last_step(row: JobRow) -> int:
    """The newest step that is known of the job, for an event of the service; 0 before the first."""
    return int(row.newest_sample["sample"]["step"]) if row.newest_sample else 0
