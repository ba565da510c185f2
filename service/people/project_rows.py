"""A project's row: what is asked of it inside of the transactions of others."""

from __future__ import annotations

import json
from typing import Any

from sqlalchemy import JSON, Row, String
from sqlalchemy.orm import Mapped, Session, mapped_column

from thinwire.contract.projects import ProjectSettings
from thinwire.service.db import Base
from thinwire.service.errors import ProjectNotFound


class ProjectRow(Base):
    """One project. settings: a ProjectSettings, without defaults. served_at: when a job of it got places last. turn,
    next_turn: of that job and of the next, in what jobs/queue.py counts.
    """

    __tablename__ = "projects"

    name: Mapped[str] = mapped_column(String(63), primary_key=True)
    created_at: Mapped[float]
    created_by: Mapped[str] = mapped_column(String(63))
    settings: Mapped[dict[str, Any]] = mapped_column(JSON)
    served_at: Mapped[float] = mapped_column(default=0.0, server_default="0")
    turn: Mapped[float] = mapped_column(default=0.0, server_default="0")
    next_turn: Mapped[float] = mapped_column(default=0.0, server_default="0")


def locked(session: Session, name: str) -> ProjectRow:
    """The project, held until the transaction ends: nobody else adds to what it uses. Raises ProjectNotFound.

    Lock jobs first, and take numbers of events after it.
    """
    row = session.get(ProjectRow, name, with_for_update=True)
    if row is None:
        raise ProjectNotFound(name)
    return row


def settings_of(row: ProjectRow | Row[Any]) -> ProjectSettings:
    """As this version reads it: what a later one may have written beside it is left out."""
    known = {name: row.settings[name] for name in ProjectSettings.model_fields if name in row.settings}
    return ProjectSettings.model_validate_json(json.dumps(known))
