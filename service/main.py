"""The control plane as an ASGI application. `thinwire.service.server` runs it as a process."""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import urlsplit

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.staticfiles import StaticFiles
from pydantic.json_schema import models_json_schema
from sqlalchemy.exc import SQLAlchemyError
from starlette.concurrency import run_in_threadpool
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from thinwire.contract.files import private_folder
from thinwire.contract.projects import EVERY
from thinwire.contract.reports import Telemetry
from thinwire.contract.streams import MODELS
from thinwire.contract.tls import read_ca
from thinwire.contract.traces import ENDPOINT, Traces
from thinwire.service import errors
from thinwire.service.auth import DOCS_FILES, WEB_FILES, Guard, InProject, person
from thinwire.service.bodies import Bodies
from thinwire.service.config import IPNetwork, Settings
from thinwire.service.db import Database
from thinwire.service.jobs import router as jobs_router
from thinwire.service.jobs.hub import Hub
from thinwire.service.jobs.job_folder import RunFolders, ServiceAt
from thinwire.service.jobs.log_parts import LogParts
from thinwire.service.jobs.pace import Pace
from thinwire.service.jobs.rate import Rates
from thinwire.service.jobs.reconciler import Reconciler
from thinwire.service.jobs.repository import JobRepository
from thinwire.service.jobs.service import JobService
from thinwire.service.jobs.streams import StreamSlots, streams
from thinwire.service.jobs.worker_reports import WorkerReports
from thinwire.service.large_answers import Paced, Slots
from thinwire.service.launch.protocol import Launcher, LauncherStarter
from thinwire.service.metrics import CONTENT_TYPE, JobMetrics, RequestMetrics, ServiceMetrics
from thinwire.service.ownership import Ownership
from thinwire.service.packages import router as packages_router
from thinwire.service.packages.store import LEAST_FREE_BYTES, Packages
from thinwire.service.people import router as people_router
from thinwire.service.people.audit import DELETE, Audit, Audited
from thinwire.service.people.oidc_people import IssuerPeople, SignOnMissing
from thinwire.service.people.projects import Projects
from thinwire.service.people.quotas import Quotas
from thinwire.service.people.tokens import Callers, OperatorToken, Tokens
from thinwire.service.request_ids import RequestIds
from thinwire.service.requests import SCHEMAS, known_query
from thinwire.service.standby import HandedOn, HandsOn, Standby
from thinwire.service.tracing import Traced
from thinwire.service.web import router as web_router
from thinwire.service.web.headers import BrowserHeaders
from thinwire.service.web.sessions import Sessions
from thinwire.service.web.sign_on import sign_on

if TYPE_CHECKING:  # it needs the extra `oidc`
    from thinwire.service.people.oidc import Oidc

logger = logging.getLogger(__name__)


JOBS_SHOWN_AT_ONCE = 4
"""A job file of 1 MiB takes some ten MiB while it is made an answer."""
SILENT_S = 10.0
"""A launcher that is silent for so long cannot be used; three turns of the reconciler, where these are longer."""
TAKES_OVER_S = 30.0
"""A service that takes the database over was ready before, and stays so while its launcher starts: jobs are taken."""


class DatabaseOwned(Exception):
    """The database belongs to another service, and cannot be waited for; the message says whose it is."""


