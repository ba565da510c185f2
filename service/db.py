"""The database: one engine, two kinds of session, and the upgrade of the schema at start.

SQLite runs with a write-ahead log and synchronous=FULL, so that what was answered survives a kill -9 and a power
cut. A writing session takes the write lock when it begins: a transaction that reads, decides and then writes
would otherwise fail at its first write when another has written since, and no busy_timeout helps there. Its writers
queue in this process first: SQLite itself has those that wait look again, ever more seldom.

Every writing session asks the fence first whether this process may write at all: see thinwire.service.ownership.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import URL, Connection, Double, ExceptionContext, create_engine, event, func, make_url, select, text
from sqlalchemy.exc import ArgumentError, DatabaseError, OperationalError
from sqlalchemy.orm import DeclarativeBase, Session
from sqlalchemy.types import TypeEngine

logger = logging.getLogger(__name__)

BUSY_TIMEOUT_MS = 5000
WRITE_IDLE_MS, READ_IDLE_MS = 5000, 60_000
"""PostgreSQL ends a transaction that says nothing for so long. A process that was stopped in one that writes holds its
locks; one that reads waits for its turn on a busy machine, and only a change of the schema waits for it.
"""
ENDED = frozenset({"25P03", "25P04", "25006"})
"""What PostgreSQL says of it: idle or open for too long; and, of a server that is a primary no more, read-only."""
UPGRADE_LOCK = 0x7468696E77697265
"""PostgreSQL's advisory lock of who changes the schema or the owner: "thinwire" as a number."""
NUMBERED = "thinwire_numbered"
"""In the `info` of a session: its transaction gives out numbers, which streams tell once it is committed."""
CONNECTIONS, MORE_CONNECTIONS = 8, 56
"""Kept, and opened beside them where more threads ask at once: requests have 40."""


class Base(DeclarativeBase):
    """The root of all rows. Double: single precision cannot tell unix seconds apart."""

    type_annotation_map: ClassVar[dict[type, TypeEngine[Any]]] = {float: Double()}


class DatabaseUnusable(Exception):
    """The database cannot be used by this version; the message says what to do."""


class Database:
    """Sessions of one database. `read` and `write` may be called from any thread. Raises: DatabaseUnusable.

    fence: called first in every writing session; what it raises ends that session. None: everybody may write.
    told: called after each transaction of this process that has committed something which streams tell.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.fence: Callable[[Session], None] | None = None
        self.told: Callable[[], None] = lambda: None
        try:
            parsed = make_url(url)
            self.engine = create_engine(
                parsed, pool_pre_ping=not parsed.drivername.startswith("sqlite"), **_pool_of(parsed)
            )
        except (ArgumentError, ModuleNotFoundError) as error:
            raise DatabaseUnusable(
                f"THINWIRE_DATABASE_URL cannot be used: {error}. It is like sqlite:////folder/thinwire.db; another "
                "database needs its driver installed"
            ) from error
        if self.engine.dialect.name == "sqlite" and parsed.database:
            _create_private(Path(parsed.database))
        if self.engine.dialect.name == "sqlite":
            event.listen(self.engine, "connect", _sqlite_connected)
            event.listen(self.engine, "begin", _sqlite_begin)
        if self.engine.dialect.name == "postgresql":
            event.listen(self.engine, "connect", _postgresql_connected)
            event.listen(self.engine, "begin", _postgresql_begin)
            event.listen(self.engine, "handle_error", _postgresql_failed)
        self._writing = self.engine.execution_options(thinwire_write=True)
        self._one_writer: AbstractContextManager[object] = nullcontext()
        if self.engine.dialect.name == "sqlite":
            self._one_writer = threading.Lock()

    @property
    def shared(self) -> bool:
        """May services of several hosts use it?"""
        return self.engine.dialect.name != "sqlite"

    def upgrade(self) -> None:
        """Bring the schema to this version's newest revision. Raises DatabaseUnusable."""
        with self.exclusive() as session:
            self.upgrade_in(session)

    def upgrade_in(self, session: Session) -> None:
        """The same in the transaction of `exclusive`."""
        connection = session.connection()
        if MigrationContext.configure(connection).get_current_revision() == _newest():
            return
        config = _alembic()
        config.attributes["connection"] = connection
        command.upgrade(config, "head")

    @contextmanager
    def exclusive(self) -> Iterator[Session]:
        """One transaction, not fenced, for the schema and the owner: no other service has one at the same time.

        Raises DatabaseUnusable where the database cannot be used by this version, or not at all.
        """
        try:
            with self.unfenced() as session:
                if self.engine.dialect.name == "postgresql":
                    session.execute(select(func.pg_advisory_xact_lock(UPGRADE_LOCK)))
                yield session
        except CommandError as error:
            raise DatabaseUnusable(
                f"the database {self.shown} does not fit this version: {error}. It was probably written by a newer "
                "thinwire: install that one, or use another THINWIRE_HOME"
            ) from error
        except DatabaseError as error:
            raise DatabaseUnusable(
                f"the database {self.shown} cannot be used: {error.orig}. {_advice(error)}"
            ) from error

    @contextmanager
    def read(self) -> Iterator[Session]:
        """A session to read with; what it changes is not kept."""
        with Session(self.engine, expire_on_commit=False) as session:
            yield session

    @contextmanager
    def write(self) -> Iterator[Session]:
        """One transaction: committed at a clean end, rolled back by an exception. Raises what the fence raises."""
        with self.unfenced() as session:
            if self.fence is not None:
                self.fence(session)
            yield session

    @contextmanager
    def unfenced(self) -> Iterator[Session]:
        """The same without the fence: for the fence itself."""
        with self._one_writer, Session(self._writing, expire_on_commit=False) as session, session.begin():
            yield session
        if session.info.get(NUMBERED):
            self.told()

    def check(self) -> None:
        """Ask the database for something. Raises sqlalchemy's errors where it does not answer."""
        with self.read() as session:
            session.execute(text("SELECT version_num FROM alembic_version"))

    @property
    def shown(self) -> str:
        """Its URL without the password."""
        return self.engine.url.render_as_string(hide_password=True)

    def close(self) -> None:
        """Close all connections. Safe to call twice."""
        self.engine.dispose()


