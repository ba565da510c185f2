"""Jobs, tokens and lines of the audit belong to projects. What there is belongs to `default`; operators are of all.

Revision ID: 0012
Revises: 0011
"""

import time

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    projects = op.create_table(
        "projects",
        sa.Column("name", sa.String(63), primary_key=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("created_by", sa.String(63), nullable=False),
        sa.Column("settings", sa.JSON(), nullable=False),
        *(
            sa.Column(name, sa.Double(), nullable=False, server_default="0")
            for name in ("served_at", "turn", "next_turn")
        ),
    )
    first = {"name": "default", "created_at": time.time(), "created_by": "service", "settings": {}}
    op.bulk_insert(projects, [first])
    op.add_column("jobs", sa.Column("project", sa.String(63), nullable=False, server_default="default"))
    op.create_index("jobs_of_project", "jobs", ["project", "created_at", "id", "state", "submitted_by", "name"])
    op.drop_index("jobs_of_person", "jobs")
    op.create_index("jobs_of_person", "jobs", ["submitted_by", "project", "kept_bytes"])
    op.add_column("tokens", sa.Column("project", sa.String(63), nullable=True))
    op.execute("UPDATE tokens SET project = 'default' WHERE role <> 'operator'")
    op.add_column("audit", sa.Column("project", sa.String(63), nullable=True))
    op.execute("UPDATE audit SET project = 'default' WHERE job_id IS NOT NULL")
    op.create_index("audit_of_project", "audit", ["project", "id"])
