"""Which service owns the database, and until when.

Revision ID: 0003
Revises: 0002
"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "owners",
        sa.Column("number", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("home_id", sa.String(32), nullable=False),
        sa.Column("host", sa.String(255), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("home", sa.String(), nullable=False),
        sa.Column("url", sa.String(), nullable=False),
        sa.Column("since", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
    )


def downgrade() -> None:
    op.drop_table("owners")
