"""The database: durable, private, and its schema the one that the rows expect."""

from __future__ import annotations

import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import TextClause, event, select, text, update
from sqlalchemy.exc import IntegrityError, OperationalError
from sqlalchemy.orm.exc import StaleDataError

from tests.service.control_plane_harness import wait_until
from thinwire.service.config import Settings
from thinwire.service.db import Base, Database, DatabaseUnusable
from thinwire.service.jobs.repository import JobRow, SampleRow, ServiceRow


@pytest.fixture
def db(tmp_path: Path) -> Database:
    database = Database(f"sqlite:///{tmp_path / 'thinwire.db'}")
    database.upgrade()
    return database


def _job(job_id: str = "job-1", **changes: object) -> JobRow:
    values = {
        "id": job_id,
        "name": "job",
        "spec": {},
        "spec_digest": "d",
        "token_hash": job_id,
        "state": "PENDING",
        "max_attempts": 1,
        "created_at": 0.0,
    }
    return JobRow(**{**values, **changes})


def test_the_migrations_make_what_the_rows_expect(db: Database) -> None:
    with db.engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), Base.metadata) == []


def test_the_upgrade_may_be_repeated_and_keeps_the_rows(db: Database, tmp_path: Path) -> None:
    with db.write() as session:
        session.add(_job("a"))
    db.upgrade()
    again = Database(f"sqlite:///{tmp_path / 'thinwire.db'}")
    again.upgrade()
    with again.read() as session:
        assert session.get_one(JobRow, "a").name == "job"


def test_a_database_of_a_newer_version_is_refused(db: Database, tmp_path: Path) -> None:
    with db.write() as session:
        session.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(DatabaseUnusable, match="newer thinwire"):
        Database(f"sqlite:///{tmp_path / 'thinwire.db'}").upgrade()


def test_sqlite_is_durable_and_private(db: Database, tmp_path: Path) -> None:
    with db.read() as session:
        pragmas = {name: session.execute(text(f"PRAGMA {name}")).scalar() for name in ("journal_mode", "synchronous")}
        assert pragmas == {"journal_mode": "wal", "synchronous": 2}  # 2 is FULL
        assert session.execute(text("PRAGMA foreign_keys")).scalar() == 1
        assert session.execute(text("PRAGMA busy_timeout")).scalar() == 5000
    for path in tmp_path.glob("thinwire.db*"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


def test_an_exception_leaves_nothing_behind(db: Database) -> None:
    def interrupted() -> None:
        with db.write() as session:
            session.add(_job())
            session.flush()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        interrupted()
    with db.read() as session:
        assert session.scalars(select(JobRow)).all() == []


def test_the_second_writer_of_a_stale_row_is_refused(db: Database) -> None:
    with db.write() as session:
        session.add(_job())
    with db.read() as session:
        stale = session.get(JobRow, "job-1")
        assert stale is not None
    with db.write() as session:
        fresh = session.get(JobRow, "job-1")
        assert fresh is not None
        fresh.state = "RUNNING"

    def write_stale() -> None:
        with db.write() as session:
            session.add(stale)
            stale.state = "FAILED"

    with pytest.raises(StaleDataError):
        write_stale()


def test_a_sample_needs_its_job(db: Database) -> None:
    with pytest.raises(IntegrityError), db.write() as session:
        session.add(SampleRow(job_id="none", step=1, attempt=1, sample={}))


def test_writers_that_read_first_do_not_fail_each_other(db: Database) -> None:
    """With a deferred BEGIN, one of two transactions that read and then write would get SQLITE_BUSY at once."""
    with db.write() as session:
        session.add(_job(spec={"count": 0}))
    errors: list[Exception] = []

    def add_ten() -> None:
        try:
            for _ in range(10):
                with db.write() as session:
                    row = session.get(JobRow, "job-1")
                    assert row is not None
                    row.spec = {"count": row.spec["count"] + 1}
        except Exception as error:  # noqa: BLE001 - told by the assertion below
            errors.append(error)

    threads = [threading.Thread(target=add_ten) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    with db.read() as session:
        row = session.get(JobRow, "job-1")
        assert row is not None
        assert row.spec == {"count": 40}


def test_a_full_disk_is_no_reason_to_put_a_copy_in_its_place(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path / 'thinwire.db'}")
    event.listen(database.engine, "connect", lambda connection, _: connection.execute("PRAGMA max_page_count = 2"))
    with pytest.raises(DatabaseUnusable, match="disk is full: make room") as refused:
        database.upgrade()
    assert "copy" not in str(refused.value)


@pytest.mark.parametrize("given", ["postgresql+psycopg://u@db/x\n", "postgres://u@db/x", " postgresql://u@db/x"])
def test_a_url_is_taken_as_secrets_hold_it(tmp_path: Path, given: str) -> None:
    assert Settings(home=tmp_path, database_url=given).database == "postgresql+psycopg://u@db/x"


def test_a_blank_url_is_no_wish_for_sqlite(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is blank: name a database, or leave it out"):
        Settings(home=tmp_path, database_url=" \n")


@pytest.mark.slow
@pytest.mark.parametrize(
    "ends",
    ["SET TRANSACTION READ ONLY", "SET idle_in_transaction_session_timeout = 1"],
    ids=["of a server that is a primary no more", "after it was idle"],
)
def test_a_transaction_that_postgresql_ended_is_no_answer_and_the_next_one_is(
    new_database: Callable[[], str], ends: str
) -> None:
    """A process that was stopped in a transaction, or starved, finds it ended: 503, and no error inside the service."""
    database, other = Database(url := new_database()), Database(url)
    database.upgrade()
    with database.engine.connect() as connection:
        mine = connection.scalar(text("SELECT pg_backend_pid()"))
        connection.execute(text(ends))
        if "idle" in ends:
            gone = text("SELECT count(*) = 0 FROM pg_stat_activity WHERE pid = :mine")
            wait_until(lambda: _found(other, gone, mine=mine), "PostgreSQL has ended it", timeout_s=60)
        with pytest.raises(OperationalError):
            connection.execute(update(ServiceRow).values(arrivals=1))
    with database.write() as session:
        assert session.scalar(text("SELECT pg_backend_pid()")) != mine
        session.execute(update(ServiceRow).values(arrivals=2))
    for one in (database, other):
        one.close()


def _found(database: Database, query: TextClause, **more: object) -> bool:
    with database.read() as session:
        return bool(session.scalar(query, more))
