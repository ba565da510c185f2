"""The rows of people's tokens and of the audit. Times are unix seconds."""

from __future__ import annotations

from sqlalchemy import Index, String, text
from sqlalchemy.orm import Mapped, mapped_column

from thinwire.service.db import Base


class TokenRow(Base):
    """One token. A name has at most one that is not revoked; those that are stay for a while, to say so."""

    __tablename__ = "tokens"
    __table_args__ = (
        Index(
            "tokens_one_of_a_name",
            "name",
            unique=True,
            sqlite_where=text("revoked_at IS NULL"),
            postgresql_where=text("revoked_at IS NULL"),
        ),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(String(63))
    token_hash: Mapped[str] = mapped_column(String(64), unique=True)
    role: Mapped[str] = mapped_column(String(16))
    created_at: Mapped[float]
    created_by: Mapped[str] = mapped_column(String(63))
    last_used_at: Mapped[float | None] = mapped_column(default=None)
    expires_at: Mapped[float | None] = mapped_column(default=None)
    revoked_at: Mapped[float | None] = mapped_column(default=None)


class AuditRow(Base):
    """One change. job_id refers to nothing: the line outlives the job."""

    __tablename__ = "audit"

    id: Mapped[int] = mapped_column(primary_key=True)
    time: Mapped[float] = mapped_column(index=True)
    who: Mapped[str] = mapped_column(String(63))
    role: Mapped[str | None] = mapped_column(String(16), default=None)
    what: Mapped[str] = mapped_column(String(64))
    job_id: Mapped[str | None] = mapped_column(String(80), index=True, default=None)
    about: Mapped[str | None] = mapped_column(String(200), default=None)
    address: Mapped[str | None] = mapped_column(String(64), default=None)
    status: Mapped[int]
