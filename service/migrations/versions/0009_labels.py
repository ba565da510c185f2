"""Jobs have labels, and lists of them are looked up in indices of their own.

Revision ID: 0009
Revises: 0008
"""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("labels", sa.JSON(), nullable=False, server_default="{}"))
    op.create_table(
        "job_labels",
        sa.Column("job_id", sa.String(80), sa.ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("key", sa.String(238), primary_key=True),
        sa.Column("value", sa.String(63), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
    )
    op.create_index("job_labels_found", "job_labels", ["key", "value", "created_at", "job_id"])
    op.create_index("jobs_listed", "jobs", ["created_at", "id", "state", "submitted_by", "name"])
    op.drop_index("ix_jobs_created_at", "jobs")
