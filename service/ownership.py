"""Who owns the database? One service writes it at a time: the one that holds the lease in it.

The lease is a row. Who takes it counts its number up, renews it while it lives, and gives it back at its end; who finds
it run out takes it over. Every transaction that writes asks first whether the number is still its own (`fence`), so an
owner that was stopped and wakes after its lease has gone writes nothing. All times are the database's: the clocks of
two hosts differ; and who waits counts the seconds itself, for that clock may be set. The number is the row's key, which
PostgreSQL locks apart from the rest of the row: a renewal waits for no writer, and a take-over for all of them.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from sqlalchemy import ColumnElement, Double, String, bindparam, insert, inspect, literal_column, select, update
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Mapped, Session, mapped_column

from thinwire.contract.files import write_first
from thinwire.service.db import Base, Database, DatabaseUnusable
from thinwire.service.errors import NotOwner

logger = logging.getLogger(__name__)

RENEWALS, LOOKS = 5, 10
"""In the time of one lease: the owner renews it so often, and who stands by looks so often whether it has run out."""


class OwnerRow(Base):
    """The owner; the table has one row. Times are unix seconds of the database's clock."""

    __tablename__ = "owners"

    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """How often the database has been taken: the fence of every write."""
    home_id: Mapped[str] = mapped_column(String(32))
    host: Mapped[str] = mapped_column(String(255))
    pid: Mapped[int]
    home: Mapped[str]
    url: Mapped[str]
    since: Mapped[float]
    expires_at: Mapped[float]


_OWNERS = OwnerRow.__table__
_HELD = (
    select(_OWNERS.c.number).where(_OWNERS.c.number == bindparam("number")).with_for_update(read=True, key_share=True)
)
"""Of the fence. Made once, and of columns alone: every transaction that writes asks it first."""


@dataclass(frozen=True, slots=True)
class Owner:
    """Who has the database. left_s: until the lease runs out; below 0 it has.

    url: where other services of this database reach it. home_id: known to these alone.
    """

    number: int
    home_id: str
    host: str
    pid: int
    home: str
    url: str
    since: float
    expires_at: float
    left_s: float

    def __str__(self) -> str:
        since = datetime.fromtimestamp(self.since, UTC).isoformat(timespec="seconds")
        return f"process {self.pid} on {self.host} with the home {self.home}, since {since}, at {self.url}"


