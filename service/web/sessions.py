"""Sessions: a browser that has shown a token once has a cookie from then on, and the token nowhere.

The cookie holds 256 random bits, and the database their SHA-256 beside that of the token. A session is worth what its
token is: at each request the token is looked up again, so one that is revoked, has expired or was rotated ends its
sessions at once.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Final

from sqlalchemy import Index, String, delete, select
from sqlalchemy.orm import Mapped, Session, mapped_column

from thinwire.service.auth import Caller, token_hash
from thinwire.service.db import Base, Database
from thinwire.service.errors import Unauthorized
from thinwire.service.people.audit import PAUSE_S, Change
from thinwire.service.people.tokens import Callers

MOST_OF_TOKEN: Final = 50
"""Sessions of one token at once; one more ends the oldest: who signs in for each request fills no database."""


class SessionRow(Base):
    """One session. Times are unix seconds."""

    __tablename__ = "sessions"
    __table_args__ = (Index("sessions_of_token", "token_hash", "created_at"),)

    id_hash: Mapped[str] = mapped_column(String(64), primary_key=True)
    token_hash: Mapped[str] = mapped_column(String(64))
    created_at: Mapped[float]
    expires_at: Mapped[float] = mapped_column(index=True)


class Sessions:
    """Of all people. Methods may be called from any thread. lifetime_s: of a session. clock: unix seconds."""

    def __init__(self, db: Database, callers: Callers, *, lifetime_s: float, clock: Callable[[], float]) -> None:
        self._db, self._callers, self._lifetime_s, self._clock = db, callers, lifetime_s, clock
        self._due = float("-inf")

    @property
    def lifetime_s(self) -> float:
        """Of a session."""
        return self._lifetime_s

    def begin(self, token: str, change: Change) -> tuple[str, float]:
        """A session of who has this token, which is known to be right: what its cookie holds, and when it ends."""
        cookie, now, digest = secrets.token_urlsafe(32), self._clock(), token_hash(token)
        row = SessionRow(
            id_hash=token_hash(cookie), token_hash=digest, created_at=now, expires_at=now + self._lifetime_s
        )
        with self._db.write() as session:
            others = select(SessionRow.id_hash).where(SessionRow.token_hash == digest)
            beyond = session.scalars(others.order_by(SessionRow.created_at.desc()).offset(MOST_OF_TOKEN - 1)).all()
            if beyond:
                session.execute(delete(SessionRow).where(SessionRow.id_hash.in_(beyond)))
            session.add(row)
            change.write(session)
        return cookie, row.expires_at

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
            raise Unauthorized("this session has run out: sign in again with your token")
        person = self._callers.person(session, row.token_hash)
        if person is None:
            raise Unauthorized("the token of this session is no longer taken: sign in with another one")
        return Caller(person=person)

    def prune(self) -> None:
        """Forget those that are over; once in a while."""
        now = self._clock()
        if now < self._due:
            return
        self._due = now + PAUSE_S
        over = SessionRow.expires_at <= now
        with self._db.read() as session:
            if session.scalar(select(SessionRow.id_hash).where(over).limit(1)) is None:
                return
        with self._db.write() as session:
            session.execute(delete(SessionRow).where(over))
