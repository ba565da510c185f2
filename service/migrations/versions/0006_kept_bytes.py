"""How much is kept of each job, for the limits of a job and of a person; of what is there it is counted once.

Revision ID: 0006
Revises: 0005
"""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("kept_bytes", sa.BigInteger(), nullable=False, server_default="0"))
    op.create_index("jobs_of_person", "jobs", ["submitted_by", "kept_bytes"])
    for table, column, row_bytes in (("samples", "sample", 64), ("events", "fields", 256)):
        op.execute(
            f"UPDATE jobs SET kept_bytes = kept_bytes + COALESCE((SELECT SUM(LENGTH(CAST({table}.{column} AS TEXT)) "
            f"+ {row_bytes}) FROM {table} WHERE {table}.job_id = jobs.id), 0)"
        )
