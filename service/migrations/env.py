"""Alembic's entry: runs the revisions on the connection that thinwire.service.db hands over."""

from alembic import context

from thinwire.service.config import Settings
from thinwire.service.db import Base, Database
from thinwire.service.jobs import models
from thinwire.service.ownership import OwnerRow
from thinwire.service.people.models import TokenRow

target_metadata = Base.metadata
assert models.JobRow.metadata is OwnerRow.metadata is TokenRow.metadata is target_metadata


def run() -> None:
    connection = context.config.attributes.get("connection")
    if connection is None:  # the alembic command line, used when writing a new revision
        with Database(Settings().database).engine.begin() as connection:
            _migrate(connection)
    else:
        _migrate(connection)


def _migrate(connection) -> None:  # type: ignore[no-untyped-def]
    # SQLite alters a table by copying it: batch mode.
    context.configure(connection=connection, target_metadata=target_metadata, render_as_batch=True)
    with context.begin_transaction():
        context.run_migrations()


run()
