"""Jobs, their samples and events, and the workers' leases.

Revision ID: 0001
Revises:
"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(80), primary_key=True),
        sa.Column("name", sa.String(63), nullable=False),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.Column("spec_digest", sa.String(64), nullable=False),
        sa.Column("idempotency_key", sa.String(255), unique=True),
        sa.Column("token_hash", sa.String(64), nullable=False, unique=True),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("reason", sa.String()),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("max_attempts", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("started_at", sa.Double()),
        sa.Column("finished_at", sa.Double()),
        sa.Column("newest_sample", sa.JSON()),
        sa.Column("newest_validation", sa.JSON()),
        sa.Column("summary", sa.JSON()),
        sa.Column("failure", sa.JSON()),
        sa.Column("version", sa.Integer(), nullable=False),
    )
    op.create_index("ix_jobs_state", "jobs", ["state"])
    op.create_index("ix_jobs_created_at", "jobs", ["created_at"])
    op.create_table(
        "samples",
        sa.Column("job_id", sa.String(80), sa.ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("step", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("sample", sa.JSON(), nullable=False),
    )
    op.create_table(
        "events",
        sa.Column("id", sa.Integer(), primary_key=True),
        sa.Column("job_id", sa.String(80), sa.ForeignKey("jobs.id", ondelete="CASCADE"), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(64), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("time", sa.Double(), nullable=False),
        sa.Column("fields", sa.JSON(), nullable=False),
        sa.UniqueConstraint("job_id", "attempt", "kind", "step", "time", name="events_once"),
    )
    op.create_index("events_of_job", "events", ["job_id", "time"])
    op.create_table(
        "worker_leases",
        sa.Column("job_id", sa.String(80), sa.ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("rank", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("address", sa.String(255), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("node", sa.String(255), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
    )
    op.create_index("ix_worker_leases_expires_at", "worker_leases", ["expires_at"])


def downgrade() -> None:
    for table in ("worker_leases", "events", "samples", "jobs"):
        op.drop_table(table)
