"""Events and samples are numbered as they are committed: streams tell them in this order, and begin again anywhere.

Revision ID: 0011
Revises: 0010
"""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("service", sa.Column("numbers", sa.BigInteger(), nullable=False, server_default="0"))
    op.add_column("service", sa.Column("numbers_gone", sa.BigInteger(), nullable=False, server_default="0"))
    # Of jobs that have been deleted already nobody knows which numbers they had: up to here there may be gaps.
    op.execute("UPDATE service SET numbers_gone = (SELECT COALESCE(MAX(id), 0) FROM events)")
    op.execute("UPDATE service SET numbers = numbers_gone + 1")  # one more, for the end of the stream of the last job
    if op.get_bind().dialect.name == "postgresql":  # SQLite's have 64 bits
        op.alter_column("events", "id", type_=sa.BigInteger(), existing_nullable=False)
    op.create_index("events_in_order", "events", ["job_id", "id"])
