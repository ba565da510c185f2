"""What streams tell of jobs, read out of the database in the order of its numbers, and as bytes of server-sent events.

A transaction gives out its numbers last and holds their counter until it is committed (`JobRepository.next_numbers`).
So what is read up to the counter is all that there is up to there, with PostgreSQL too, where transactions that run
beside one another may be committed in any order: a reader that goes on from there has missed nothing and meets nothing
again, whichever process it asks.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from fastapi.sse import format_sse_event
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from thinwire.contract.jobs import TERMINAL, JobState
from thinwire.contract.redaction import redacted
from thinwire.contract.reports import EventKind
from thinwire.contract.streams import END, EVENT, GAP, SAMPLE, STATE
from thinwire.service.jobs.repository import (
    EVENT_BYTES,
    IN_PART,
    EventRow,
    JobRow,
    ServiceRow,
    first_rows,
    json_bytes,
)

MOST_ROWS, MOST_BYTES = 500, 512 << 10
"""Of events that are read at once."""
MOST_NAMED: Final = 50
"""Jobs that a query names; of more the events of all are read, and those of others passed over."""
_STATES: Final = {EventKind(f"job_{state.lower()}").value: state for state in JobState}
_ENDS: Final = [kind for kind, state in _STATES.items() if state in TERMINAL]


@dataclass(frozen=True, slots=True)
class Message:
    """One event of a stream. number: its id. wire: as it is sent. state: of a `state`."""

    number: int
    job_id: str
    event: str
    wire: bytes
    state: JobState | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Page:
    """What was told after a number. upto: of nothing else up to here was any told. more: there is more to be read."""

    messages: list[Message]
    upto: int
    more: bool


@dataclass(frozen=True, slots=True)
class JobPage(Page):
    """The same of one job. known: the largest number that was given. last: of its last event, where it is over."""

    known: int
    last: int | None


@dataclass(frozen=True, slots=True)
class AllPage(Page):
    """The same of all jobs. known: as above. gone: the largest of the numbers that went with a deleted job."""

    known: int
    gone: int


@dataclass(frozen=True, slots=True)
class Look(Page):
    """The same of many jobs. gone: those that have been deleted. projects: of the jobs of the messages, as far as they
    were asked for; of a job that was deleted since it has none.
    """

    gone: frozenset[str]
    projects: Mapping[str, str]


def numbers(session: Session) -> tuple[int, int]:
    """The largest number that was given, and the largest of those that went with a deleted job."""
    found = session.execute(select(ServiceRow.numbers, ServiceRow.numbers_gone)).one()
    return int(found[0]), int(found[1])


def page_of_job(session: Session, job_id: str, after: int | None) -> JobPage | None:
    """What was told of a job after a number, or after now, to its `end` where it is over; None where there is no such
    job.
    """
    known, _ = numbers(session)
    after = known if after is None else after
    columns = select(JobRow.id, JobRow.state, JobRow.reason, JobRow.newest_sample)
    row = session.execute(columns.where(JobRow.id == job_id)).one_or_none()
    if row is None:
        return None
    upto, last = known, None
    if JobState(row.state).terminal and (found := _last_number(session, job_id)) <= known:
        last = upto = found
    events, more = _events(session, after, upto, [job_id])
    upto = events[-1].number if more else upto
    messages = _in_order(events, _samples([row], after, upto))
    if last is not None and not more and after <= last:
        messages.append(end(job_id, last + 1, JobState(row.state), row.reason))
    return JobPage(messages, upto, more, known, last)


def _last_number(session: Session, job_id: str) -> int:
    """Of the event with which a job that is over has ended: what comes of it later its stream no longer tells."""
    mine = select(func.min(EventRow.id)).where(EventRow.job_id == job_id)
    last = session.scalar(mine.where(EventRow.kind.in_(_ENDS)))
    return int(last or session.scalar(select(func.max(EventRow.id)).where(EventRow.job_id == job_id)) or 0)


def page(session: Session, after: int | None, project: str | None) -> AllPage:
    """States and events of all jobs after a number, or after now, or of those of one project."""
    known, gone = numbers(session)
    after = known if after is None else after
    events, more = _events(session, after, known, None, project)
    return AllPage(events, events[-1].number if more else known, more, known, gone)


def of_project(session: Session, jobs: Collection[str], project: str | None) -> frozenset[str]:
    """Those of these jobs that there are in the project; None: in any."""
    query = select(JobRow.id).where(JobRow.id.in_(sorted(jobs)))
    return frozenset(session.scalars(query if project is None else query.where(JobRow.project == project)))


def look(session: Session, after: int, jobs: Collection[str], *, everything: bool, projects: bool) -> Look:
    """States and events after a number, of these jobs or of all, and the newest samples of these. projects: whose the
    jobs are is wanted too.
    """
    upto, _ = numbers(session)
    if upto == after:
        return Look([], upto, more=False, gone=frozenset(), projects={})
    events, more = _events(session, after, upto, None if everything or len(jobs) > MOST_NAMED else sorted(jobs))
    upto = events[-1].number if more else upto
    rows: list[Any] = []
    named = sorted(jobs)
    for first in range(0, len(named), IN_PART):
        some = JobRow.id.in_(named[first : first + IN_PART])
        rows += session.execute(select(JobRow.id, JobRow.newest_sample).where(some)).all()
    gone = frozenset(jobs) - {row.id for row in rows}
    whose: dict[str, str] = {}
    told_of = sorted({one.job_id for one in events}) if projects else []
    for first in range(0, len(told_of), IN_PART):
        some = JobRow.id.in_(told_of[first : first + IN_PART])
        whose |= {row.id: row.project for row in session.execute(select(JobRow.id, JobRow.project).where(some))}
    return Look(_in_order(events, _samples(rows, after, upto)), upto, more, gone, whose)


def end(job_id: str, number: int, state: JobState | None, reason: str | None) -> Message:
    """The last message of a job's stream. state: None where the job was deleted."""
    said = {"job_id": job_id, "state": state, "reason": reason and redacted(reason)}
    return _message(number, job_id, END, said)


