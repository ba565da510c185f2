"""Which jobs are still to begin from what lies in the folder of another one? That one cannot be deleted yet.

A job reads what it begins with until it has saved a checkpoint of its own (contract/start.py): a restart before that
begins from there again.
"""

from __future__ import annotations

import os
from pathlib import Path

from sqlalchemy.orm import Session

from thinwire.contract.jobs import JobState
from thinwire.contract.reports import EventKind
from thinwire.service.jobs.models import JobRow
from thinwire.service.jobs.places import is_local, path_of
from thinwire.service.jobs.repository import JobRepository


def heirs_of(folder: Path, session: Session) -> list[str]:
    """Ids of the jobs that may yet read their beginning below this run folder, oldest first."""
    jobs = JobRepository(session)
    real = os.path.realpath(folder)
    return [
        row.id
        for row in jobs.unfinished()
        if row.state != JobState.CANCELLING
        and _begins_below(real, row)
        and not jobs.events(row.id, [EventKind.CHECKPOINT_SAVED], limit=1)
    ]


def _begins_below(real: str, row: JobRow) -> bool:
    start = row.spec.get("start") or {}
    place = start.get("weights") or start.get("checkpoints")
    return place is not None and is_local(place) and Path(os.path.realpath(path_of(place))).is_relative_to(real)