class ControlPlane:
    """Everything behind the routes, put together once: database, launcher, reconciler, the two sides of jobs.

    service_url, peer_url: how workers and other services of the database reach this one. on_lost: called when another
    service has taken the database over. Nothing can be written then: the process ends.
    """

    def __init__(
        self, settings: Settings, launcher: Launcher, service_url: str, peer_url: str, clock: Callable[[], float]
    ) -> None:
        self._begun = self._closed = self._stood_by = False
        self._begun_at: float | None = None
        self._home = settings.home
        self._projects_named = {
            "THINWIRE_OIDC_PROJECTS": {*settings.oidc_projects.values()} - {EVERY},
            "THINWIRE_KUBERAY_NAMESPACES": {*settings.kuberay_namespaces},
        }
        private_folder(settings.home)
        self.operator_token = OperatorToken(settings.token_file)
        self.operator_token_from = settings.operator_token_from
        self.db = Database(settings.database)
        self.audit = Audit(self.db, keep_days=settings.audit_days, clock=clock)
        self.tokens = Tokens(self.db, keep_days=settings.audit_days, clock=clock)
        self.people = IssuerPeople(
            self.db, settings.oidc_issuer, settings.oidc_roles, settings.oidc_projects, clock=clock
        )
        self.oidc = _oidc(settings, self.people, service_url, clock) if settings.oidc_issuer is not None else None
        self.callers = Callers(
            self.db,
            self.operator_token,
            self.tokens,
            grace_s=settings.job_grace_s,
            issued=None if self.oidc is None else self.oidc.person,
        )
        self.sessions = Sessions(
            self.db, self.callers, self.people, lifetime_s=settings.session_hours * 3600.0, clock=clock
        )
        self.grafana_url = settings.grafana_url
        self.ownership = Ownership(self.db, settings.home, peer_url, settings.owner_lease_s)
        self.on_lost: Callable[[], None] = lambda: None
        self.starter = LauncherStarter(
            launcher, self.service_id, silent_s=max(SILENT_S, 3 * settings.reconcile_interval_s)
        )
        self._launcher = launcher
        self.metrics = ServiceMetrics()
        self.making = asyncio.Semaphore(JOBS_SHOWN_AT_ONCE)
        self.large_answers = Slots(settings.large_answers, settings.large_answers_of_one)
        self.hub = Hub(self.db)
        self.pace = Pace(self.hub.streamed)
        self.stream_slots = StreamSlots(settings.streams, settings.streams_of_one)
        self.changes = Rates(settings.changes_burst, settings.changes_per_s)
        ca = "" if settings.tls_ca is None else read_ca(settings.tls_ca)
        certified = urlsplit(service_url).hostname if settings.peer_host is not None else None
        self.standby = Standby(self.ownership, ca, certified)
        told: dict[str, str] = {} if settings.log_format == "text" else {"log_format": settings.log_format}
        self.traces: Traces | None = None
        if settings.otlp_endpoint is not None:
            told[ENDPOINT] = settings.otlp_endpoint
            self.traces = Traces(settings.otlp_endpoint, "thinwire-service", self.metrics.count_spans)
        self.projects = Projects(self.db, has_packages=lambda project: self.packages.has_some(project), clock=clock)
        folders = RunFolders(settings.runs, ServiceAt(service_url, ca), told, self.traces)
        self.packages = Packages(
            settings.packages,
            max_bytes=settings.package_max_bytes,
            total_bytes=settings.packages_max_bytes,
            person_bytes=settings.packages_person_max_bytes,
            keep_days=settings.package_keep_days,
            named=self._named_packages,
            confirm_owner=self.ownership.confirm,
            limits=self.projects.settings,
            clock=clock,
        )
        self.reconciler = Reconciler(
            self.db,
            launcher,
            folders,
            look=self.starter.look,
            confirm_owner=self.ownership.confirm,
            clock=clock,
            interval_s=settings.reconcile_interval_s,
            observe_turn=self.metrics.turned,
            packages=self.packages,
            prune=self._prune,
            log_room=lambda job_id: self.reports.room(job_id),
        )
        self.jobs = JobService(
            self.db,
            launcher,
            folders,
            self.packages,
            launcher_reason=self.launcher_reason,
            room=lambda: self.reconciler.admission.room,
            refuse_full=self._refuse_full,
            would=lambda row: self.reconciler.admission.would(row),
            confirm_owner=self.ownership.confirm,
            wake=self.reconciler.wake,
            clock=clock,
            shared_folders=settings.shared_folders,
            keep_jobs=settings.keep_jobs,
            keep_days=settings.keep_days,
            person_jobs=settings.person_max_jobs,
            person_bytes=settings.person_max_bytes,
        )
        self.log_parts = LogParts(self.jobs, self.hub, self.pace)
        self.reports = WorkerReports(
            self.db,
            folders,
            self.packages,
            lease_s=settings.worker_lease_s,
            clock=clock,
            networks=settings.scrape_networks,
            pace=self.pace,
            grace_s=settings.job_grace_s,
            job_bytes=settings.job_max_bytes,
            person_bytes=settings.person_max_bytes,
        )
        self.quotas = Quotas(self.db, self.packages.bytes_of, lambda: self.reconciler.admission.room)
        self.metrics.watch(
            self.jobs.count_by_state,
            launcher.name,
            self.launcher_reason,
            self.starter.age_s,
            lambda project: JobMetrics(self.db, clock, project),
            self.tokens.ending,
            lambda project: self.quotas.of(project, None).quotas,
            settings.home,
        )

    def own(self) -> None:
        """Take the database, its schema brought up to date; stand by where another service has it.

        Raises: DatabaseOwned where that one's database is no place to stand by at; DatabaseUnusable.
        """
        owner = self.ownership.take()
        if owner is None:
            return
        if not self.db.shared:
            raise DatabaseOwned(
                f"the database {self.db.shown} belongs to {owner}. SQLite has one service: use that one, end it (if "
                f"it was killed, wait {owner.left_s:.0f} s), or set THINWIRE_HOME or THINWIRE_DATABASE_URL"
            )
        self._stood_by = True
        logger.info("standing_by owner=%s", owner)

    def start(self) -> None:
        """Own the database, or wait for it; then tell the runs where the service is, launch and reconcile.

        Raises: DatabaseOwned, DatabaseUnusable.
        """
        self.own()
        if self.ownership.owns:
            self._begin()
        self.ownership.start(self._begin, self._end)

    def name_unknown_projects(self) -> None:
        """Say in the log which projects the settings name that are not there: made later, or misspelt."""
        for setting, names in self._projects_named.items():
            for name in self.projects.unknown(names):
                logger.warning(
                    "project_unknown setting=%s project=%s: who comes by it sees no jobs and can submit none; make it "
                    "with `thinwire project create %s`, or mend the setting and start again",
                    *(setting, name, name),
                )

    def _begin(self) -> None:
        """What only the owner does. Once."""
        if self._begun:
            return
        self._begun_at = time.monotonic()
        self.name_unknown_projects()
        self.jobs.rewrite_service_urls()
        self.starter.start()
        self.reconciler.start()
        self._begun = True

    def _end(self, why: str) -> None:
        self.reconciler.stop()
        self.on_lost()

    def launcher_reason(self) -> str | None:
        """None when jobs can be submitted, else why not, as far as is known: the launcher is not asked."""
        return self.starter.reason() if self.ownership.owns else "this service stands by and launches nothing"

    def close(self) -> None:
        """End the reconciler, the launcher and the database's connections. Safe to call twice.

        Raises: LauncherError, where the launcher could not end everything that it had started.
        """
        self.reconciler.close()
        try:
            self.starter.close()
            if not self._closed:
                self._closed = True
                self._excuse()
        finally:
            self.ownership.close()
            self.db.close()
            if self.traces is not None:
                self.traces.close()
            if self.oidc is not None:
                self.oidc.close()

    def _excuse(self) -> None:
        """An orderly end takes the runs with it, where the cluster is the service's own.

        Where another service has them, they are its own to judge.
        """
        if not self.ownership.owns or not self._launcher.own_cluster:
            return
        try:
            self.jobs.excuse_running_attempts()
        except (errors.NotOwner, SQLAlchemyError) as error:  # a full disk must keep nobody from ending
            logger.warning("attempts_not_excused error=%s", error)

    def _named_packages(self) -> set[str]:
        with self.db.read() as session:
            return JobRepository(session).packages()

    def _prune(self) -> None:
        """Jobs first: then nobody names their packages."""
        self.jobs.prune(lambda: self.audit.by_service(DELETE))
        self.jobs.sweep()
        self.packages.prune()
        self.tokens.prune()
        self.sessions.prune()
        self.people.prune()
        self.audit.prune()

    def service_id(self) -> str:
        """Which service this is, whichever process runs it."""
        with self.db.read() as session:
            return JobRepository(session).service_id()

    def _refuse_full(self) -> None:
        """Raises InsufficientStorage: what is left is for jobs that there are, to be cancelled and deleted."""
        full = self._full()
        if full is not None:
            words = "no job is taken until room is made, as by deleting jobs that are over"
            raise errors.InsufficientStorage(f"{full}: {words}")

    def _full(self) -> str | None:
        """None when the disk of the home has room for what a new job writes, else why not."""
        try:
            free = shutil.disk_usage(self._home).free
        except OSError as error:
            return f"the home folder {self._home}: {error.strerror}"
        if free < LEAST_FREE_BYTES:
            return f"the disk of {self._home} has {free >> 20} MiB left, at least {LEAST_FREE_BYTES >> 20} are needed"
        return None

    def not_ready(self) -> str | None:
        """None when the service can take and start jobs, or hands them to the owner, else why not.

        Of the launcher, what it said last.
        """
        try:
            self.db.check()
        except SQLAlchemyError as error:
            return f"database: {type(error).__name__}; see the service's log"
        full = self._full()
        if full is not None:
            return full
        if not self.ownership.owns:
            return self.ownership.over or self.standby.not_ready()
        reason = self.starter.reason()
        if reason is not None and self._stood_by:
            begun_s = 0.0 if self._begun_at is None else time.monotonic() - self._begun_at
            if begun_s < TAKES_OVER_S and self.starter.age_s() is None:
                return None
        return f"launcher: {reason}" if reason is not None else None


