"""The launcher of a standing cluster: what it submits, and whose submissions it looks at."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from pydantic import ValidationError

from thinwire.service.config import Settings
from thinwire.service.launch.protocol import LauncherError, LaunchState, NoLog
from thinwire.service.launch.ray import RayLauncher
from thinwire.service.tickets import ticket_of

TOKEN = "t" * 64


class Cluster(BaseHTTPRequestHandler):
    """Ray's Jobs API, as far as it goes."""

    token: ClassVar[str] = TOKEN
    jobs: ClassVar[dict[str, dict[str, Any]]] = {}
    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        name = self.path.removeprefix("/api/jobs/")
        if self.headers["Authorization"] != f"Bearer {self.token}":
            self._answer(401, {"error": "Unauthorized"})
        elif self.path == "/api/version":
            self._answer(200, {"version": "4"})
        elif name.removesuffix("/logs") not in self.jobs:
            self._answer(404, {})
        elif name.endswith("/logs"):
            self._answer(200, {"logs": "first\nlast \u00e4\n"})
        else:
            self._answer(200, {"status": "RUNNING", "message": None})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.jobs[body["submission_id"]] = body
        self._answer(200, {})

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Silent."""


@pytest.fixture
def cluster() -> Iterator[str]:
    Cluster.token, Cluster.jobs, Cluster.asked = TOKEN, {}, []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Cluster)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "ray-token"
    path.write_text(TOKEN + "\n")
    return path


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "runs" / "job-1"
    path.mkdir(parents=True)
    (path / "token").write_text("the-job's-own-token\n")
    (path / "service_url").write_text("http://10.0.0.9:8400\n")
    return path


def started(url: str, token_file: Path, service_id: str = "aaaa") -> RayLauncher:
    launcher = RayLauncher(url, token_file)
    launcher.start(service_id)
    return launcher


def test_a_submission_carries_a_ticket_and_no_secret(cluster: str, token_file: Path, run_dir: Path) -> None:
    launcher = started(cluster, token_file)
    launcher.submit("job-1-attempt2", run_dir, 2, {"job_id": "job-1", "attempt": "2"})
    [(name, body)] = Cluster.jobs.items()
    assert name == "aaaa.job-1-attempt2"
    ticket = ticket_of("the-job's-own-token", 2)
    assert body["entrypoint"] == (
        '"${THINWIRE_PYTHON:-python}" -m thinwire.workers.main --service http://10.0.0.9:8400 --job job-1 --attempt 2 '
        f"--ticket {ticket}"
    )
    assert "own-token" not in json.dumps(body)
    assert TOKEN not in json.dumps(body)


def test_services_of_one_cluster_do_not_see_each_other(cluster: str, token_file: Path, run_dir: Path) -> None:
    one, other = started(cluster, token_file, "aaaa"), started(cluster, token_file, "bbbb")
    one.submit("job-1", run_dir, 1, {"job_id": "job-1"})
    assert one.status("job-1").state is LaunchState.RUNNING
    assert other.status("job-1").state is LaunchState.ABSENT
    assert one.logs("job-1", 6).text == "last \u00e4\n"
    with pytest.raises(NoLog):
        other.logs("job-1", 0)
    assert not any(path.rstrip("/") == "/api/jobs" for path in Cluster.asked)


def test_a_token_that_was_replaced_is_read_again(cluster: str, token_file: Path) -> None:
    launcher = started(cluster, token_file)
    Cluster.token = "n" * 64
    reason = launcher.ready()
    assert reason is not None
    assert str(token_file) in reason
    token_file.write_text(Cluster.token)
    assert launcher.ready() is None


def test_a_cluster_that_is_away_and_a_token_that_is_missing_are_told(tmp_path: Path, token_file: Path) -> None:
    with pytest.raises(LauncherError, match="does not answer"):
        started("http://127.0.0.1:9", token_file)
    with pytest.raises(LauncherError, match="THINWIRE_RAY_TOKEN_FILE"):
        started("http://127.0.0.1:9", tmp_path / "none")


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({}, "THINWIRE_RAY_ADDRESS"),
        ({"ray_address": "http://head:8265"}, "THINWIRE_PUBLIC_URL"),
        ({"ray_address": "head:8265", "public_url": "http://a"}, "http://head:8265"),
        ({"ray_address": "http://h:1", "public_url": "http://a", "shared_folders": ["shared"]}, "absolute folder"),
    ],
)
def test_what_the_launcher_needs_is_asked_for(tmp_path: Path, given: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        Settings(home=tmp_path, launcher="ray", **given)