class Ownership:
    """This process's part in it. Methods may be called from any thread. db: modified, its fence is set.

    home: the service's; started again on it, a service takes over at once what its predecessor held, since a home has
    one service at a time. url: where other services of this database reach this one. lease_s: without a renewal for so
    long, another service takes over. Raises OSError.
    """

    def __init__(self, db: Database, home: Path, url: str, lease_s: float) -> None:
        self._db, self._home, self._url = db, home, url
        self._home_id = _home_id(home / "id")
        self._lease_s = lease_s
        self._number: int | None = None
        self._renewed = 0.0
        self._looked: tuple[int, float] | None = None
        self._runs_out = 0.0
        self._lost: Callable[[str], None] = lambda why: None
        self.seen: Owner | None = None
        """Who owned the database when this process last looked, while it stands by; None while it owns it."""
        self.over: str | None = None
        """Why this process can never write again; None while it owns or stands by."""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        db.fence = self.fence

    @property
    def owns(self) -> bool:
        """Does this process hold the lease, as far as it knows?"""
        return self._number is not None

    @property
    def number(self) -> int | None:
        """Of the lease that this process holds, as far as it knows."""
        return self._number

    def seal(self, words: str) -> str:
        """What proves that these words are of a service of this database, and meant for this one."""
        return sealed(words, self._home_id)

    def take(self) -> Owner | None:
        """Take the lease where no other service holds it, and bring the schema up to date with it.

        Returns None where it is this process's now, else who holds it. Raises DatabaseUnusable.
        """
        if self.owns:
            return None
        with self._db.exclusive() as session:
            owner = _owner(session)
            if owner is not None and owner.home_id != self._home_id and not self._has_run_out(owner):
                self.seen = owner
                return owner
            self._db.upgrade_in(session)
            number = 1 if owner is None else owner.number + 1
            now = _now(session)
            mine = {
                "number": number,
                "home_id": self._home_id,
                "host": socket.gethostname()[:255],
                "pid": os.getpid(),
                "home": str(self._home),
                "url": self._url,
                "since": now,
                "expires_at": now + self._lease_s,
            }
            began = _elapsed()
            session.execute(insert(OwnerRow).values(mine) if owner is None else update(OwnerRow).values(mine))
        self._number, self._renewed, self.seen = number, began, None
        logger.info("database_owned number=%d home=%s", number, self._home)
        return None

    def owner(self) -> Owner | None:
        """Who holds, or has last held, the lease. Raises sqlalchemy's errors where the database does not answer."""
        with self._db.read() as session:
            return _owner(session)

    def fence(self, session: Session) -> None:
        """Let the transaction go on where this process owns the database, and keep it so until its end.

        Raises NotOwner.
        """
        if self._number is not None and session.scalar(_HELD, {"number": self._number}) is not None:
            return
        raise self._refusal(_owner(session))

    def confirm(self) -> None:
        """Make sure, before what no transaction fences, such as a call of the launcher. Asks at times.

        Raises NotOwner; sqlalchemy's errors where it cannot be asked.
        """
        if self._number is None or _elapsed() - self._renewed > self._lease_s / 2:
            self.renew()

    def renew(self) -> None:
        """Hold the lease for longer. Raises NotOwner; sqlalchemy's errors where the database does not answer."""
        began = _elapsed()
        with self._db.unfenced() as session:
            until = _now(session) + self._lease_s
            mine = update(OwnerRow).where(OwnerRow.number == self._number).values(expires_at=until)
            held = self._number is not None and session.scalar(mine.returning(OwnerRow.number)) is not None
            owner = None if held else _owner(session)
        if not held:
            raise self._refusal(owner)
        self._renewed = began

    def start(self, begin: Callable[[], None], lost: Callable[[str], None]) -> None:
        """Renew the lease, or wait for it, in a thread.

        begin: called once, when this process has the lease. lost: called with the reason when it can write no more.
        """
        self._lost = lost
        self._thread = threading.Thread(target=self._loop, args=(begin,), name="thinwire-ownership", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop renewing, and give the lease back, so that nobody waits for its end. Safe to call twice."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        number, self._number = self._number, None
        if number is None:
            return
        try:
            with self._db.unfenced() as session:
                session.execute(update(OwnerRow).where(OwnerRow.number == number).values(expires_at=0.0))
        except SQLAlchemyError as error:
            logger.warning("lease_not_given_back lease_s=%g error=%s", self._lease_s, error)

    def _loop(self, begin: Callable[[], None]) -> None:
        begun = False
        while self.over is None:
            try:
                if not self.owns:
                    self.seen = owner = self.owner()
                    if owner is None or self._has_run_out(owner):
                        self.take()
                elif begun:
                    self.renew()
                if self.owns and not begun:
                    begin()
                    begun = True
            except NotOwner as error:
                logger.debug("not_owner error=%s", error)  # logged where it was found
            except (SQLAlchemyError, DatabaseUnusable) as error:
                logger.warning("ownership_unknown owns=%s error=%s", self.owns, error)
            except Exception:
                logger.exception("ownership_failed owns=%s", self.owns)
            if self._stop.wait(self._lease_s / (RENEWALS if begun else LOOKS)):
                return

    def _has_run_out(self, owner: Owner) -> bool:
        """Has nobody renewed it for as long as it had left when it was first seen? So a clock of the database that is
        set back or ahead meanwhile neither keeps a dead owner nor takes over from a living one.
        """
        seen, now = (owner.number, owner.expires_at), _elapsed()
        if seen != self._looked:
            is_renewed = self._looked is not None and self._looked[0] == owner.number and owner.expires_at > 0.0
            left_s = self._lease_s if is_renewed and owner.left_s <= 0 else min(owner.left_s, self._lease_s)
            self._looked, self._runs_out = seen, now + left_s
        return now >= self._runs_out

    def _refusal(self, owner: Owner | None) -> NotOwner:
        """The error for a write; where this process was the owner, it is the end of that."""
        if self._number is None and self.over is None:
            whose = f"it belongs to {owner}" if owner is not None else "nobody owns it yet"
            return NotOwner(f"this service stands by and cannot write to the database: {whose}", self._lease_s)
        if self.over is None:
            taken = f"was taken over by {owner}" if owner is not None else "has no owner any more"
            self.over = (
                f"the database {taken}: this process had not renewed its lease for {self._lease_s:g} s. It writes "
                "no more and ends; started again, it stands by"
            )
            self._number = None
            logger.error("ownership_lost why=%s", self.over)
            self._lost(self.over)
        return NotOwner(self.over, self._lease_s)


def sealed(words: str, home_id: str) -> str:
    """The seal of these words, for the service with this home: an HMAC (RFC 2104) of SHA-256, in hexadecimal digits."""
    return hmac.new(home_id.encode(), words.encode(), hashlib.sha256).hexdigest()


def _owner(session: Session) -> Owner | None:
    """Who has the database, by its own clock; None where nobody ever had."""
    if not inspect(session.connection()).has_table(OwnerRow.__tablename__):
        return None
    row = session.scalar(select(OwnerRow))
    if row is None:
        return None
    return Owner(
        number=row.number,
        home_id=row.home_id,
        host=row.host,
        pid=row.pid,
        home=row.home,
        url=row.url,
        since=row.since,
        expires_at=row.expires_at,
        left_s=row.expires_at - _now(session),
    )


def _now(session: Session) -> float:
    """Unix seconds by the database's clock."""
    clock: ColumnElement[float] = literal_column("(julianday('now') - 2440587.5) * 86400.0", Double())
    if session.get_bind().dialect.name == "postgresql":
        clock = literal_column("extract(epoch FROM clock_timestamp())::float8", Double())
    return float(session.scalars(select(clock)).one())


def _elapsed() -> float:
    """Seconds of a clock that also runs while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def _home_id(path: Path) -> str:
    """What identifies this home, made where it is missing. Raises OSError."""
    write_first(path, secrets.token_hex(16) + "\n")
    return path.read_text(encoding="utf-8").strip()[:32]