def _oidc(settings: Settings, people: IssuerPeople, service_url: str, clock: Callable[[], float]) -> Oidc:
    """Sign-on by the issuer that the settings name. Raises: SignOnMissing, WrongCa."""
    try:
        from thinwire.service.people.oidc import Oidc
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("joserfc", "cryptography"):
            raise
        raise SignOnMissing(
            f"THINWIRE_OIDC_ISSUER is set, and {error.name} is not installed, which checks the signatures of its "
            "tokens: pip install 'thinwire[oidc]'"
        ) from error
    if not settings.oidc_roles:
        logger.warning("sign_on_lets_nobody_in issuer=%s: THINWIRE_OIDC_ROLES is empty", settings.oidc_issuer)
    return Oidc(settings, people, settings.oidc_page_url or settings.public_url or service_url, clock=clock)


def create_app(
    settings: Settings,
    launcher: Launcher,
    *,
    service_url: str | None = None,
    peer_url: str | None = None,
    clock: Callable[[], float] = time.time,
) -> FastAPI:
    """The application. It makes the home folder and the operator's token where they are missing; its lifespan
    takes the database or stands by, starts the launcher in a thread and the reconciler, and ends all of them.

    service_url: how workers reach the service; default: settings.public_url, else the host and port of the settings.
    peer_url: how other services of the same database reach it; default: service_url. clock: unix seconds.
    Raises: tokens.TokenFileError, db.DatabaseUnusable, SignOnMissing, WrongCa, OSError.
    """
    url = service_url or settings.public_url or f"http://{settings.host}:{settings.port}"
    plane = ControlPlane(settings, launcher, url.rstrip("/"), peer_url or url.rstrip("/"), clock)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await run_in_threadpool(plane.start)
        try:
            yield
        finally:
            await plane.standby.close()
            await run_in_threadpool(plane.close)

    app = _Api(
        title="Thinwire",
        version=_version(),
        description="Elastic training over ordinary Ethernet. Every error answers an ErrorBody.",
        lifespan=lifespan,
        default_response_class=errors.ShowableJSON,
        redirect_slashes=False,  # it would redirect to whatever Host says, and lose a proxy's scheme and prefix
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        swagger_ui_oauth2_redirect_url=None,
    )
    app.state.plane = plane
    errors.install(app)
    app.include_router(jobs_router.operators)
    app.include_router(streams)
    app.include_router(jobs_router.workers)
    app.include_router(jobs_router.claims)
    app.include_router(packages_router.packages)
    app.include_router(people_router.people)
    app.include_router(people_router.members)
    app.include_router(_own)
    app.include_router(web_router.sessions)
    app.include_router(sign_on)
    app.include_router(web_router.pages)
    app.mount(WEB_FILES, web_router.files())
    app.mount(DOCS_FILES, StaticFiles(packages=[("fastapi_offline", "static")]))
    # The last one added is the first to see a request: name it, see whom another service or a proxy speaks for, send
    # its answer in parts, tell browsers, count it, ask who it is, hand it on, note what is changed, read the body.
    app.add_middleware(Bodies, charge=plane.reports.charge)
    app.add_middleware(Audited, db=plane.db, clock=clock, rates=plane.changes)
    app.add_middleware(HandsOn, standby=plane.standby, ownership=plane.ownership, charge=plane.reports.charge)
    app.add_middleware(Guard, find=plane.callers.of, find_session=plane.sessions.of, clock=clock)
    app.add_middleware(RequestMetrics, metrics=plane.metrics)
    app.add_middleware(BrowserHeaders)
    app.add_middleware(Paced)
    if plane.traces is not None:
        app.add_middleware(Traced, spans=plane.traces)
    if settings.trusted_proxies:  # by default nobody is: a job on this machine could say that it comes from anywhere
        app.add_middleware(ProxyHeadersMiddleware, trusted_hosts=_proxies(settings.trusted_proxies))
    app.add_middleware(HandedOn, standby=plane.standby)
    app.add_middleware(RequestIds, trusted=settings.trusted_proxies, vouched=plane.standby.vouched)
    return app


