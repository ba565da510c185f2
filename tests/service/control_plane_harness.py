"""The whole service in one process, with its clock and its launcher in the test's hands."""

from __future__ import annotations

import atexit
import contextlib
import functools
import secrets
import sqlite3
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from anyio.from_thread import BlockingPortal, start_blocking_portal
from fastapi import FastAPI
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource
from sqlalchemy import Engine
from starlette.routing import BaseRoute

from thinwire.contract.files import private_folder
from thinwire.service.config import Settings
from thinwire.service.db import Database
from thinwire.service.launch.driver import ticket_of
from thinwire.service.launch.fake import FakeLauncher
from thinwire.service.launch.protocol import LaunchState
from thinwire.service.main import ControlPlane, create_app

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # starlette would rather see httpx2
    from fastapi.testclient import TestClient

SERVICE_URL = "http://127.0.0.1:4711"
STORE = {"checkpoint": {"store": "s3://bucket/checkpoints"}}
"""Where jobs have their checkpoints that share no folder with the service."""


def spec(**changes: Any) -> dict[str, Any]:
    """A small job as JSON."""
    base = {"name": "quickstart", "steps": 100, "global_batch": 8, "optimizer": {"name": "onebit_adam", "warmup": 20}}
    return {**base, **changes}


def sample(step: int, *, at: float | None = None, **changes: Any) -> dict[str, Any]:
    """A sample of a history as JSON; its time follows its step."""
    return {"step": step, "phase": "warmup", "loss": 5.0, "time": float(step) if at is None else at, **changes}


def wait_until(claim: Callable[[], Any], what: str, timeout_s: float = 300.0) -> Any:
    """The first truth of `claim`; fails with `what` when the time is up."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = claim()
        if found:
            return found
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.01)


class Clock:
    """Unix seconds that pass only when told to; with `follows` the time of day, as of an issuer that signs by it."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0
        self.follows = False

    def __call__(self) -> float:
        return time.time() if self.follows else self.now

    def pass_(self, seconds: float) -> None:
        self.now += seconds


@functools.cache
def migrated() -> bytes:
    """An SQLite database of this version without a job: to migrate one is half of what a service takes to start."""
    with tempfile.TemporaryDirectory() as folder:
        database = Database(f"sqlite:///{folder}/thinwire.db")
        database.upgrade()
        database.close()
        return (Path(folder) / "thinwire.db").read_bytes()


_LOOP = contextlib.ExitStack()
atexit.register(_LOOP.close)  # while its thread still runs


@functools.cache
def event_loop() -> BlockingPortal:
    """The one that answers all requests of a process, as a server's does: a client makes a thread with one for each."""
    return _LOOP.enter_context(start_blocking_portal())


_ROUTES: list[BaseRoute] = []


def share_routes(app: FastAPI) -> None:
    """What routes take is worked out at the first request of an application, for ten requests' time: once a process."""
    if not _ROUTES:
        _ROUTES.extend(app.router.routes)
    app.router.routes[:] = _ROUTES


_STATEMENTS: list[Engine] = []


def share_statements(database: Database) -> None:
    """SQLAlchemy compiles a statement once for each engine's dialect, a sixth of a test's time: once a process here."""
    if database.engine.dialect.name != "sqlite":
        return
    if not _STATEMENTS:
        _STATEMENTS.append(database.engine)
    for engine in (database.engine, database._writing):
        engine.dialect = _STATEMENTS[0].dialect
        engine._compiled_cache = _STATEMENTS[0]._compiled_cache


class _Given(Settings):
    """Of what a test gives alone: to look for 120 names in the environment is a quarter of what a service takes."""

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, **others: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)


