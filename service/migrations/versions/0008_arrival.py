"""Jobs are numbered as they come: those of one moment have an order too.

Revision ID: 0008
Revises: 0007
"""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("arrival", sa.BigInteger(), nullable=False, server_default="0"))
    op.add_column("service", sa.Column("arrivals", sa.BigInteger(), nullable=False, server_default="0"))
