"""People come by an issuer of OpenID Connect: who they are, their sessions, and lines of the audit that say which.

Revision ID: 0013
Revises: 0012
"""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "issuer_people",
        sa.Column("name", sa.String(63), primary_key=True),
        sa.Column("issuer", sa.String(500), nullable=False),
        sa.Column("subject", sa.String(255)),
        sa.Column("role", sa.String(16)),
        sa.Column("first_at", sa.Double(), nullable=False),
        sa.Column("last_at", sa.Double()),
        sa.Column("blocked_at", sa.Double()),
        sa.Column("blocked_by", sa.String(63)),
        sa.UniqueConstraint("issuer", "subject", name="issuer_people_subject"),
    )
    op.add_column("sessions", sa.Column("person", sa.String(63)))
    op.add_column("sessions", sa.Column("person_groups", sa.Text()))
    op.add_column("audit", sa.Column("issuer", sa.String(500)))