def _proxies(networks: Sequence[IPNetwork]) -> list[str]:
    """As uvicorn takes them. A server on :: meets IPv4 in IPv6's clothes."""
    mapped = [f"::ffff:{one.network_address}/{96 + one.prefixlen}" for one in networks if one.version == 4]
    return [str(one) for one in networks] + mapped


class _Api(FastAPI):
    """Its document also has the models of what FastAPI does not read or write itself: a large body, streams."""

    _document: ClassVar[dict[str, Any] | None] = None

    def openapi(self) -> dict[str, Any]:
        """The document, made once in a process: it takes half a second, and no setting changes a route."""
        if _Api._document is None:
            made = super().openapi()
            schemas = made["components"]["schemas"]
            ref = f"{SCHEMAS}{{model}}"
            _, by_hand = models_json_schema(
                [(Telemetry, "validation"), *((model, "serialization") for model in MODELS.values())], ref_template=ref
            )
            for name, schema in by_hand["$defs"].items():
                schemas.setdefault(name, schema)
            _Api._document = made
        return _Api._document


_own = APIRouter(tags=["service"])


@_own.get("/healthz")
async def healthz() -> dict[str, str]:
    """The process answers. Open. It waits for no thread, so for nothing that other requests wait for."""
    return {"status": "ok"}


