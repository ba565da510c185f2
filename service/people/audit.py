"""Who has changed what? A line for each change that a person asks for, done or refused, in the database and the log.

What is done writes its line in its own transaction (`Change.write`): there is no change without one. The middleware
writes the lines of the others, of what was refused and of what needed no transaction, before the answer is sent. No
line holds a secret: of a request it takes names alone, never its body or its headers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from fastapi import Request
from sqlalchemy import Boolean, ColumnElement, Index, Select, String, delete, func, literal_column, select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Mapped, Session, mapped_column
from starlette.concurrency import run_in_threadpool
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from thinwire.contract.people import AuditLine, AuditList, Role
from thinwire.contract.projects import DEFAULT
from thinwire.contract.redaction import redacted
from thinwire.service.auth import READS, Caller
from thinwire.service.db import Base, Database
from thinwire.service.errors import NotOwner, TooMuch, error_response
from thinwire.service.jobs.rate import Rates
from thinwire.service.jobs.repository import JobRow
from thinwire.service.occasions import Occasion
from thinwire.service.people.project_rows import ProjectRow

logger = logging.getLogger(__name__)

SERVICE = "service"
"""Who changes what nobody has asked for."""
DELETE = "delete"
"""What is done to a job that is deleted: the name of the route."""
CHANGES_NOTHING = "/v1/jobs:validate"
"""A POST that only asks. It counts among a person's changes, for it costs as much, and leaves no line."""
MOST_LINES = 1_000_000
"""About 200 MB. Beyond, the oldest go of whom most lines are, done or refused: nobody pushes out what others did."""
AT_ONCE = 10_000
"""Lines removed in one transaction."""


