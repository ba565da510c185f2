"""Jobs have places of the cluster, or wait for them.

Revision ID: 0007
Revises: 0006
"""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("granted", sa.Integer()))
    op.add_column("jobs", sa.Column("queue", sa.JSON()))
