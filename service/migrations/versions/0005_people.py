"""Tokens of people, the audit of what they change, and who has submitted a job.

Revision ID: 0005
Revises: 0004
"""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("submitted_by", sa.String(63)))
    op.create_table(
        "tokens",
        sa.Column("id", sa.Integer(), primary_key=True),
        sa.Column("name", sa.String(63), nullable=False),
        sa.Column("token_hash", sa.String(64), nullable=False, unique=True),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("created_by", sa.String(63), nullable=False),
        sa.Column("last_used_at", sa.Double()),
        sa.Column("expires_at", sa.Double()),
        sa.Column("revoked_at", sa.Double()),
    )
    op.create_index(
        "tokens_one_of_a_name",
        "tokens",
        ["name"],
        unique=True,
        sqlite_where=sa.text("revoked_at IS NULL"),
        postgresql_where=sa.text("revoked_at IS NULL"),
    )
    op.create_table(
        "audit",
        sa.Column("id", sa.Integer(), primary_key=True),
        sa.Column("time", sa.Double(), nullable=False),
        sa.Column("who", sa.String(63), nullable=False),
        sa.Column("role", sa.String(16)),
        sa.Column("what", sa.String(64), nullable=False),
        sa.Column("job_id", sa.String(80)),
        sa.Column("about", sa.String(200)),
        sa.Column("address", sa.String(64)),
        sa.Column("status", sa.Integer(), nullable=False),
    )
    op.create_index("ix_audit_time", "audit", ["time"])
    op.create_index("ix_audit_job_id", "audit", ["job_id"])


def downgrade() -> None:
    op.drop_table("audit")
    op.drop_table("tokens")
    op.drop_column("jobs", "submitted_by")
