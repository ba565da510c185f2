"""Sessions: a browser that has shown a token once has a cookie from then on, and the token nowhere.

The cookie holds 256 random bits, and the database their SHA-256 beside that of the token. A session is worth what its
token is: at each request the token is looked up again, so one that is revoked, has expired or was rotated ends its
sessions at once. A session of somebody whom an issuer has sent has the groups that the issuer named then, and is worth
what these are worth now: who is blocked is out at once, and so is who has lost a group's role by the settings.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection
from typing import Final

from sqlalchemy import Index, String, Text, delete, select
from sqlalchemy.orm import Mapped, Session, mapped_column

from thinwire.service.auth import Caller, Person, token_hash
from thinwire.service.db import Base, Database
from thinwire.service.errors import Unauthorized
from thinwire.service.occasions import Occasion
from thinwire.service.people.audit import Change
from thinwire.service.people.oidc_people import IssuerPeople, groups_kept, kept_groups, owner_of
from thinwire.service.people.tokens import Callers

MOST_OF_TOKEN: Final = 50
"""Sessions of one token at once; one more ends the oldest: who signs in for each request fills no database."""


class SessionRow(Base):
    """One session. Times are unix seconds. token_hash: of a token, or of whom the issuer has sent: then `person`."""

    __tablename__ = "sessions"
    __table_args__ = (Index("sessions_of_token", "token_hash", "created_at"),)

    id_hash: Mapped[str] = mapped_column(String(64), primary_key=True)
    token_hash: Mapped[str] = mapped_column(String(64))
    created_at: Mapped[float]
    expires_at: Mapped[float] = mapped_column(index=True)
    person: Mapped[str | None] = mapped_column(String(63), default=None)
    person_groups: Mapped[str | None] = mapped_column(Text, default=None)


class Sessions:
    """Of all people. Methods may be called from any thread. lifetime_s: of a session. clock: unix seconds."""

    def __init__(
        self,
        db: Database,
        callers: Callers,
        people: IssuerPeople,
        *,
        lifetime_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._db, self._callers, self._people = db, callers, people
        self._lifetime_s, self._clock = lifetime_s, clock
        self._prunes = Occasion(clock)

    @property
    def lifetime_s(self) -> float:
        """Of a session."""
        return self._lifetime_s

    def begin(self, token: str, change: Change) -> str:
        """A session of who has this token, which is known to be right: what its cookie holds."""
        return self._begin(SessionRow(token_hash=token_hash(token)), self._lifetime_s, change)

    def begin_of(
        self, person: Person, subject: str, groups: Collection[str], lifetime_s: float, change: Change
    ) -> tuple[str, float]:
        """The same of somebody whom the issuer has sent, with these groups: the cookie, and how long it holds."""
        row = SessionRow(
            token_hash=owner_of(str(person.issuer), subject), person=person.name, person_groups=kept_groups(groups)
        )
        lifetime_s = min(lifetime_s, self._lifetime_s)
        return self._begin(row, lifetime_s, change), lifetime_s

    def _begin(self, row: SessionRow, lifetime_s: float, change: Change) -> str:
        cookie, now = secrets.token_urlsafe(32), self._clock()
        row.id_hash, row.created_at, row.expires_at = token_hash(cookie), now, now + lifetime_s
        with self._db.write() as session:
            others = select(SessionRow.id_hash).where(SessionRow.token_hash == row.token_hash)
            beyond = session.scalars(others.order_by(SessionRow.created_at.desc()).offset(MOST_OF_TOKEN - 1)).all()
            if beyond:
                session.execute(delete(SessionRow).where(SessionRow.id_hash.in_(beyond)))
            session.add(row)
            change.write(session)
        return cookie

    def end(self, cookie: str, change: Change) -> None:
        """From now on this cookie is worth nothing; ending it again changes nothing."""
        with self._db.write() as session:
            session.execute(delete(SessionRow).where(SessionRow.id_hash == token_hash(cookie)))
            change.write(session)

    def of(self, cookie: str, address: str) -> Caller | None:
        """Whose session it is; None where it is nobody's. It may block.

        Raises: Unauthorized for one that is over; TooManyWrongTokens; sqlalchemy's errors.
        """
        return self._callers.known(token_hash(cookie), address, self._found)

    def expires_at(self, cookie: str) -> float | None:
        """Unix seconds; None where there is no such session."""
        with self._db.read() as session:
            row = session.get(SessionRow, token_hash(cookie))
        return None if row is None else row.expires_at

    def _found(self, session: Session, digest: str) -> Caller | None:
        row = session.get(SessionRow, digest)
        if row is None:
            return None
        if row.expires_at <= self._clock():
            raise Unauthorized("this session has run out: sign in again")
        if row.person is not None:
            groups = groups_kept(row.person_groups or "[]")
            return Caller(person=self._people.of_session(session, row.person, row.token_hash, groups))
        person = self._callers.person(session, row.token_hash)
        if person is None:
            raise Unauthorized("the token of this session is no longer taken: sign in with another one")
        return Caller(person=person)

    def prune(self) -> None:
        """Forget those that are over; once in a while."""
        if not self._prunes.has_come():
            return
        over = SessionRow.expires_at <= self._clock()
        with self._db.read() as session:
            if session.scalar(select(SessionRow.id_hash).where(over).limit(1)) is None:
                return
        with self._db.write() as session:
            session.execute(delete(SessionRow).where(over))