@_own.get("/openapi.json", include_in_schema=False)
async def openapi(request: Request) -> Response:
    """The API, for programs. Open; it is long, so it is written once and not for each stranger who asks."""
    state = request.app.state
    if not hasattr(state, "openapi"):
        state.openapi = errors.ShowableJSON(request.app.openapi()).body
    return Response(state.openapi, media_type="application/json")


@_own.get("/readyz", responses=errors.documented(errors.Unavailable))
def readyz(request: Request) -> dict[str, str]:
    """Jobs can be taken: the service owns its database and its launcher answers, or it hands on to the service that
    owns it; else 503 and why. Open.

    The launcher is not asked by this request: `launcher` says how long ago it answered.
    """
    plane: ControlPlane = request.app.state.plane
    reason = plane.not_ready()
    if reason is not None:
        raise errors.Unavailable(reason)
    if not plane.ownership.owns:
        return {"status": "standby"}
    age_s = plane.starter.age_s()
    return {"status": "ready", "launcher": "it is starting" if age_s is None else f"answered {age_s:.1f} s ago"}


_METRICS_DOC: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/plain": {}}, "description": "Prometheus text format"},
    **errors.documented(
        errors.Unauthorized,
        errors.Forbidden,
        errors.ProjectNotFound,
        errors.InvalidRequest,
        errors.TooManyWrongTokens,
        errors.Unavailable,
    ),
}


@_own.get(
    "/metrics", dependencies=[Depends(person), Depends(known_query)], response_class=Response, responses=_METRICS_DOC
)
def metrics(request: Request, project: InProject) -> Response:
    """The service's own metrics. Of jobs and tokens, those of the project or of all."""
    plane: ControlPlane = request.app.state.plane
    return Response(plane.metrics.text(project), media_type=CONTENT_TYPE)


def _version() -> str:
    try:
        return version("thinwire")
    except PackageNotFoundError:  # a source tree on the path, not installed
        return "0"
