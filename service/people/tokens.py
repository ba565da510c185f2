"""People's tokens: made, listed, revoked, recognised; and the operator's own, in a file of the home.

The database has the SHA-256 of each, and nobody its text. `Callers` says whose token it is: the operator's is compared;
people's, jobs' and tickets are looked up by their SHA-256, which is indexed. A wrong token that comes again costs no
look-up for some seconds. An address that sends many different wrong ones is told to wait (429). A right one is taken
from there all the same, for behind a proxy all people have one address.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import stat
import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from math import ceil
from pathlib import Path

from sqlalchemy import Index, String, delete, select, text, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Mapped, Session, mapped_column

from thinwire.contract.files import private_folder, write_private
from thinwire.contract.people import OPERATOR, MadeToken, NewToken, Role, TokenItem, TokenList
from thinwire.contract.projects import DEFAULT, EVERY
from thinwire.service.auth import Caller, Person, new_token, token_hash
from thinwire.service.cursors import cursor, key_of
from thinwire.service.db import Base, Database
from thinwire.service.errors import (
    InvalidRequest,
    ProjectNotFound,
    TokenExists,
    TokenNotFound,
    TooManyWrongTokens,
    Unauthorized,
)
from thinwire.service.jobs.rate import Rates
from thinwire.service.jobs.repository import JobRepository
from thinwire.service.occasions import Occasion
from thinwire.service.people.audit import SERVICE, Change
from thinwire.service.people.last_seen import LastSeen
from thinwire.service.people.project_rows import locked

logger = logging.getLogger(__name__)

TOKENS = "tokens"
"""The list's name in its cursors."""
PREFIX = "twp_"
"""Of every token of a person: who searches files for secrets finds it."""
DAY_S = 86_400.0
WRONG_S = 5.0
"""How long a wrong token is remembered as wrong."""
MOST_REMEMBERED = 4096
TICKET_CHARACTERS = 64
"""A ticket follows from its job's token: it may be asked for before it holds, and holds a moment later."""
GUESSES, GUESSES_PER_S = 50.0, 1.0
"""Wrong tokens that an address may send before it is told to wait, and how many it gets back."""
LEAST_CHARACTERS = 16
LOOK_S = 1.0
"""Between two looks at the file."""


