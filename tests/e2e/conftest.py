"""One real service with one real Ray for the end-to-end tests: `thinwire serve` on an empty home."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import missing
from tests.deploy.queries import WIRE_INTERFACE

DEADLINE_S = 600.0
SMALL_JOB: dict[str, Any] = {
    "name": "e2e",
    "steps": 120,
    "global_batch": 8,
    "recipe": {"layers": 2, "width": 96, "heads": 4, "context": 96},
    "optimizer": {"name": "onebit_adam", "lr": 2e-3, "betas": [0.9, 0.99], "warmup": 24},
    "workers": {"min": 2, "max": 2},
    "checkpoint": {"every_steps": 20},
    "evaluation": {"every_steps": 40, "windows": 16},
}


def wait_for(what: str, probe: Callable[[], Any], deadline_s: float = DEADLINE_S) -> Any:
    """The first true answer of `probe`, asked again and again until the deadline."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        answer = probe()
        if answer:
            return answer
        time.sleep(0.2)
    raise AssertionError(f"not within {deadline_s:.0f} s: {what}")


class Server:
    """`thinwire serve` as a child, and its REST API."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.process: subprocess.Popen[bytes] | None = None
        # One for all: to make one reads the certificates of the machine, which is most of what a request costs.
        self.client = httpx.Client(timeout=30)

    def start(self) -> None:
        self.log = (self.home / "server.log").open("ab")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "thinwire.cli.main", "serve"],
            env={**os.environ, "THINWIRE_HOME": str(self.home), "THINWIRE_WIRE_INTERFACE": WIRE_INTERFACE},
            stdout=self.log,
            stderr=self.log,
            start_new_session=True,
        )
        wait_for("the service is ready", self._ready)

    def kill(self) -> None:
        """As a crash: no goodbye. Ray and the jobs go on."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        self.log.close()

    def stop(self) -> int:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(timeout=60)
        self.log.close()
        return code

    @property
    def token(self) -> str:
        return (self.home / "token").read_text().strip()

    @property
    def url(self) -> str:
        return json.loads((self.home / "server.json").read_text())["url"]

    def ray(self) -> str:
        """host:port of the dashboard of the service's own Ray."""
        return f"127.0.0.1:{json.loads((self.home / 'ray' / 'head.json').read_text())['port']}"

    def _ready(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, (self.home / "server.log").read_text()[-4000:]
        try:
            where = json.loads((self.home / "server.json").read_text())
            return where["pid"] == self.process.pid and self.client.get(f"{where['url']}/readyz").status_code == 200
        except (OSError, httpx.HTTPError):
            return False

    def call(self, method: str, path: str, **more: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.token}"}
        answer = self.client.request(method, f"{self.url}{path}", headers=headers, **more)
        assert answer.status_code < 400, answer.text
        return answer

    def submit(self, **changes: Any) -> str:
        return self.call("POST", "/v1/jobs", json={**SMALL_JOB, **changes}).json()["id"]

    def job(self, job_id: str) -> dict[str, Any]:
        return self.call("GET", f"/v1/jobs/{job_id}").json()

    def logs(self, job_id: str) -> str:
        return self.call("GET", f"/v1/jobs/{job_id}/logs").json()["text"]

    def history(self, job_id: str) -> dict[str, Any]:
        return self.call("GET", f"/v1/jobs/{job_id}/metrics").json()

    def wait_for_step(self, job_id: str, step: int) -> dict[str, Any]:
        def reached() -> dict[str, Any] | None:
            job = self.job(job_id)
            assert job["state"] in ("SUBMITTING", "PENDING", "RUNNING"), (job["state"], job["reason"])
            return job if job["progress"] and job["progress"]["step"] >= step else None

        return wait_for(f"{job_id} reaches step {step}", reached)

    def wait_for_end(self, job_id: str) -> dict[str, Any]:
        def ended() -> dict[str, Any] | None:
            job = self.job(job_id)
            return job if job["state"] in ("SUCCEEDED", "FAILED", "CANCELLED") else None

        return wait_for(f"{job_id} ends", ended)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory):
    if importlib.util.find_spec("ray") is None:
        missing("Ray is not installed: pip install 'thinwire[worker]'")
    home = tmp_path_factory.mktemp("home")
    server = Server(home)
    server.start()
    yield server
    if server.process is not None and server.process.poll() is None:
        assert server.stop() == 0
