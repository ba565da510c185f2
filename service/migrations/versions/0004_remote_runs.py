"""Tickets of drivers that share no folder with the service, and a name for the service in a cluster of many.

Revision ID: 0004
Revises: 0003
"""

import secrets

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for name in ("ticket_hash", "claimant_hash"):
        op.add_column("jobs", sa.Column(name, sa.String(64)))
    op.create_index("ix_jobs_ticket_hash", "jobs", ["ticket_hash"])
    service = op.create_table("service", sa.Column("id", sa.String(16), primary_key=True))
    op.bulk_insert(service, [{"id": secrets.token_hex(4)}])


def downgrade() -> None:
    op.drop_table("service")
    op.drop_index("ix_jobs_ticket_hash", "jobs")
    for name in ("claimant_hash", "ticket_hash"):
        op.drop_column("jobs", name)