class Service:
    """An application without its lifespan: `turn` is the reconciler's thread."""

    def __init__(self, home: Path, launcher: FakeLauncher | None = None, **settings: Any) -> None:
        self.home = home
        self.clock = Clock()
        self.launcher = launcher or FakeLauncher()
        self.settings = _Given(home=home, launcher="fake", scrape_networks=("2001:db8::/32", "0.0.0.0/0"), **settings)
        database = home / "thinwire.db"
        if self.settings.database == f"sqlite:///{database}" and not database.exists():
            private_folder(home)
            database.touch(mode=0o600)
            database.write_bytes(migrated())
            with contextlib.closing(sqlite3.connect(database)) as connection:  # what each of them has of its own
                connection.execute("UPDATE service SET id = ?", (secrets.token_hex(4),))
                connection.commit()
        self.open()

    def open(self) -> None:
        """Build the application over the home, as a service that starts does, without the reconciler's thread."""
        self.app: FastAPI = create_app(self.settings, self.launcher, service_url=SERVICE_URL, clock=self.clock)
        share_routes(self.app)
        self.plane: ControlPlane = self.app.state.plane
        share_statements(self.plane.db)
        self.plane.reconciler.patience_s = 30.0  # a turn is over when all that it asked has been answered
        self.plane.own()
        if self.plane.ownership.owns:
            self.begin()
        self.token = (self.home / "token").read_text().strip()
        self.client = TestClient(self.app, raise_server_exceptions=False, client=("127.0.0.1", 50000))
        self.client.portal = event_loop()
        self.client.headers["Authorization"] = f"Bearer {self.token}"

    def begin(self) -> None:
        """What the owner of the database does."""
        self.plane.jobs.rewrite_service_urls()
        self.plane.starter.start()
        wait_until(lambda: self.launcher.starts > 0 and self.plane.starter.reason() is None, "the fake launcher")

    def close(self) -> None:
        self.plane.close()

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            self.clock.pass_(1.0)
            self.plane.reconciler.turn()

    def submit(self, **changes: Any) -> str:
        """Submit a job and return its id; nothing has been launched yet."""
        answer = self.client.post("/v1/jobs", json=spec(**changes))
        assert answer.status_code == 202, answer.text
        return str(answer.json()["id"])

    def running(self, **changes: Any) -> str:
        """A job that its cluster says is running."""
        job_id = self.submit(**changes)
        self.turn()
        self.launcher.put(job_id, LaunchState.RUNNING)
        self.turn()
        assert self.job(job_id)["state"] == "RUNNING"
        return job_id

    def job(self, job_id: str) -> dict[str, Any]:
        answer = self.client.get(f"/v1/jobs/{job_id}")
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def state(self, job_id: str) -> str:
        return str(self.job(job_id)["state"])

    def run_dir(self, job_id: str) -> Path:
        return self.home / "runs" / job_id

    def job_headers(self, job_id: str) -> dict[str, str]:
        """What the workers of the job send."""
        token = (self.run_dir(job_id) / "token").read_text().strip()
        return {"Authorization": f"Bearer {token}"}

    def ticket_headers(self, job_id: str, attempt: int = 1) -> dict[str, str]:
        """What the driver of an attempt sends to claim the job."""
        token = (self.run_dir(job_id) / "token").read_text().strip()
        return {"Authorization": f"Bearer {ticket_of(token, attempt)}"}

    def person(self, name: str, role: str = "user", **more: Any) -> dict[str, str]:
        """Make a token for somebody; what they send."""
        answer = self.client.post("/v1/tokens", json={"name": name, "role": role, **more})
        assert answer.status_code == 201, answer.text
        return {"Authorization": f"Bearer {answer.json()['token']}"}

    def post(self, job_id: str, *, attempt: int = 1, **batch: Any) -> Any:
        """Post telemetry as the job does."""
        body = {"attempt": attempt, **batch}
        return self.client.post(f"/v1/jobs/{job_id}/telemetry", json=body, headers=self.job_headers(job_id))

    def register(self, job_id: str, rank: int, **changes: Any) -> Any:
        """Register a worker as the job does."""
        body = {"address": f"127.0.0.1:{39000 + rank}", "attempt": 1, "pid": 100 + rank, "node": "box-a", **changes}
        return self.client.put(f"/v1/jobs/{job_id}/workers/{rank}", json=body, headers=self.job_headers(job_id))
