"""The workers that a job is wanted to have now, and what it has last said of their number.

Columns are added in place. A batch would copy the table, and dropping the old one would take samples, events and
leases along by their foreign keys.

Revision ID: 0002
Revises: 0001
"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for name in ("wanted_workers", "newest_membership"):
        op.add_column("jobs", sa.Column(name, sa.JSON()))


def downgrade() -> None:
    for name in ("newest_membership", "wanted_workers"):
        op.drop_column("jobs", name)
