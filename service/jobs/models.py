"""The rows of the jobs domain. Times are unix seconds, as in the workers' reports."""

from __future__ import annotations

import hashlib
from typing import Any

from sqlalchemy import JSON, ForeignKey, Index, String, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from thinwire.service.db import Base

JsonDict = dict[str, Any]


def key_of(who: str, key: str) -> str:
    """What is stored of somebody's Idempotency-Key: two people may have chosen the same."""
    return hashlib.sha256(f"{who}\0{key}".encode()).hexdigest()


class JobRow(Base):
    """One job. `version` is the optimistic lock: a change on a row that has moved meanwhile is refused."""

    __tablename__ = "jobs"

    id: Mapped[str] = mapped_column(String(80), primary_key=True)
    name: Mapped[str] = mapped_column(String(63))
    spec: Mapped[JsonDict] = mapped_column(JSON)
    spec_digest: Mapped[str] = mapped_column(String(64))
    idempotency_key: Mapped[str | None] = mapped_column(String(255), unique=True)
    """The `key_of` who submitted it; the key itself where a version before that did."""
    token_hash: Mapped[str] = mapped_column(String(64), unique=True)
    state: Mapped[str] = mapped_column(String(16), index=True)
    reason: Mapped[str | None] = mapped_column(default=None)
    attempt: Mapped[int] = mapped_column(default=1)
    max_attempts: Mapped[int]
    created_at: Mapped[float] = mapped_column(index=True)
    started_at: Mapped[float | None] = mapped_column(default=None)
    finished_at: Mapped[float | None] = mapped_column(default=None)
    newest_sample: Mapped[JsonDict | None] = mapped_column(JSON(none_as_null=True), default=None)
    """{"attempt", "sample"}: kept here, so that a list of jobs need not search all samples."""
    newest_validation: Mapped[JsonDict | None] = mapped_column(JSON(none_as_null=True), default=None)
    wanted_workers: Mapped[JsonDict | None] = mapped_column(JSON(none_as_null=True), default=None)
    """A WantedWorkers; None as long as nobody has asked for other numbers than the spec's."""
    newest_membership: Mapped[JsonDict | None] = mapped_column(JSON(none_as_null=True), default=None)
    """A membership.Membership: what the workers have last said of their number."""
    summary: Mapped[JsonDict | None] = mapped_column(JSON(none_as_null=True), default=None)
    failure: Mapped[JsonDict | None] = mapped_column(JSON(none_as_null=True), default=None)
    ticket_hash: Mapped[str | None] = mapped_column(String(64), index=True, default=None)
    """Of the ticket of the attempt that was submitted last; None where drivers need none."""
    claimant_hash: Mapped[str | None] = mapped_column(String(64), default=None)
    """Of the secret of who has used it; None as long as nobody has."""
    submitted_by: Mapped[str | None] = mapped_column(String(63), default=None)
    """The name of the token; None where a version before names submitted it."""
    version: Mapped[int] = mapped_column()

    __mapper_args__ = {"version_id_col": version}  # noqa: RUF012 - what SQLAlchemy asks for


class ServiceRow(Base):
    """Which service this is, whoever owns the database at the time; the table has one row."""

    __tablename__ = "service"

    id: Mapped[str] = mapped_column(String(16), primary_key=True)


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
    )

    id: Mapped[int] = mapped_column(primary_key=True)
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
