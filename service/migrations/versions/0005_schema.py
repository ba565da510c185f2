"""The schema as of version 0005, made whole, or brought there from any of the four before it.

Those only added tables, and columns to `jobs`: what is missing is added here too. Columns are added in place. A batch
would copy the table, and dropping the old one would take samples, events and leases along by their foreign keys.

Revision ID: 0005
Revises: 0001 to 0004, which env.py takes for none
"""

import secrets
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = None
branch_labels = None
depends_on = None

METADATA = sa.MetaData()


def added_to_jobs() -> list[sa.Column[Any]]:
    """What 0002, 0004 and 0005 have added."""
    return [
        sa.Column("wanted_workers", sa.JSON()),
        sa.Column("newest_membership", sa.JSON()),
        sa.Column("ticket_hash", sa.String(64), index=True),
        sa.Column("claimant_hash", sa.String(64)),
        sa.Column("submitted_by", sa.String(63)),
    ]


def of_job(**how: Any) -> sa.Column[Any]:
    return sa.Column("job_id", sa.String(80), sa.ForeignKey("jobs.id", ondelete="CASCADE"), nullable=False, **how)


sa.Table(
    "jobs",
    METADATA,
    sa.Column("id", sa.String(80), primary_key=True),
    sa.Column("name", sa.String(63), nullable=False),
    sa.Column("spec", sa.JSON(), nullable=False),
    sa.Column("spec_digest", sa.String(64), nullable=False),
    sa.Column("idempotency_key", sa.String(255), unique=True),
    sa.Column("token_hash", sa.String(64), nullable=False, unique=True),
    sa.Column("state", sa.String(16), nullable=False, index=True),
    sa.Column("reason", sa.String()),
    sa.Column("attempt", sa.Integer(), nullable=False),
    sa.Column("max_attempts", sa.Integer(), nullable=False),
    sa.Column("created_at", sa.Double(), nullable=False, index=True),
    sa.Column("started_at", sa.Double()),
    sa.Column("finished_at", sa.Double()),
    sa.Column("newest_sample", sa.JSON()),
    sa.Column("newest_validation", sa.JSON()),
    sa.Column("summary", sa.JSON()),
    sa.Column("failure", sa.JSON()),
    sa.Column("version", sa.Integer(), nullable=False),
    *added_to_jobs(),
)
sa.Table(
    "samples",
    METADATA,
    of_job(primary_key=True),
    sa.Column("step", sa.Integer(), primary_key=True, autoincrement=False),
    sa.Column("attempt", sa.Integer(), nullable=False),
    sa.Column("sample", sa.JSON(), nullable=False),
)
sa.Table(
    "events",
    METADATA,
    sa.Column("id", sa.Integer(), primary_key=True),
    of_job(),
    sa.Column("attempt", sa.Integer(), nullable=False),
    sa.Column("kind", sa.String(64), nullable=False),
    sa.Column("step", sa.Integer(), nullable=False),
    sa.Column("time", sa.Double(), nullable=False),
    sa.Column("fields", sa.JSON(), nullable=False),
    sa.UniqueConstraint("job_id", "attempt", "kind", "step", "time", name="events_once"),
    sa.Index("events_of_job", "job_id", "time"),
)
sa.Table(
    "worker_leases",
    METADATA,
    of_job(primary_key=True),
    sa.Column("rank", sa.Integer(), primary_key=True, autoincrement=False),
    sa.Column("attempt", sa.Integer(), nullable=False),
    sa.Column("address", sa.String(255), nullable=False),
    sa.Column("pid", sa.Integer(), nullable=False),
    sa.Column("node", sa.String(255), nullable=False),
    sa.Column("expires_at", sa.Double(), nullable=False, index=True),
)
sa.Table(
    "owners",
    METADATA,
    sa.Column("number", sa.Integer(), primary_key=True, autoincrement=False),
    sa.Column("home_id", sa.String(32), nullable=False),
    sa.Column("host", sa.String(255), nullable=False),
    sa.Column("pid", sa.Integer(), nullable=False),
    sa.Column("home", sa.String(), nullable=False),
    sa.Column("url", sa.String(), nullable=False),
    sa.Column("since", sa.Double(), nullable=False),
    sa.Column("expires_at", sa.Double(), nullable=False),
)
SERVICE = sa.Table("service", METADATA, sa.Column("id", sa.String(16), primary_key=True))
sa.Table(
    "tokens",
    METADATA,
    sa.Column("id", sa.Integer(), primary_key=True),
    sa.Column("name", sa.String(63), nullable=False),
    sa.Column("token_hash", sa.String(64), nullable=False, unique=True),
    sa.Column("role", sa.String(16), nullable=False),
    sa.Column("created_at", sa.Double(), nullable=False),
    sa.Column("created_by", sa.String(63), nullable=False),
    sa.Column("last_used_at", sa.Double()),
    sa.Column("expires_at", sa.Double()),
    sa.Column("revoked_at", sa.Double()),
    sa.Index(
        "tokens_one_of_a_name",
        "name",
        unique=True,
        sqlite_where=sa.text("revoked_at IS NULL"),
        postgresql_where=sa.text("revoked_at IS NULL"),
    ),
)
sa.Table(
    "audit",
    METADATA,
    sa.Column("id", sa.Integer(), primary_key=True),
    sa.Column("time", sa.Double(), nullable=False, index=True),
    sa.Column("who", sa.String(63), nullable=False),
    sa.Column("role", sa.String(16)),
    sa.Column("what", sa.String(64), nullable=False),
    sa.Column("job_id", sa.String(80), index=True),
    sa.Column("about", sa.String(200)),
    sa.Column("address", sa.String(64)),
    sa.Column("status", sa.Integer(), nullable=False),
)


def upgrade() -> None:
    connection = op.get_bind()
    METADATA.create_all(connection)  # what is there already stays as it is
    known = {column["name"] for column in sa.inspect(connection).get_columns("jobs")}
    for column in added_to_jobs():
        if column.name not in known:
            op.add_column("jobs", column)
    if connection.scalar(sa.select(SERVICE.c.id)) is None:
        connection.execute(sa.insert(SERVICE).values(id=secrets.token_hex(4)))
