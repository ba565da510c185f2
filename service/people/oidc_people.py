"""Who has come by the issuer: whom each name belongs to, who is blocked.

The issuer's `sub` is who somebody is, and nothing else of a token is (OpenID Connect Core 1.0, section 5.7). Jobs,
packages, budgets and the audit go by names. So the first who comes with a name has it, by this `sub`, and keeps it
whatever the issuer calls them later; another one who comes with it is refused until an operator has released it. Who
has no role leaves no row: of some issuers everybody in the world is a person.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

from sqlalchemy import ColumnElement, String, UniqueConstraint, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Mapped, Session, mapped_column

from thinwire.contract.people import IssuerPerson, IssuerPersonList, Role
from thinwire.contract.projects import DEFAULT, EVERY
from thinwire.service.auth import Person, token_hash
from thinwire.service.cursors import cursor, key_of
from thinwire.service.db import Base, Database
from thinwire.service.errors import Forbidden, PersonNotFound, Unauthorized
from thinwire.service.occasions import Occasion
from thinwire.service.people.audit import Change
from thinwire.service.people.last_seen import LastSeen

logger = logging.getLogger(__name__)

PEOPLE: Final = "people"
"""The list's name in its cursors."""


class SignOnMissing(Exception):
    """The settings ask for an issuer's sign-on, and something is missing for it; the message says what to do."""


class SignOnFailed(Exception):
    """Somebody's sign-on for the page has failed; the message says why to the log. reason: a word for the page."""

    def __init__(self, reason: str, why: str) -> None:
        super().__init__(why)
        self.reason = reason


class IssuerPersonRow(Base):
    """One person. subject: the issuer's; None for a name that was blocked before anybody came with it."""

    __tablename__ = "issuer_people"
    __table_args__ = (UniqueConstraint("issuer", "subject", name="issuer_people_subject"),)

    name: Mapped[str] = mapped_column(String(63), primary_key=True)
    issuer: Mapped[str] = mapped_column(String(500))
    subject: Mapped[str | None] = mapped_column(String(255), default=None)
    role: Mapped[str | None] = mapped_column(String(16), default=None)
    first_at: Mapped[float]
    last_at: Mapped[float | None] = mapped_column(default=None)
    blocked_at: Mapped[float | None] = mapped_column(default=None)
    blocked_by: Mapped[str | None] = mapped_column(String(63), default=None)


