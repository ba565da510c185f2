"""Projects: which there are, what an operator has said of each, and what belongs to which.

Who has a project sees and changes what is of it, and nothing else. Three places hold that. `auth` refuses a route that
names a job of another project, and each route that does not ask for the caller's project (`in_project`); lists and
streams are told the project, and say nothing of others; a new job takes from its own project alone what it begins with.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime

from pydantic import JsonValue, ValidationError
from sqlalchemy import delete, func, select
from sqlalchemy.exc import IntegrityError

from thinwire.contract.merge_patch import merged
from thinwire.contract.projects import DEFAULT, NewProject, Project, ProjectList, ProjectSettings
from thinwire.service.cursors import cursor, key_of
from thinwire.service.db import Database
from thinwire.service.errors import InvalidRequest, JobNotFound, ProjectExists, ProjectInUse, ProjectNotFound
from thinwire.service.jobs.repository import JobRow
from thinwire.service.people.audit import Change
from thinwire.service.people.project_rows import ProjectRow, locked, settings_of
from thinwire.service.people.tokens import TokenRow
from thinwire.service.problems import problems_of

PROJECTS = "projects"
"""The list's name in its cursors."""


class Projects:
    """Of a service. Methods may be called from any thread. clock: unix seconds."""

    def __init__(self, db: Database, *, has_packages: Callable[[str], bool], clock: Callable[[], float]) -> None:
        self._db, self._has_packages, self._clock = db, has_packages, clock

    def create(self, asked: NewProject, change: Change) -> Project:
        """A new one. Raises ProjectExists."""
        settings = asked.model_dump(mode="json", exclude_defaults=True, exclude={"name"})
        row = ProjectRow(name=asked.name, created_at=change.now, created_by=change.who, settings=settings)
        change.project = asked.name
        try:
            with self._db.write() as session:
                session.add(row)
                session.flush()
                change.write(session, about=asked.name)
        except IntegrityError as error:
            raise ProjectExists(asked.name) from error
        return _view(row)

    def change(self, name: str, changes: Mapping[str, JsonValue], change: Change) -> Project:
        """Set what these changes name (RFC 7396; null: as of a new project). Jobs that run go on, whatever they use.

        Raises: ProjectNotFound, InvalidRequest.
        """
        with self._db.write() as session:
            row = locked(session, name)
            change.project = name
            try:
                settings = ProjectSettings.model_validate_json(json.dumps(merged(row.settings, changes)))
            except ValidationError as error:
                raise InvalidRequest.of(problems_of(error, ProjectSettings.model_json_schema())) from error
            row.settings = settings.model_dump(mode="json", exclude_defaults=True)
            change.write(session, about=f"{name}: {', '.join(sorted(changes))}")
        return _view(row)

    def delete(self, name: str, change: Change) -> None:
        """Remove it: nothing may be of it any more. Raises: ProjectNotFound, ProjectInUse."""
        with self._db.write() as session:
            row = locked(session, name)
            change.project = name
            jobs = session.scalar(select(func.count()).select_from(JobRow).where(JobRow.project == name)) or 0
            valid = (TokenRow.project == name) & TokenRow.revoked_at.is_(None)
            valid &= TokenRow.expires_at.is_(None) | (TokenRow.expires_at > self._clock())
            tokens = session.scalar(select(func.count()).select_from(TokenRow).where(valid)) or 0
            packages = self._has_packages(name)
            if name == DEFAULT or jobs or tokens or packages:
                raise ProjectInUse(name, jobs, tokens, packages=packages)
            session.delete(row)
            session.execute(delete(TokenRow).where(TokenRow.project == name))  # all over: not for who takes the name
            change.write(session, about=name)

    def list(self, limit: int, after: str | None, among: Collection[str] | None) -> ProjectList:
        """Up to `limit`, by name, after `next` of an earlier list; among: of these alone. Raises InvalidRequest."""
        query = select(ProjectRow).order_by(ProjectRow.name).limit(limit + 1)
        if after is not None:
            query = query.where(ProjectRow.name > key_of(PROJECTS, after, (str,), "after")[0])
        if among is not None:
            query = query.where(ProjectRow.name.in_(among))
        with self._db.read() as session:
            rows = session.scalars(query).all()
        more, rows = len(rows) > limit, rows[:limit]
        return ProjectList(
            projects=[_view(row) for row in rows], next=cursor(PROJECTS, rows[-1].name) if more else None
        )

    def names(self) -> Sequence[str]:
        """Of all that there are, in order."""
        with self._db.read() as session:
            return session.scalars(select(ProjectRow.name).order_by(ProjectRow.name)).all()

    def unknown(self, names: Iterable[str]) -> Sequence[str]:
        """Those of these names that are no projects."""
        return sorted(set(names) - set(self.names()))

    def refuse_unknown(self, name: str) -> None:
        """Raises ProjectNotFound."""
        with self._db.read() as session:
            if session.get(ProjectRow, name) is None:
                raise ProjectNotFound(name)

    def refuse_foreign(self, job_id: str, project: str) -> None:
        """A job of another project is none, to who asks. Raises JobNotFound."""
        if self.of_job(job_id) != project:
            raise JobNotFound(job_id.replace("\0", "\\0"))

    def of_job(self, job_id: str) -> str | None:
        """Whose it is; None where there is no such job."""
        if "\0" in job_id:  # PostgreSQL would take it for an error
            return None
        with self._db.read() as session:
            return session.scalar(select(JobRow.project).where(JobRow.id == job_id))

    def settings(self, name: str) -> ProjectSettings:
        """What an operator has said of it. Raises ProjectNotFound."""
        with self._db.read() as session:
            row = session.get(ProjectRow, name)
        if row is None:
            raise ProjectNotFound(name)
        return settings_of(row)


def _view(row: ProjectRow) -> Project:
    created_at = datetime.fromtimestamp(row.created_at, UTC)
    return Project(**settings_of(row).model_dump(), name=row.name, created_at=created_at, created_by=row.created_by)
