"""Alembic's entry: runs the revisions on the connection that thinwire.service.db hands over."""

from alembic import context
from sqlalchemy import ColumnClause, column, delete, inspect, table

from thinwire.service.config import Settings
from thinwire.service.db import Base, Database
from thinwire.service.jobs.repository import JobRow
from thinwire.service.ownership import OwnerRow
from thinwire.service.people.tokens import TokenRow

FOLDED = ("0001", "0002", "0003", "0004")
"""Revisions that are part of 0005, which begins from a database at any of them."""

target_metadata = Base.metadata
assert JobRow.metadata is OwnerRow.metadata is TokenRow.metadata is target_metadata


def run() -> None:
    connection = context.config.attributes.get("connection")
    if connection is None:  # the alembic command line, used when writing a new revision
        with Database(Settings().database).engine.begin() as connection:
            _migrate(connection)
    else:
        _migrate(connection)


def _migrate(connection) -> None:  # type: ignore[no-untyped-def]
    if inspect(connection).has_table("alembic_version"):
        version: ColumnClause[str] = column("version_num")
        connection.execute(delete(table("alembic_version", version)).where(version.in_(FOLDED)))
    # SQLite alters a table by copying it: batch mode.
    context.configure(connection=connection, target_metadata=target_metadata, render_as_batch=True)
    with context.begin_transaction():
        context.run_migrations()


run()