class IssuerPeople:
    """People of one issuer. Methods may be called from any thread.

    issuer: None where there is none now: then nobody comes, and who has come is listed. roles: of each group; nobody
    has more than the highest of theirs, and none without one. projects: of each group, EVERY for all; who is in several
    has in each the role of the groups that are of it, or of none. clock: unix seconds.
    """

    def __init__(
        self,
        db: Database,
        issuer: str | None,
        roles: Mapping[str, Role],
        projects: Mapping[str, str],
        *,
        clock: Callable[[], float],
    ) -> None:
        self._db, self.issuer, self._roles, self._projects, self._clock = db, issuer, roles, projects, clock
        self._seen = LastSeen[str, tuple[float, Role]]()
        self._prunes = Occasion(clock)

    def admit(self, session: Session, subject: str, name: str, groups: Collection[str]) -> Person:
        """The person of this subject, who has come with a token; a new one is written down.

        Raises: Forbidden for one without a role, or with another's name; Unauthorized for one who is blocked.
        """
        role = self._role(groups, name)
        row = session.scalar(select(IssuerPersonRow).where(*self._is(subject)))
        if row is None:
            row = self._new(subject, name, role)
        return self._person(row, role, groups)

    def of_session(self, session: Session, name: str, owner: str, groups: Collection[str]) -> Person:
        """The same of one who has signed in to the page, with these groups. owner: as `owner_of` has it.

        Raises Forbidden, Unauthorized.
        """
        row = session.get(IssuerPersonRow, name)
        if self.issuer is None or row is None or row.issuer != self.issuer:
            raise Unauthorized("whom the issuer of this session knows is no longer taken here: sign in again")
        if row.subject is None or owner_of(row.issuer, row.subject) != owner:
            raise Unauthorized(f"{name} is somebody else's name now: sign in again")
        return self._person(row, self._role(groups, name), groups)

    def block(self, name: str, change: Change) -> None:
        """From now on this person is refused, whatever token comes; also one who has not come yet. Again: no change."""
        with self._db.write() as session:
            row = session.get(IssuerPersonRow, name)
            if row is None:
                row = IssuerPersonRow(name=name, issuer=self.issuer or "", first_at=self._clock())
                session.add(row)
            if row.blocked_at is None:
                row.blocked_at, row.blocked_by = self._clock(), change.who
            change.write(session, about=f"{name} {row.issuer}")

    def unblock(self, name: str, change: Change) -> None:
        """They are taken again, as soon as they come. Raises PersonNotFound."""
        with self._db.write() as session:
            row = session.get(IssuerPersonRow, name)
            if row is None:
                raise PersonNotFound(name)
            row.blocked_at = row.blocked_by = None
            if row.subject is None:
                session.delete(row)
            change.write(session, about=f"{name} {row.issuer}")

    def release(self, name: str, change: Change) -> None:
        """Forget whose name it is: the next who comes with it has it, and what is kept under it. Sessions end.

        Raises PersonNotFound.
        """
        with self._db.write() as session:
            row = session.get(IssuerPersonRow, name)
            if row is None:
                raise PersonNotFound(name)
            session.delete(row)
            change.write(session, about=f"{name} {row.issuer} {row.subject}")

    def list(self, limit: int, after: str | None) -> IssuerPersonList:
        """Up to `limit` of them, by name; with `after`, `next` of an earlier list, those that follow.

        Raises InvalidRequest.
        """
        query = select(IssuerPersonRow).order_by(IssuerPersonRow.name).limit(limit + 1)
        if after is not None:
            query = query.where(IssuerPersonRow.name > key_of(PEOPLE, after, (str,), "after")[0])
        with self._db.read() as session:
            rows = session.scalars(query).all()
        more, rows = len(rows) > limit, rows[:limit]
        return IssuerPersonList(
            people=[self._view(row) for row in rows], next=cursor(PEOPLE, rows[-1].name) if more else None
        )

    def prune(self) -> None:
        """Write who has come, once in a while."""
        if not self._prunes.has_come():
            return
        if seen := self._seen.take():
            with self._db.write() as session:
                for name, (at, role) in seen.items():
                    query = update(IssuerPersonRow).where(IssuerPersonRow.name == name)
                    session.execute(query.values(last_at=at, role=role.value))

    def _new(self, subject: str, name: str, role: Role) -> IssuerPersonRow:
        now = self._clock()
        try:
            with self._db.write() as session:
                row = session.scalar(select(IssuerPersonRow).where(*self._is(subject)))
                if row is not None:  # a request beside this one was faster
                    return row
                row = session.get(IssuerPersonRow, name)
                if row is not None and (row.issuer, row.subject) == (self.issuer, subject):
                    return row  # it has come between the two looks, on PostgreSQL
                if row is not None and row.subject is None:
                    row.issuer, row.subject = str(self.issuer), subject  # whom the block waits for
                elif row is not None:
                    logger.warning("issued_name_taken name=%s issuer=%s", name, self.issuer)
                    raise Forbidden(
                        f"{name} is the name of somebody else, whom the issuer knows as another subject: use that "
                        "account, or ask the operator to release the name (`thinwire people release`)"
                    )
                else:
                    row = IssuerPersonRow(name=name, issuer=str(self.issuer), subject=subject, first_at=now)
                    session.add(row)
                row.last_at, row.role = now, role.value
                session.flush()
        except IntegrityError:  # PostgreSQL lets two look before one writes
            with self._db.read() as session:
                row = session.scalar(select(IssuerPersonRow).where(*self._is(subject)))
            if row is None:
                raise Forbidden(f"{name} has just become the name of somebody else: ask the operator") from None
            return row
        logger.info("issued_person_new name=%s issuer=%s role=%s", name, self.issuer, role)
        return row

    def _is(self, subject: str) -> tuple[ColumnElement[bool], ...]:
        return IssuerPersonRow.issuer == self.issuer, IssuerPersonRow.subject == subject

    def _person(self, row: IssuerPersonRow, role: Role, groups: Collection[str]) -> Person:
        if row.blocked_at is not None:
            when = f"{_time(row.blocked_at):%Y-%m-%d %H:%M}"
            raise Unauthorized(f"{row.name} was blocked here on {when} UTC: ask the operator")
        now = self._clock()
        self._seen.note(row.name, (now, role), now, row.last_at, changed=row.role != role.value)
        (project, role), *others = self._memberships(groups, role)
        elsewhere = tuple((name, of_it) for name, of_it in others if name is not None)
        return Person(row.name, role, project, issuer=row.issuer, elsewhere=elsewhere)

    def _memberships(self, groups: Collection[str], highest: Role) -> Sequence[tuple[str | None, Role]]:
        """Projects, None for all of them, and the role in each: at least one, in the order of the settings.

        As a new token's, where no group says it. Where the first is EVERY it is the only one; a later one adds nothing.
        """
        named = list(dict.fromkeys(project for group, project in self._projects.items() if group in groups))
        if not named:
            named = [EVERY if highest is Role.OPERATOR else DEFAULT]
        if named[0] == EVERY:
            return [(None, highest)]
        found = []
        for name in named:
            of_it = [one for one in groups if self._projects.get(one, name) in (name, EVERY)]
            if name != EVERY and (role := self._highest(of_it)) is not None:
                found.append((name, role))
        return found

    def _highest(self, groups: Iterable[str]) -> Role | None:
        return max((self._roles[one] for one in groups if one in self._roles), key=list(Role).index, default=None)

    def _role(self, groups: Iterable[str], name: str) -> Role:
        """The highest that these groups give. Raises Forbidden where it is none."""
        if (found := self._highest(groups)) is None:
            raise Forbidden(
                f"{name} has no role here: the issuer names none of the groups that THINWIRE_OIDC_ROLES gives one"
            )
        return found

    def _view(self, row: IssuerPersonRow) -> IssuerPerson:
        return IssuerPerson(
            name=row.name,
            issuer=row.issuer,
            subject=row.subject,
            role=None if row.role is None else Role(row.role),
            first_at=_time(row.first_at),
            last_at=None if row.last_at is None else _time(row.last_at),
            blocked_at=None if row.blocked_at is None else _time(row.blocked_at),
            blocked_by=row.blocked_by,
        )


def owner_of(issuer: str, subject: str) -> str:
    """Who has a session, in the place of the SHA-256 of a token."""
    return token_hash(f"{issuer} {subject}")


def kept_groups(groups: Iterable[str]) -> str:
    """As a session keeps them."""
    return json.dumps(sorted(groups))


def groups_kept(text: str) -> list[str]:
    """The same back."""
    found: list[str] = json.loads(text)
    return found


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