class TokenRow(Base):
    """One token. A name has at most one that is not revoked; those that are stay for a while, to say so. One that has
    expired counts as revoked from then on as soon as its name is given to another.
    """

    __tablename__ = "tokens"
    __table_args__ = (
        Index(
            "tokens_one_of_a_name",
            "name",
            unique=True,
            sqlite_where=text("revoked_at IS NULL"),
            postgresql_where=text("revoked_at IS NULL"),
        ),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(String(63))
    token_hash: Mapped[str] = mapped_column(String(64), unique=True)
    role: Mapped[str] = mapped_column(String(16))
    project: Mapped[str | None] = mapped_column(String(63), default=None)
    """None: all of them."""
    created_at: Mapped[float]
    created_by: Mapped[str] = mapped_column(String(63))
    last_used_at: Mapped[float | None] = mapped_column(default=None)
    expires_at: Mapped[float | None] = mapped_column(default=None)
    revoked_at: Mapped[float | None] = mapped_column(default=None)


class Tokens:
    """People's tokens. Methods may be called from any thread.

    keep_days: a token that is no longer valid is listed, and says why it is refused, for so long. clock: unix seconds.
    """

    def __init__(self, db: Database, *, keep_days: float, clock: Callable[[], float]) -> None:
        self._db, self._keep_s, self._clock = db, keep_days * DAY_S, clock
        self._used = LastSeen[int, float]()
        self._prunes = Occasion(clock)

    def create(self, asked: NewToken, change: Change, project: str | None) -> MadeToken:
        """A new token, with its text, which is not shown again. project: of who asks, who makes none for another one.

        Raises: InvalidRequest, ProjectNotFound, TokenExists.
        """
        if asked.name in (OPERATOR, SERVICE):
            words = f"must be another name: {OPERATOR!r} has the token in the home, {SERVICE!r} is the service itself"
            raise InvalidRequest.at("name", asked.name, words)
        given = asked.project or project or (EVERY if asked.role is Role.OPERATOR else DEFAULT)
        if project not in (None, given):
            raise ProjectNotFound(given)
        token = PREFIX + secrets.token_urlsafe(32)
        now = self._clock()
        row = TokenRow(
            name=asked.name,
            token_hash=token_hash(token),
            role=asked.role.value,
            project=None if given == EVERY else given,
            created_at=now,
            created_by=change.who,
            expires_at=None if asked.days is None else now + asked.days * DAY_S,
        )
        try:
            with self._db.write() as session:
                if row.project is not None:
                    locked(session, row.project)
                    change.project = row.project
                has_expired = (TokenRow.name == asked.name) & (TokenRow.expires_at <= now)
                session.execute(  # its name is free
                    update(TokenRow)
                    .where(has_expired, TokenRow.revoked_at.is_(None))
                    .values(revoked_at=TokenRow.expires_at)
                )
                session.add(row)
                session.flush()
                change.write(session, about=f"{asked.name}:{asked.role.value}")
        except IntegrityError as error:
            raise TokenExists(asked.name) from error
        return MadeToken(**_view(row, now).model_dump(), token=token)

    def list(self, limit: int, after: str | None, project: str | None) -> TokenList:
        """Up to `limit` tokens, by name, and of a name the newest first; with `after`, `next` of an earlier list,
        those that follow. project: those of this one alone. Raises InvalidRequest.
        """
        now = self._clock()
        query = select(TokenRow).order_by(TokenRow.name, TokenRow.id.desc()).limit(limit + 1)
        if after is not None:
            name, number = key_of(TOKENS, after, (str, int), "after")
            query = query.where((TokenRow.name > name) | ((TokenRow.name == name) & (TokenRow.id < number)))
        if project is not None:
            query = query.where(TokenRow.project == project)
        with self._db.read() as session:
            rows = session.scalars(query).all()
        more, rows = len(rows) > limit, rows[:limit]
        return TokenList(
            tokens=[_view(row, now) for row in rows],
            next=cursor(TOKENS, rows[-1].name, rows[-1].id) if more else None,
        )

    def move(self, name: str, to: str, change: Change) -> TokenItem:
        """From now on the token of this name is for another project, or for all; its jobs stay where they are.

        Raises: TokenNotFound, ProjectNotFound.
        """
        with self._db.write() as session:
            if to != EVERY:
                locked(session, to)
            query = select(TokenRow).where(TokenRow.name == name, TokenRow.revoked_at.is_(None)).with_for_update()
            row = session.scalar(query)
            if row is None:
                raise TokenNotFound(name)
            # A line of each, since neither project's operators learn the other's name.
            before, row.project = row.project, None if to == EVERY else to
            for project, words in ((before, "leaves"), (row.project, "comes")):
                change.project = project
                change.write(session, about=f"{name} {words}")
        return _view(row, self._clock())

    def ending(self, project: str | None) -> Sequence[tuple[str, str, float]]:
        """Name, project and end of each token that is valid and ends by itself; project: those of this one alone."""
        ends = (TokenRow.expires_at > self._clock()) & TokenRow.revoked_at.is_(None)
        query = select(TokenRow.name, TokenRow.project, TokenRow.expires_at).where(ends).order_by(TokenRow.name)
        if project is not None:
            query = query.where(TokenRow.project == project)
        with self._db.read() as session:
            return [(row.name, row.project or EVERY, float(row.expires_at)) for row in session.execute(query)]

    def revoke(self, name: str, change: Change, project: str | None) -> None:
        """From now on the token of this name is refused; revoking it again changes nothing. project: one of another
        is not found. Raises TokenNotFound.
        """
        with self._db.write() as session:
            query = select(TokenRow).where(TokenRow.name == name)
            found = session.scalars(query if project is None else query.where(TokenRow.project == project)).all()
            if not found:
                raise TokenNotFound(name)
            for row in found:
                if row.revoked_at is None:
                    row.revoked_at, change.project = self._clock(), row.project
            change.write(session, about=name)

    def person(self, session: Session, digest: str) -> Person | None:
        """Whose token has this SHA-256; None where nobody's has. Raises Unauthorized for one that is over."""
        row = session.scalar(select(TokenRow).where(TokenRow.token_hash == digest))
        if row is None:
            return None
        now = self._clock()
        if row.expires_at is not None and row.expires_at <= min(now, row.revoked_at or now):
            raise Unauthorized(f"this token, {row.name!r}, expired on {_day(row.expires_at)}: ask the operator")
        if row.revoked_at is not None:
            raise Unauthorized(f"this token, {row.name!r}, was revoked on {_day(row.revoked_at)}: ask the operator")
        self._used.note(row.id, now, now, row.last_used_at)
        return Person(row.name, Role(row.role), row.project, row.expires_at)

    def now(self) -> float:
        """Unix seconds."""
        return self._clock()

    def prune(self) -> None:
        """Write when tokens were last used, and forget those that have long been over; once in a while."""
        if not self._prunes.has_come():
            return
        used, old = self._used.take(), self._clock() - self._keep_s
        over = (TokenRow.revoked_at < old) | (TokenRow.expires_at < old)
        with self._db.read() as session:
            forgotten = session.scalars(select(TokenRow.id).where(over)).all()
        if not used and not forgotten:
            return
        with self._db.write() as session:
            for token_id, at in used.items():
                session.execute(update(TokenRow).where(TokenRow.id == token_id).values(last_used_at=at))
            if forgotten:
                session.execute(delete(TokenRow).where(TokenRow.id.in_(forgotten)))


def _view(row: TokenRow, now: float) -> TokenItem:
    return TokenItem(
        name=row.name,
        role=Role(row.role),
        project=row.project or EVERY,
        created_at=datetime.fromtimestamp(row.created_at, UTC),
        created_by=row.created_by,
        last_used_at=_time(row.last_used_at),
        expires_at=_time(row.expires_at),
        revoked_at=_time(row.revoked_at),
        valid=row.revoked_at is None and (row.expires_at is None or row.expires_at > now),
    )


def _time(seconds: float | None) -> datetime | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)