def gap(after: int, reason: str) -> bytes:
    """A message that something is missing after this number."""
    return wire(GAP, str(after), {"after": after, "reason": reason})


def _events(
    session: Session, after: int, upto: int, jobs: Sequence[str] | None, project: str | None = None
) -> tuple[list[Message], bool]:
    """The first of those between two numbers, of some jobs, of a project or of all, and whether there are more."""
    query = select(EventRow, json_bytes(EventRow.fields) + EVENT_BYTES)
    query = query.where(EventRow.id > after, EventRow.id <= upto).order_by(EventRow.id)
    if jobs is not None:
        query = query.where(EventRow.job_id.in_(jobs))
    if project is not None:
        query = query.join(JobRow, JobRow.id == EventRow.job_id).where(JobRow.project == project)
    return first_rows(session, query, MOST_ROWS, MOST_BYTES, _event)


def _event(row: EventRow) -> Message:
    about = {"job_id": row.job_id, "attempt": row.attempt, "step": row.step, "time": row.time}
    state = _STATES.get(row.kind)
    if state is None:
        return _message(row.id, row.job_id, EVENT, {**about, "kind": row.kind, "fields": row.fields})
    reason = row.fields.get("reason")
    return _message(row.id, row.job_id, STATE, {**about, "state": state, "reason": reason}, state, reason)


def _samples(rows: Sequence[Any], after: int, upto: int) -> list[Message]:
    """The newest sample of each job, where its number is between the two."""
    found = []
    for row in rows:
        newest = row.newest_sample or {}
        number = newest.get("number", 0)  # an earlier version gave none
        if after < number <= upto:
            said = {"job_id": row.id, "attempt": newest["attempt"], "sample": newest["sample"]}
            found.append(_message(number, row.id, SAMPLE, said))
    return found


def _in_order(*parts: list[Message]) -> list[Message]:
    return sorted((one for part in parts for one in part), key=lambda one: one.number)


def _message(
    number: int,
    job_id: str,
    event: str,
    data: Mapping[str, object],
    state: JobState | None = None,
    reason: str | None = None,
) -> Message:
    return Message(number, job_id, event, wire(event, str(number), data), state, reason)


def wire(event: str, number: str, data: Mapping[str, object]) -> bytes:
    """As it is sent, in ASCII: half of a surrogate pair, which an earlier version took, can be sent too."""
    try:
        text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    except ValueError:  # a number that JSON does not have, which a job can say in an event
        text = json.dumps(json.loads(json.dumps(data), parse_constant=lambda name: None), separators=(",", ":"))
    return format_sse_event(data_str=text, event=event, id=number)
