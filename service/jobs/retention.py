"""Which jobs that are over need not be kept any longer? Those beyond a number, and those older than an age."""

from __future__ import annotations

import logging
from collections.abc import Callable

from thinwire.service.db import Database
from thinwire.service.errors import ServiceError
from thinwire.service.jobs.repository import JobRepository

logger = logging.getLogger(__name__)

DAY_S = 86_400.0
AT_ONCE = 20
"""Jobs deleted in one call: a folder of checkpoints may take a second to remove."""
PAUSE_S = 60.0
"""Between two looks at the clock of the service, unless the last one left something."""


class Retention:
    """Deletes jobs by what is kept. keep_jobs: how many; keep_days: for how long; None: however many, for ever.

    delete: removes one job. clock: unix seconds.
    """

    def __init__(
        self,
        db: Database,
        delete: Callable[[str], None],
        *,
        keep_jobs: int | None,
        keep_days: float | None,
        clock: Callable[[], float],
    ) -> None:
        self._db, self._delete, self._clock = db, delete, clock
        self._keep_jobs, self._keep_days = keep_jobs, keep_days
        self._due = float("-inf")
        self._refused: set[str] = set()

    def prune(self) -> None:
        """Delete some of what is due, oldest first. Those that cannot be deleted keep no other."""
        now = self._clock()
        if (self._keep_jobs is None and self._keep_days is None) or now < self._due:
            return
        before = None if self._keep_days is None else now - self._keep_days * DAY_S
        with self._db.read() as session:
            limit = AT_ONCE + len(self._refused)
            ids = JobRepository(session).finished(before=before, beyond=self._keep_jobs, limit=limit)
        # Those that were refused come last: else they would be tried for ever in the place of others.
        for job_id in sorted(ids, key=self._refused.__contains__)[:AT_ONCE]:
            try:
                self._delete(job_id)
            except ServiceError as error:
                logger.warning("job_not_deleted job_id=%s error=%s", job_id, error)
                self._refused.add(job_id)
        self._refused &= set(ids)
        self._due = now if len(ids) == limit else now + PAUSE_S