class AuditRow(Base):
    """One change. job_id refers to nothing: the line outlives the job."""

    __tablename__ = "audit"
    __table_args__ = (Index("audit_of_project", "project", "id"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    time: Mapped[float] = mapped_column(index=True)
    who: Mapped[str] = mapped_column(String(63))
    role: Mapped[str | None] = mapped_column(String(16), default=None)
    what: Mapped[str] = mapped_column(String(64))
    job_id: Mapped[str | None] = mapped_column(String(80), index=True, default=None)
    about: Mapped[str | None] = mapped_column(String(200), default=None)
    project: Mapped[str | None] = mapped_column(String(63), default=None)
    address: Mapped[str | None] = mapped_column(String(64), default=None)
    status: Mapped[int]
    issuer: Mapped[str | None] = mapped_column(String(500), default=None)


@dataclass(slots=True)
class Change:
    """A change that is under way. status: what will be answered, or was. project: of what is changed, else of who asks.
    written: its line is in the database.
    """

    who: str
    role: Role | None
    what: str
    address: str | None
    now: float
    status: int
    job_id: str | None = None
    about: str | None = None
    issuer: str | None = None
    project: str | None = None
    written: bool = field(default=False, init=False)

    def write(self, session: Session, job_id: str | None = None, about: str | None = None) -> None:
        """Put the line into the transaction that makes the change. job_id, about: what it is of, where known by now."""
        self.job_id, self.about = job_id or self.job_id, about or self.about
        session.add(
            AuditRow(
                time=self.now,
                who=self.who,
                role=self.role,
                what=self.what,
                job_id=self.job_id,
                about=self.about and self.about[:200],
                project=self.project,
                address=self.address,
                status=self.status,
                issuer=self.issuer,
            )
        )
        session.flush()
        self.written = True

    def log(self) -> None:
        """The same line in the log."""
        logger.info(
            "audit who=%s role=%s what=%s job_id=%s about=%s address=%s status=%d issuer=%s",
            *(self.who, self.role or "-", self.what, self.job_id or "-", self.about or "-", self.address or "-"),
            *(self.status, self.issuer or "-"),
        )


async def change_of(request: Request) -> Change:
    """Dependency: the change that this request asks for, named by its route."""
    change: Change = request.state.change
    change.what = request.scope["route"].name
    change.status = request.scope["route"].status_code or 200
    return change


class Audited:
    """ASGI middleware behind the guard: every request of a person that may change something leaves a line.

    rates: how many of those one person may send; a request beyond is refused at once, and leaves none.
    clock: unix seconds.
    """

    def __init__(self, app: ASGIApp, db: Database, clock: Callable[[], float], rates: Rates) -> None:
        self.app = app
        self._db, self._clock, self._rates = db, clock, rates

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and see that its line is written before its answer goes out."""
        caller: Caller | None = scope.get("state", {}).get("caller")
        if scope["type"] != "http" or caller is None or caller.person is None or scope["method"] in READS:
            await self.app(scope, receive, send)
            return
        if wait_s := self._rates.take(caller.person.name, 1.0, time.monotonic()):
            much = TooMuch(f"{caller.person.name} asks for more changes than one person may", wait_s)
            await error_response(much)(scope, receive, send)
            return
        if scope["path"].endswith(CHANGES_NOTHING):
            await self.app(scope, receive, send)
            return
        address = _plain((scope.get("client") or (None,))[0], 64)  # a trusted proxy may name anything
        what = _plain(scope["method"], 64) or "-"  # until its route names it
        person = caller.person
        change = Change(person.name, person.role, what, address, self._clock(), 500, issuer=person.issuer)
        change.project = person.project
        scope["state"]["change"] = change
        answered = False

        async def watch(message: Message) -> None:
            nonlocal answered
            if message["type"] == "http.response.start" and not answered:
                answered = True
                await run_in_threadpool(self._finish, change, scope, message["status"])
            await send(message)

        try:
            await self.app(scope, receive, watch)
        except Exception:
            if not answered:
                await run_in_threadpool(self._finish, change, scope, 500)
            raise

    def _finish(self, change: Change, scope: Scope, status: int) -> None:
        """Write the line that is missing: of a change that has written none, or that was answered otherwise."""
        missing = not change.written or status != change.status
        change.status = status
        route = scope.get("route")
        if not change.written and route is not None:
            change.what = route.name
        parameters = scope.get("path_params", {})
        change.job_id = change.job_id or _plain(parameters.get("job_id"), 80)
        change.about = change.about or _plain(parameters.get("name") or parameters.get("sha256"), 200)
        change.log()
        if not missing:
            return
        try:
            with self._db.write() as session:
                if change.project is None and change.job_id is not None:
                    change.project = session.scalar(select(JobRow.project).where(JobRow.id == change.job_id))
                change.write(session)
        except (NotOwner, SQLAlchemyError) as error:  # a service that stands by changes nothing either
            logger.error("audit_line_in_the_log_only reason=%s", error)


class Audit:
    """What is kept of the lines, for operators to read. Methods may be called from any thread.

    keep_days: lines are kept for so long. clock: unix seconds.
    """

    def __init__(self, db: Database, *, keep_days: float, clock: Callable[[], float]) -> None:
        self._db, self._keep_s, self._clock = db, keep_days * 86_400.0, clock
        self._prunes = Occasion(clock)

    def by_service(self, what: str) -> Change:
        """A change that the service makes by itself, such as of retention."""
        return Change(SERVICE, None, what, None, self._clock(), 200)

    def sign_in(self, who: str, role: Role | None, issuer: str, address: str, status: int) -> Change:
        """The sign-on of somebody whom an issuer has sent, which no token of theirs asks for."""
        return Change(who, role, "sign_in", _plain(address, 64), self._clock(), status, issuer=issuer)

    def lines(
        self, limit: int, before: int | None, who: str | None, job_id: str | None, project: str | None
    ) -> AuditList:
        """The newest lines, newest first: of one person, job or project, older than a line where that is given.

        Those of a project that was deleted, and whose name another one has now, are for those of all projects.
        """
        query = select(AuditRow).order_by(AuditRow.id.desc()).limit(limit + 1)
        if before is not None:
            query = query.where(AuditRow.id < before)
        if who is not None:
            query = query.where(AuditRow.who == who)
        if job_id is not None:
            query = query.where(AuditRow.job_id == job_id)
        if project is not None:
            began = select(ProjectRow.created_at).where(ProjectRow.name == project, ProjectRow.name != DEFAULT)
            since = func.coalesce(began.scalar_subquery(), 0.0)
            query = query.where(AuditRow.project == project, AuditRow.time >= since)
        with self._db.read() as session:
            rows = session.scalars(query).all()
        more, rows = len(rows) > limit, rows[:limit]
        return AuditList(lines=list(_views(rows)), next=rows[-1].id if more else None)

    def prune(self) -> None:
        """Remove some of what need not be kept any longer, oldest first."""
        if not self._prunes.has_come():
            return
        with self._db.read() as session:
            due = session.scalars(_oldest(AuditRow.time < self._clock() - self._keep_s).limit(AT_ONCE)).all()
            if not due:
                due = _beyond(session, AT_ONCE)
        if due:
            with self._db.write() as session:
                session.execute(delete(AuditRow).where(AuditRow.id.in_(due)))
            logger.info("audit_pruned lines=%d", len(due))
        if len(due) == AT_ONCE:
            self._prunes.come_again()


def deleted_jobs(session: Session, job_ids: Collection[str]) -> set[str]:
    """Which of these jobs have been deleted, as far as the lines go back."""
    found: set[str] = set()
    names = sorted(job_ids)
    for first in range(0, len(names), 500):
        done = (AuditRow.what == DELETE) & (AuditRow.status < 400)
        found.update(
            session.scalars(select(AuditRow.job_id).where(AuditRow.job_id.in_(names[first : first + 500]), done))
        )
    return found


def _oldest(which: ColumnElement[bool]) -> Select[int]:
    return select(AuditRow.id).where(which).order_by(AuditRow.id)


def _beyond(session: Session, limit: int) -> Sequence[int]:
    """The oldest lines of whom most are, done or refused, where there are too many in all."""
    last, first = session.execute(select(func.max(AuditRow.id), func.min(AuditRow.id))).one()
    if last is None or last - first < MOST_LINES:
        return []  # and it costs no count
    refused: ColumnElement[bool] = literal_column("audit.status >= 400", Boolean())
    groups = session.execute(select(AuditRow.who, refused, func.count()).group_by(AuditRow.who, refused)).all()
    who, was_refused, most = max(groups, key=lambda group: int(group[2]))
    too_many = most - _share([int(group[2]) for group in groups], MOST_LINES)
    if too_many <= 0:
        return []
    theirs = (AuditRow.who == who) & ((AuditRow.status >= 400) if was_refused else (AuditRow.status < 400))
    return session.scalars(_oldest(theirs).limit(min(too_many, limit))).all()


def _share(sizes: Iterable[int], room: int) -> int:
    """How many each may have, so that all fit in and those with fewer lose none; the largest where they do."""
    sizes = sorted(sizes)
    for before, size in enumerate(sizes):
        share = room // (len(sizes) - before)
        if size > share:
            return share
        room -= size
    return sizes[-1]


def _views(rows: Iterable[AuditRow]) -> Iterable[AuditLine]:
    for row in rows:
        yield AuditLine(
            number=row.id,
            time=datetime.fromtimestamp(row.time, UTC),
            who=row.who,
            issuer=row.issuer,
            role=Role(row.role) if row.role is not None else None,
            what=row.what,
            project=row.project,
            job_id=row.job_id,
            about=row.about,
            address=row.address,
            status=row.status,
        )


def _plain(given: object, longest: int) -> str | None:
    """As one word of a line, whatever a path held."""
    if not isinstance(given, str) or not given:
        return None
    given = redacted(given)
    return "".join(sign if sign.isascii() and sign.isprintable() and sign != " " else "?" for sign in given)[:longest]
