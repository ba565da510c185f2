"""What the service knows of each job that is not over, for Prometheus: also of one that has no worker to be scraped.

At most SERIES_OF_JOB series a job, whatever its size; none once it is over.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from sqlalchemy.exc import OperationalError

from thinwire.contract.jobs import JobState
from thinwire.service.db import Database
from thinwire.service.jobs.models import JobRow
from thinwire.service.jobs.repository import JobRepository
from thinwire.service.jobs.views import Reading, planned_steps
from thinwire.service.jobs.worker_numbers import membership_now, wanted_workers

logger = logging.getLogger(__name__)

HELP = {
    "info": "1 for each job that is not over",
    "step": "The last step that the workers have told of",
    "planned_steps": "Steps that the job is to make; absent where its script alone knows",
    "step_age_seconds": "Since the last step that was told of, by the workers' clock, or since the job began to run",
    "workers": "Workers that train together",
    "workers_min": "The fewest workers that the job may go on with",
    "workers_max": "The most workers that it may have",
    "missing_workers": "Workers that it waits for; 0 while it waits for none",
}
"""Of thinwire_service_job_NAME."""
SERIES_OF_JOB = len(HELP)


class JobMetrics(Collector):
    """Asked anew at each scrape. clock: unix seconds."""

    def __init__(self, db: Database, clock: Callable[[], float]) -> None:
        self._db, self._clock = db, clock

    def describe(self) -> list[Metric]:
        """Nothing: registering must not ask the database."""
        return []

    def collect(self) -> Iterator[Metric]:
        """One series of each number that a job has; nothing while the database does not answer."""
        labels = {"info": ("job_id", "name", "state")}
        families = {
            name: GaugeMetricFamily(f"thinwire_service_job_{name}", text, labels=labels.get(name, ("job_id",)))
            for name, text in HELP.items()
        }
        try:
            with self._db.read() as session:
                rows = JobRepository(session).unfinished()
        except OperationalError:
            logger.exception("database_error where=job_metrics")
            return
        now = self._clock()
        for row in rows:
            families["info"].add_metric((row.id, row.name, row.state), 1.0)
            for name, value in _numbers(row, now).items():
                families[name].add_metric((row.id,), value)
        yield from families.values()


def _numbers(row: JobRow, now: float) -> dict[str, float]:
    """Of a job, by name; what is not known, or was written by another version, is left out."""
    reading, found = Reading(), dict[str, float | None]()
    found["planned_steps"] = reading.of("spec.steps", lambda: planned_steps(row))
    if (wanted := reading.of("wanted workers", lambda: wanted_workers(row))) is not None:
        found["workers_min"], found["workers_max"] = wanted.min, wanted.max
    size, waits = reading.of("newest membership", lambda: membership_now(row)) or (None, None)
    found["workers"] = size
    found["missing_workers"] = 0 if waits is None else max(waits.min - waits.have, 0)
    newest = None if row.newest_sample is None else row.newest_sample["sample"]
    found["step"] = None if newest is None else newest["step"]
    if row.state == JobState.RUNNING.value:
        told_at = 0.0 if newest is None else newest["time"]
        found["step_age_seconds"] = max(0.0, now - max(told_at, row.started_at or row.created_at))
    return {name: float(value) for name, value in found.items() if value is not None}