def _day(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")


class Callers:
    """Who sends a token. Methods may be called from any thread.

    grace_s: how long after its end a job's token is taken. issued: whose token an issuer has signed, asked with its
    text, from where it came, and a session of the database; None where there is no issuer. elapsed: seconds of a
    clock that does not go back.
    """

    def __init__(
        self,
        db: Database,
        home: OperatorToken,
        tokens: Tokens,
        *,
        grace_s: float,
        issued: Callable[[str, str, Session], Person | None] | None = None,
        elapsed: Callable[[], float] = time.monotonic,
    ) -> None:
        self._db, self._home, self._tokens, self._grace_s, self._elapsed = db, home, tokens, grace_s, elapsed
        self._issued = issued
        self._guesses = Rates(burst=GUESSES, rate=GUESSES_PER_S)
        self._wrong = _Remembered(WRONG_S)
        self.look_ups = 0
        """So many since the start, for who wants to know what strangers cost."""

    def of(self, token: str, address: str) -> Caller | None:
        """Who has this token or ticket; None where nobody has. It may block.

        Raises: Unauthorized for a token that is over; TooManyWrongTokens; sqlalchemy's errors.
        """
        digest = token_hash(token)
        self._home.look()
        if hmac.compare_digest(digest, self._home.hash):
            return Caller(person=Person(OPERATOR, Role.OPERATOR))
        if self._issued is not None and token.count(".") == 2:  # ours have no dot
            return self.known(digest, address, partial(self._of_issuer, self._issued, token, address))
        # The prefix saves a look-up. One job's token in 16 million begins so, too: then all are looked at.
        is_persons, may_hold_later = token.startswith(PREFIX), len(token) == TICKET_CHARACTERS
        return self.known(digest, address, partial(self._found, is_persons=is_persons), remember=not may_hold_later)

    def known(
        self, digest: str, address: str, find: Callable[[Session, str], Caller | None], *, remember: bool = True
    ) -> Caller | None:
        """Who `find` says it is whose secret has this SHA-256, unless it is known to be wrong; wrong ones are counted.

        remember: a wrong one stays wrong. Raises: what `find` raises, TooManyWrongTokens; sqlalchemy's errors.
        """
        now = self._elapsed()
        why = self._wrong.get(digest, now)
        if why is None:
            self.look_ups += 1
            try:
                with self._db.read() as session:
                    if (caller := find(session, digest)) is not None:
                        return caller
                why = ""
            except Unauthorized as error:
                why = error.message
            if why or remember:
                self._wrong.put(digest, why, now)
            if not why:
                self.guessed(address)
        if why:
            raise Unauthorized(why)
        return None

    def person(self, session: Session, digest: str) -> Person | None:
        """Whose token has this SHA-256, the operator's too; None where it is no person's. Raises Unauthorized."""
        self._home.look()
        if hmac.compare_digest(digest, self._home.hash):
            return Person(OPERATOR, Role.OPERATOR)
        return self._tokens.person(session, digest)

    def _of_issuer(
        self,
        issued: Callable[[str, str, Session], Person | None],
        token: str,
        address: str,
        session: Session,
        digest: str,
    ) -> Caller | None:
        person = issued(token, address, session)
        return None if person is None else Caller(person=person)

    def guessed(self, address: str) -> None:
        """Something wrong came from this address that is no token, and cost as much. Raises TooManyWrongTokens."""
        if (wait_s := self._guesses.take(address, 1.0, self._elapsed())) > 0.0:
            raise TooManyWrongTokens(address, ceil(wait_s))

    def _found(self, session: Session, digest: str, *, is_persons: bool) -> Caller | None:
        if is_persons and (person := self._tokens.person(session, digest)) is not None:
            return Caller(person=person)
        jobs = JobRepository(session)
        if (job := jobs.by_token_hash(digest)) is not None:
            found, state, finished_at = job
            late = finished_at is not None and self._tokens.now() > finished_at + self._grace_s
            return Caller(found, over=state if late else None)
        if (job_id := jobs.id_by_ticket_hash(digest)) is not None:
            return Caller(job_id, ticket=True)
        return None


class _Remembered:
    """Words about tokens, by their hash: each for some seconds, the newest MOST_REMEMBERED."""

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._held: dict[str, tuple[float, str]] = {}
        self._lock = threading.Lock()

    def get(self, digest: str, now: float) -> str | None:
        """What is remembered now; None for nothing."""
        with self._lock:
            until, words = self._held.get(digest, (now, ""))
        return words if until > now else None

    def put(self, digest: str, words: str, now: float) -> None:
        """Remember it from now on."""
        with self._lock:
            self._held.pop(digest, None)
            self._held[digest] = (now + self._keep_s, words)
            while len(self._held) > MOST_REMEMBERED:
                del self._held[next(iter(self._held))]  # the oldest


class TokenFileError(Exception):
    """The operator's token file cannot be used; the message says what to do."""


class OperatorToken:
    """The token in the file at `path`, made where it is missing. Methods may be called from any thread.

    A new token in the file holds within LOOK_S; the one before is then refused. A file that is lost or spoilt while the
    service runs changes nothing: the last good one holds. elapsed: seconds of a clock that does not go back.
    Raises: TokenFileError, OSError.
    """

    def __init__(self, path: Path, elapsed: Callable[[], float] = time.monotonic) -> None:
        self._path, self._elapsed = path, elapsed
        self._lock = threading.Lock()
        private_folder(path.parent)
        if not path.exists():
            write_private(path, new_token() + "\n")
        self._seen = _signature(path)
        self.hash = token_hash(_read(path))
        """SHA-256 of the token that holds."""
        self._looked = elapsed()
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            logger.warning("token_readable_by_others path=%s advice='chmod 600 %s'", path, path)

    def look(self) -> None:
        """Take the token that is in the file now, at most once in LOOK_S. It may block; nothing is raised."""
        if self._elapsed() - self._looked < LOOK_S:
            return
        with self._lock:
            self._looked = self._elapsed()
            try:
                seen = _signature(self._path)
                if seen == self._seen:
                    return
                found = token_hash(_read(self._path))
            except (OSError, UnicodeDecodeError, TokenFileError) as error:
                logger.warning("operator_token_not_read path=%s error=%s holds='the last one'", self._path, error)
                return
            if found != self.hash:
                logger.info("operator_token_changed path=%s", self._path)
            self._seen, self.hash = seen, found

    def rotate(self) -> str:
        """Put a new token into the file; it holds at once, the one before no longer. Raises OSError."""
        token = new_token()
        with self._lock:
            write_private(self._path, token + "\n")
            self._seen, self.hash = _signature(self._path), token_hash(token)
        logger.info("operator_token_changed path=%s", self._path)
        return token


def _signature(path: Path) -> tuple[int, int, int]:
    """What differs when the file has been written."""
    found = path.stat()
    return found.st_ino, found.st_mtime_ns, found.st_size


def _read(path: Path) -> str:
    token = path.read_text(encoding="utf-8").strip()
    if len(token) < LEAST_CHARACTERS:
        raise TokenFileError(
            f"{path} holds {len(token)} characters, a token needs at least {LEAST_CHARACTERS}: remove the file and "
            "start again to have one made"
        )
    return token