def _alembic() -> Config:
    config = Config()
    config.set_main_option("script_location", "thinwire.service:migrations")
    return config


@cache
def _newest() -> str | None:
    """This version's newest revision. To read the revisions takes longer than all else that a start asks of it."""
    return ScriptDirectory.from_config(_alembic()).get_current_head()


def _advice(error: DatabaseError) -> str:
    """What to do. A full or slow disk leaves the file whole: a copy in its place would lose what came since."""
    said = str(error.orig).lower()
    if "full" in said or "no space" in said:
        return "The disk is full: make room, and start again; the database itself is whole"
    if "locked" in said or "readonly" in said or "read-only" in said or "permission" in said:
        return "Let this user write it, and end what else holds it; the database itself is whole"
    if "disk i/o" in said or "unable to open" in said:
        return "The disk, or its folder, cannot be used now: look at the disk before you touch the database"
    return "Mend it, put a copy in its place, or use another THINWIRE_HOME"


def _create_private(path: Path) -> None:
    """Make the file, and its folder, readable by its owner alone, before SQLite makes it readable by all."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))


def _pool_of(url: URL) -> dict[str, Any]:
    """Room for every thread that may ask at once. SQLite in memory has a pool of its own kind."""
    if url.drivername.startswith("sqlite") and url.database in (None, "", ":memory:"):
        return {}
    return {"pool_size": CONNECTIONS, "max_overflow": MORE_CONNECTIONS}


def _postgresql_connected(connection: Any, record: Any) -> None:
    cursor = connection.cursor()
    cursor.execute(f"SET idle_in_transaction_session_timeout = {READ_IDLE_MS}")
    cursor.close()
    connection.commit()


def _postgresql_begin(connection: Connection) -> None:
    if _writes(connection):
        connection.exec_driver_sql(f"SET LOCAL idle_in_transaction_session_timeout = {WRITE_IDLE_MS}")


def _postgresql_failed(context: ExceptionContext) -> OperationalError | None:
    """A transaction that the server has ended is a lost connection like others, whatever class of errors it is in: who
    asked is told to ask again, and the next one gets a new connection.
    """
    error = context.original_exception
    if getattr(error, "sqlstate", None) not in ENDED:
        return None
    context.is_disconnect, context.invalidate_pool_on_disconnect = True, False
    return OperationalError(context.statement, context.parameters, error, connection_invalidated=True)


def _sqlite_connected(connection: Any, record: Any) -> None:
    # The driver's own transaction control begins too late (at the first write); _sqlite_begin does it instead.
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
    cursor.execute("PRAGMA journal_mode = WAL")
    cursor.execute("PRAGMA synchronous = FULL")
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.close()


def _sqlite_begin(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE" if _writes(connection) else "BEGIN")


def _writes(connection: Connection) -> bool:
    return bool(connection.get_execution_options().get("thinwire_write", False))
