"""Lists of jobs: which of them a list has, in which order, and from where its next page goes on.

A page is found in two steps. The first reads keys alone, in order, from one index that holds all that a list is
filtered by (`jobs_listed`), or from that of a label (`job_labels_found`); the second reads the rows of the page. So a
filter that few of many jobs pass costs a walk through an index, and no row is read that is not shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import ColumnElement, ForeignKey, Index, Select, String, delete, exists, func, literal, select, tuple_
from sqlalchemy.orm import Mapped, Session, aliased, defer, mapped_column

from thinwire.contract.jobs import JobState
from thinwire.contract.labels import LONGEST_KEY, MOST_LABELS, changed
from thinwire.service.cursors import cursor, key_of
from thinwire.service.db import Base
from thinwire.service.errors import InvalidRequest
from thinwire.service.jobs.repository import JobRepository, JobRow, first_rows, json_bytes

JOBS = "jobs"
"""The list's name in its cursors."""


class LabelRow(Base):
    """One label of a job; it goes with the job. created_at: the job's, so that this table has the order of a list."""

    __tablename__ = "job_labels"
    __table_args__ = (Index("job_labels_found", "key", "value", "created_at", "job_id"),)

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    key: Mapped[str] = mapped_column(String(LONGEST_KEY), primary_key=True)
    value: Mapped[str] = mapped_column(String(63))
    created_at: Mapped[float]


@dataclass(frozen=True, slots=True)
class Filter:
    """Which jobs a list has: those that are all of this. None and empty: whatever they are.

    states: one of them. labels: all of them. name: exactly, or with a `*` at its end what it begins with. person: who
    has submitted it. text: somewhere in its id, in the person's name or in a label, `key=value`, in capitals or not.
    since, until: created at that unix time or later, and before it. project: of this one.
    """

    states: Sequence[JobState] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    name: str | None = None
    person: str | None = None
    text: str | None = None
    since: float | None = None
    until: float | None = None
    project: str | None = None


def place_of(session: Session, before: str, project: str | None) -> tuple[float, str]:
    """The key of the last job of a page. before: the cursor that it gave, or the id of a job, as lists gave it once.

    project: who asks sees no jobs but of this one. Raises InvalidRequest.
    """
    row = session.get(JobRow, before)
    if row is not None and project in (None, row.project):
        return row.created_at, row.id
    at, job_id = key_of(JOBS, before, (float, str), "before")
    return float(at), str(job_id)


def cursor_of(row: JobRow) -> str:
    """What the next page is asked for with, after this job."""
    return cursor(JOBS, row.created_at, row.id)


def newest(
    session: Session, limit: int, most_bytes: int, wanted: Filter, before: tuple[float, str] | None = None
) -> tuple[list[JobRow], bool]:
    """Up to `limit` jobs, newest first, without summaries, and whether there are more.

    Those that are wanted, and older than the place `before` where that is given; of `most_bytes` in all, but one at
    least.
    """
    keys = _keys(wanted, before).limit(limit + 1).subquery("page")
    size = json_bytes(JobRow.spec) + func.coalesce(json_bytes(JobRow.newest_sample), 0)
    query = select(JobRow, size).join(keys, JobRow.id == keys.c.id)
    query = query.order_by(keys.c.created_at.desc(), keys.c.id.desc())
    return first_rows(session, query.options(defer(JobRow.summary), defer(JobRow.failure)), limit, most_bytes)


def _keys(wanted: Filter, before: tuple[float, str] | None) -> Select[float, str]:
    """The keys of what is wanted, in the order of the list."""
    labels = list(wanted.labels.items())
    if labels:  # its index has the order of the list as well
        (key, value), *others = labels
        at, job_id = LabelRow.created_at, LabelRow.job_id
        query = select(at.label("created_at"), job_id.label("id"))
        query = query.where(LabelRow.key == key, LabelRow.value == value)
        for other, its_value in others:
            query = query.where(_has(job_id, other, its_value))
        if _conditions(wanted):
            query = query.join(JobRow, JobRow.id == job_id)
    else:
        at, job_id = JobRow.created_at, JobRow.id
        query = select(at.label("created_at"), job_id.label("id"))
    query = query.order_by(at.desc(), job_id.desc())
    if before is not None:
        query = query.where(tuple_(at, job_id) < tuple_(literal(before[0]), literal(before[1])))
    if wanted.since is not None:
        query = query.where(at >= wanted.since)
    if wanted.until is not None:
        query = query.where(at < wanted.until)
    return query.where(*_conditions(wanted))


def _conditions(wanted: Filter) -> list[ColumnElement[bool]]:
    """What a job's own columns have to be."""
    found: list[ColumnElement[bool]] = []
    if wanted.project is not None:
        found.append(JobRow.project == wanted.project)  # in whose index the list is walked
    if wanted.states:
        # Of jobs that are not over there are few: the index of states finds them. Of the others there are many, and
        # that index would have to be sorted.
        few = not any(state.terminal for state in wanted.states)
        column = JobRow.state if few else _walked(JobRow.state)
        found.append(column.in_([state.value for state in wanted.states]))
    if wanted.person is not None:
        found.append(_walked(JobRow.submitted_by) == wanted.person)
    if wanted.name is not None:
        begin = wanted.name.removesuffix("*")
        whole = begin == wanted.name
        found.append(JobRow.name == begin if whole else func.substr(JobRow.name, 1, len(begin)) == begin)
    if wanted.text is not None:
        text = wanted.text.lower()
        label = func.lower(LabelRow.key + "=" + LabelRow.value).contains(text, autoescape=True)
        found.append(
            func.lower(JobRow.id).contains(text, autoescape=True)
            | func.lower(JobRow.submitted_by).contains(text, autoescape=True)
            | JobRow.id.in_(select(LabelRow.job_id).where(label))
        )
    return found


def _walked(column: Any) -> ColumnElement[str]:
    """The column, to be compared in the index that is walked: no other one is chosen for it, and sorted."""
    return func.coalesce(column, "")


def _has(job_id: Any, key: str, value: str) -> ColumnElement[bool]:
    other = aliased(LabelRow)
    return exists().where(other.job_id == job_id, other.key == key, other.value == value)


def put_labels(session: Session, row: JobRow, labels: Mapping[str, str]) -> None:
    """Let a job, which has none there, be found by these labels."""
    session.add_all(
        LabelRow(job_id=row.id, key=key, value=value, created_at=row.created_at) for key, value in labels.items()
    )
    session.flush()


def relabel(session: Session, row: JobRow, change: Mapping[str, str | None]) -> bool:
    """Set and take away labels of a job that is locked; whether that has changed anything. Raises InvalidRequest.

    The row's version stays: nothing that is decided of a job depends on them.
    """
    labels = changed(row.labels, change)
    if labels == row.labels:
        return False
    if len(labels) > MOST_LABELS:
        words = f"must leave at most {MOST_LABELS} labels, and would leave {len(labels)}: take some away with null"
        raise InvalidRequest.at("labels", None, words)
    JobRepository(session).note([row.id], labels=labels)
    session.execute(delete(LabelRow).where(LabelRow.job_id == row.id))
    put_labels(session, row, labels)
    return True
