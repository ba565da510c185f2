"""The service's own metrics, in a registry of their own. Those of the workers are in thinwire.contract.metric_names.

JobMetrics is what the service knows of each job that is not over, also of one that has no worker to be scraped: at most
SERIES_OF_JOB series a job, whatever its size; none once it is over.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from sqlalchemy.exc import OperationalError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from thinwire.contract.jobs import JobState
from thinwire.contract.projects import Quota
from thinwire.service.db import Database
from thinwire.service.jobs.repository import JobRepository, JobRow
from thinwire.service.jobs.views import Reading, planned_steps
from thinwire.service.jobs.worker_numbers import membership_now, wanted_workers

logger = logging.getLogger(__name__)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class _Now(Collector):
    """What `make` gives, made anew at each scrape."""

    def __init__(self, make: Callable[[], Iterator[Metric]]) -> None:
        self._make = make

    def collect(self) -> Iterator[Metric]:
        """The current values."""
        return self._make()

    def describe(self) -> list[Metric]:
        """Nothing: registering must not ask the database."""
        return []


class ServiceMetrics:
    """What GET /metrics shows: what is counted here, and after `watch` what is asked anew at each scrape."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "thinwire_service_requests",
            "HTTP requests answered",
            ("method", "route", "status"),
            registry=self.registry,
        )
        self.request_seconds = Histogram(
            "thinwire_service_request_seconds",
            "Time to answer an HTTP request",
            ("method", "route"),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.reconcile_seconds = Histogram(
            "thinwire_service_reconcile_seconds",
            "Time of one turn of the reconciler over all jobs",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.spans = Counter(
            "thinwire_service_spans",
            "Spans of traces, by what became of them: exported or dropped",
            ("outcome",),
            registry=self.registry,
        )
        self._turned_at: float | None = None

    def count_spans(self, outcome: str, number: int) -> None:
        """So many were exported, or dropped."""
        self.spans.labels(outcome).inc(number)

    def turned(self, seconds: float) -> None:
        """A turn of the reconciler is over, and took so long."""
        self.reconcile_seconds.observe(seconds)
        self._turned_at = time.monotonic()

    def turn_age_s(self) -> float | None:
        """Since that; None before the first, and in a service that stands by."""
        return None if self._turned_at is None else time.monotonic() - self._turned_at

    def watch(
        self,
        count_by_state: Callable[[str | None], Mapping[JobState, int]],
        launcher_name: str,
        launcher_reason: Callable[[], str | None],
        launcher_age_s: Callable[[], float | None],
        of_each_job: Callable[[str | None], Collector],
        ending_tokens: Callable[[str | None], Sequence[tuple[str, str, float]]],
        quotas: Callable[[str | None], Sequence[Quota]],
        home: Path | None = None,
    ) -> None:
        """Show the jobs by state, each that is not over, and the launcher with its age; of the home, its disk; tokens
        that end; what projects use. All but the launcher and the disk is asked for one project, or None for all.
        """
        self._home = home
        self._count_by_state, self._launcher_name = count_by_state, launcher_name
        self._launcher_reason, self._launcher_age_s = launcher_reason, launcher_age_s
        self._of_each_job, self._ending_tokens, self._quotas = of_each_job, ending_tokens, quotas

    def text(self, project: str | None = None) -> bytes:
        """The exposition, in Prometheus' text format; of jobs, tokens and projects those of one project, or of all."""
        asked = CollectorRegistry()
        for collector in (self.registry, _Now(partial(self._now, project)), self._of_each_job(project)):
            asked.register(collector)
        return generate_latest(asked)

    def _now(self, project: str | None) -> Iterator[Metric]:
        """The current values. A database that does not answer leaves the jobs out; the other metrics stay."""
        launcher = self._launcher_name
        ready = 0.0 if self._launcher_reason() else 1.0
        yield _gauge("launcher_ready", "1 when jobs can be submitted, else 0", ready, launcher=launcher)
        age_s = self._launcher_age_s()
        yield _gauge("launcher_answer_age_seconds", "Since the launcher last answered", age_s, launcher=launcher)
        yield _gauge("reconcile_age_seconds", "Since the last turn of the reconciler was over", self.turn_age_s())
        free, whole = self._disk()
        yield _gauge("disk_free_bytes", "Free on the disk of the home", free)
        yield _gauge("disk_bytes", "Size of the disk of the home", whole)
        jobs = GaugeMetricFamily("thinwire_service_jobs", "Jobs by state", labels=("state",))
        ends = GaugeMetricFamily(
            "thinwire_service_token_expires_at_seconds",
            "When a person's token ends by itself, unix time",
            labels=("token", "project"),
        )
        used, limits = (
            GaugeMetricFamily(f"thinwire_service_quota_{name}", text, labels=("project", "resource"))
            for name, text in (
                ("used", "What a project uses of each resource"),
                ("limit", "The most that it may; absent without one"),
            )
        )
        answers = 1.0
        try:
            for state, count in self._count_by_state(project).items():
                jobs.add_metric((state.value,), count)
            for token, whose, end in self._ending_tokens(project):
                ends.add_metric((token, whose), end)
            for quota in self._quotas(project):
                for family, values in ((used, quota.used), (limits, quota.limits)):
                    for resource, value in values.model_dump(exclude_none=True).items():
                        family.add_metric((quota.project, resource), value)
        except OperationalError:
            logger.exception("database_error where=metrics")
            answers = 0.0
        yield from (jobs, ends, used, limits)
        yield _gauge("database_ready", "1 when the database answers, else 0", answers)

    def _disk(self) -> tuple[float | None, float | None]:
        """Bytes that are free, and all; None where that cannot be found out."""
        try:
            found = shutil.disk_usage(self._home) if self._home is not None else None
        except OSError as error:
            logger.warning("disk_unknown path=%s reason=%s", self._home, error)
            found = None
        return (None, None) if found is None else (float(found.free), float(found.total))


def _gauge(name: str, text: str, value: float | None, **labels: str) -> GaugeMetricFamily:
    """One value; none where it is not known."""
    found = GaugeMetricFamily(f"thinwire_service_{name}", text, labels=tuple(labels))
    if value is not None:
        found.add_metric(tuple(labels.values()), value)
    return found


class RequestMetrics:
    """ASGI middleware that counts and times requests by the template of their route, never by their path."""

    def __init__(self, app: ASGIApp, metrics: ServiceMetrics) -> None:
        self.app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on and write down how it went."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began = time.perf_counter()
        answered, status = None, 500

        async def watch(message: Message) -> None:
            nonlocal answered, status
            if message["type"] == "http.response.start":
                answered, status = time.perf_counter(), message["status"]
            await send(message)

        try:
            await self.app(scope, receive, watch)
        finally:
            method = scope["method"] if scope["method"] in _METHODS else "other"
            route = getattr(scope.get("route"), "path", "unmatched")
            self._metrics.requests.labels(method, route, str(status)).inc()
            # Of a stream, until it began: it is open for as long as its reader likes.
            until = answered if scope.get("state", {}).get("stream") else None
            self._metrics.request_seconds.labels(method, route).observe((until or time.perf_counter()) - began)


HELP = {
    "info": "1 for each job that is not over",
    "step": "The last step that the workers have reported",
    "planned_steps": "Steps that the job is to make; absent where its script alone knows",
    "step_age_seconds": "Since the last step that was reported, by the workers' clock, or since the job began to run",
    "workers": "Workers that train together",
    "workers_min": "The fewest workers that the job may go on with",
    "workers_max": "The most workers that it may have",
    "missing_workers": "Workers that it waits for; 0 while it waits for none",
}
"""Of thinwire_service_job_NAME."""
SERIES_OF_JOB = len(HELP)


class JobMetrics(Collector):
    """Asked anew at each scrape. clock: unix seconds. project: of its jobs alone; None: of all."""

    def __init__(self, db: Database, clock: Callable[[], float], project: str | None = None) -> None:
        self._db, self._clock, self._project = db, clock, project

    def describe(self) -> list[Metric]:
        """Nothing: registering must not ask the database."""
        return []

    def collect(self) -> Iterator[Metric]:
        """One series of each number that a job has; nothing while the database does not answer."""
        labels = {"info": ("job_id", "name", "state", "project")}
        families = {
            name: GaugeMetricFamily(f"thinwire_service_job_{name}", text, labels=labels.get(name, ("job_id",)))
            for name, text in HELP.items()
        }
        try:
            with self._db.read() as session:
                rows = JobRepository(session).unfinished(self._project)
        except OperationalError:
            logger.exception("database_error where=job_metrics")
            return
        now = self._clock()
        for row in rows:
            families["info"].add_metric((row.id, row.name, row.state, row.project), 1.0)
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
        # By the service's clock, with which no worker's is to be compared; an earlier version kept the worker's alone.
        reported_at = (
            0.0 if row.newest_sample is None else row.newest_sample.get("at", row.newest_sample["sample"]["time"])
        )
        found["step_age_seconds"] = max(0.0, now - max(reported_at, row.started_at or row.created_at))
    return {name: float(value) for name, value in found.items() if value is not None}
