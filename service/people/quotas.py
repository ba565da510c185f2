"""Quotas: what a project, and each person in it, uses of what it may.

Nothing is counted beside the rows: what is used is asked of them when it is needed. Who adds to it holds the project's
row from before it is asked until its transaction ends, so of two at once the second counts the first. A limit that is
lowered below what is used ends nothing. How many jobs run at once is held by the queue (jobs/queue.py): there a job
waits, and is not refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from sqlalchemy import bindparam, func, select
from sqlalchemy.orm import Session

from thinwire.contract.jobs import JobState, WorkersChange
from thinwire.contract.places import Room, uses_gpus
from thinwire.contract.projects import Level, Limits, ProjectSettings, Quota, QuotaList, Used, whose_limits
from thinwire.service.db import Database
from thinwire.service.errors import InvalidRequest, QuotaReached
from thinwire.service.jobs.repository import JobRepository, JobRow
from thinwire.service.jobs.worker_numbers import submitted_workers, wanted_workers
from thinwire.service.people.project_rows import ProjectRow, locked, settings_of

WAITING = (JobState.SUBMITTING.value, JobState.QUEUED.value)
"""States of a job that was not started, or not again."""
_WHAT_TO_DO = {
    "queued_jobs": "wait until some have started, or cancel some",
    "workers": "ask for fewer (workers.max), shrink or cancel other jobs",
    "gpus": "ask for fewer workers, shrink or cancel other jobs",
    "kept_bytes": "`thinwire delete` jobs that are not needed",
}


class Quotas:
    """What is used of what may be. Methods may be called from any thread.

    packages: bytes of a project's packages, or of one person's in it. room: what the cluster has, as far as is known.
    """

    def __init__(
        self, db: Database, packages: Callable[[str, str | None], int], room: Callable[[], Room | None]
    ) -> None:
        self._db, self._packages, self._room = db, packages, room

    def of(self, project: str | None, who: str | None) -> QuotaList:
        """Of each project, by name, or of this one; and of this person in each of them, where one is named."""
        found: list[Quota] = []
        people = (None,) if who is None else (None, who)
        with self._db.read() as session:
            query = select(ProjectRow).order_by(ProjectRow.name)
            rows = session.scalars(query if project is None else query.where(ProjectRow.name == project)).all()
            open_rows = JobRepository(session).unfinished(project)
            kept = {whose: kept_by_project(session, whose) for whose in people}
        by_project: dict[str, list[JobRow]] = {}
        for job in open_rows:
            by_project.setdefault(job.project, []).append(job)
        for row in rows:
            settings = settings_of(row)
            for whose in people:
                jobs = by_project.get(row.name, [])
                used = used_by_jobs([one for one in jobs if whose in (None, one.submitted_by)], self._room())
                used.kept_bytes = kept[whose].get(row.name, 0)
                used.package_bytes = self._packages(row.name, whose)
                limits = settings.limits if whose is None else settings.person_limits
                found.append(Quota(project=row.name, person=whose, used=used, limits=limits))
        return QuotaList(quotas=found)


def used_by_jobs(rows: Iterable[JobRow], room: Room | None) -> Used:
    """By these jobs, which are not over; room: what the cluster has, as far as is known."""
    used = Used()
    for row in rows:
        if row.state in WAITING and row.granted is None:
            used.queued_jobs += 1
        else:
            used.running_jobs += 1
        workers, gpus = _asked(row, None, room)
        used.workers += workers
        used.gpus += gpus
    return used


def kept_by_project(session: Session, who: str | None = None) -> dict[str, int]:
    """Bytes of samples, events and logs that are kept of the jobs of each project, or of one person in it."""
    project = func.coalesce(JobRow.project, "")  # or SQLite takes the index of projects, and reads every job
    query = select(project, func.sum(JobRow.kept_bytes)).group_by(project)
    found = session.execute(query if who is None else query.where(JobRow.submitted_by == who))
    return {name: int(size) for name, size in found}


def kept_of(session: Session, project: str, who: str | None) -> int:
    """The same of one project."""
    return kept_by_project(session, who).get(project, 0)


_SETTINGS = select(ProjectRow.settings).where(ProjectRow.name == bindparam("name"))
"""Made once: every report asks it."""


def kept_limits(session: Session, row: JobRow) -> list[tuple[str, str | None, int]]:
    """The limits on what is kept that hold for a job: whose in words, of whom alone, and how many bytes."""
    project = session.execute(_SETTINGS, {"name": row.project}).one_or_none()
    if project is None:
        return []
    settings = settings_of(project)
    found = ((settings.limits, None), (settings.person_limits, row.submitted_by))
    return [(whose_limits(row.project, who), who, one.kept_bytes) for one, who in found if one.kept_bytes is not None]


def refuse_beyond(session: Session, row: JobRow, room: Room | None) -> None:
    """Refuse a new job that its project, or its person there, may not have; else the project is held for it.

    Raises: QuotaReached, ProjectNotFound, InvalidRequest (its priority, its queue).
    """
    _refuse_unlisted(settings_of(locked(session, row.project)), row)
    workers, gpus = _asked(row, None, room)
    _refuse(session, row, room, {"queued_jobs": 1, "workers": workers, "gpus": gpus, "kept_bytes": 1})


def waits_for(session: Session, row: JobRow) -> str | None:
    """Why a new job does not start at once, whatever places are free, in words; None where `running_jobs` lets it.

    It waits in place of being refused: a limit on jobs that run is met again as soon as one of them is over, and by
    nothing that who submits could mend. `queued_jobs` says how many may wait so.
    """
    settings = settings_of(locked(session, row.project))
    for limits, who in ((settings.limits, None), (settings.person_limits, row.submitted_by)):
        if limits.running_jobs is None:
            continue
        jobs = [one for one in JobRepository(session).unfinished(row.project) if who in (None, one.submitted_by)]
        used = used_by_jobs((one for one in jobs if one.id != row.id), None)
        if used.running_jobs + used.queued_jobs >= limits.running_jobs:
            others = f", and {used.queued_jobs} more wait" if used.queued_jobs else ""
            whose = f"{whose_limits(row.project, who)} has {used.running_jobs} of {limits.running_jobs} running_jobs"
            return f"{whose}{others}: it starts when it is its turn"
    return None


def refuse_growth(session: Session, row: JobRow, change: WorkersChange, room: Room | None) -> None:
    """The same for a job that is to have other limits on its workers, before they are written. Raises QuotaReached."""
    if JobState(row.state).terminal or row.state == JobState.CANCELLING.value:
        return  # it gets no other limits, and is told why
    (workers, gpus), (was, were) = _asked(row, change, room), _asked(row, None, room)
    more = {"workers": workers - was, "gpus": gpus - were}
    if max(more.values()) > 0:
        _refuse(session, row, room, more)


def _refuse(session: Session, row: JobRow, room: Room | None, more: dict[str, int]) -> None:
    settings = settings_of(locked(session, row.project))
    open_rows: list[JobRow] | None = None
    for limits, who in ((settings.limits, None), (settings.person_limits, row.submitted_by)):
        if limits == Limits() or (limits is settings.person_limits and who is None):  # of an earlier version
            continue
        if open_rows is None:
            open_rows = list(JobRepository(session).unfinished(row.project))
        used = used_by_jobs((one for one in open_rows if who in (None, one.submitted_by)), room)
        if limits.kept_bytes is not None and "kept_bytes" in more:
            used.kept_bytes = kept_of(session, row.project, who)
        for name, amount in more.items():
            limit, now = getattr(limits, name), getattr(used, name)
            if limit is not None and amount > 0 and now + amount > limit:
                asked = "" if name in ("queued_jobs", "kept_bytes") else f", and this asks for {amount} more"
                raise QuotaReached(
                    f"{whose_limits(row.project, who)} uses {now} of {limit} {name}{asked}: {_WHAT_TO_DO[name]}, or "
                    "have an operator raise it (`thinwire quotas`)"
                )


def _refuse_unlisted(settings: ProjectSettings, row: JobRow) -> None:
    """Raises InvalidRequest where the project's jobs may not have this priority, or this queue of Kueue's."""
    priority, kueue = int(row.spec.get("priority", 0)), row.spec.get("kueue") or {}
    if Level.of(priority) not in settings.priorities:
        words = f"must be a priority that project {row.project} may have: {', '.join(settings.priorities)}"
        raise InvalidRequest.at("priority", priority, f"{words} (below 0, 0, above 0)")
    lists = (("queue", settings.kueue_queues, True), ("priority", settings.kueue_priorities, False))
    for name, allowed, is_needed in lists:
        said = kueue.get(name)
        if allowed is not None and said not in allowed and (is_needed or said is not None):
            words = f"must be one that project {row.project} may name: {', '.join(allowed) or 'it may name none'}"
            raise InvalidRequest.at(f"kueue.{name}", said, words)


def _asked(row: JobRow, change: WorkersChange | None, room: Room | None) -> tuple[int, int]:
    """The most workers of a job, each with its processes, and the GPUs that they take; with these limits, where other
    ones are asked for. 0 where another version has written what cannot be read.
    """
    try:
        submitted, wanted = submitted_workers(row), wanted_workers(row)
    except (ValueError, LookupError, TypeError):
        return 0, 0
    most = wanted.max if change is None or change.max is None else change.max
    least = wanted.min if change is None or change.min is None else change.min
    limits: dict[str, Any] = {"min": least, "max": most}
    workers = most * submitted.per_box
    is_on_gpus = uses_gpus(submitted.model_copy(update=limits), 0 if room is None else room.gpus)
    return workers, workers if is_on_gpus else 0
