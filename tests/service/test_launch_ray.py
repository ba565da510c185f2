"""The launcher of a standing cluster: what it submits, and whose submissions it looks at."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from thinwire.service.config import Settings
from thinwire.service.launch.driver import ticket_of
from thinwire.service.launch.protocol import LauncherError, LaunchState, NoLog
from thinwire.service.launch.ray import RayLauncher
from thinwire.service.launch.ray_jobs import RayJobs

TOKEN = "t" * 64


URL = "http://head:8265"


class Cluster:
    """Ray's Jobs API, as far as it goes."""

    def __init__(self) -> None:
        self.token, self.jobs, self.asked = TOKEN, dict[str, dict[str, Any]](), list[str]()

    def answer(self, request: httpx.Request) -> httpx.Response:
        """To a request of the launcher."""
        if request.headers["Authorization"] != f"Bearer {self.token}":
            return httpx.Response(401, json={"error": "Unauthorized"})
        if request.method == "POST":
            body = json.loads(request.content)
            self.jobs[body["submission_id"]] = body
            return httpx.Response(200, json={})
        self.asked.append(path := request.url.path)
        name = path.removeprefix("/api/jobs/")
        if path == "/api/version":
            return httpx.Response(200, json={"version": "4"})
        if name.removesuffix("/logs") not in self.jobs:
            return httpx.Response(404, json={})
        told = {"logs": "first\nlast \u00e4\n"} if name.endswith("/logs") else {"status": "RUNNING", "message": None}
        return httpx.Response(200, json=told)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """The cluster at URL."""
    made = Cluster()
    transport = httpx.MockTransport(made.answer)
    monkeypatch.setattr("thinwire.service.launch.ray.RayJobs", lambda url, token: RayJobs(url, token, transport))
    return made


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


def test_a_submission_carries_a_ticket_and_no_secret(cluster: Cluster, token_file: Path, run_dir: Path) -> None:
    launcher = started(URL, token_file)
    launcher.submit("job-1-attempt2", run_dir, 2, {"job_id": "job-1", "attempt": "2"})
    [(name, body)] = cluster.jobs.items()
    assert name == "aaaa.job-1-attempt2"
    ticket = ticket_of("the-job's-own-token", 2)
    assert body["entrypoint"] == (
        '"${THINWIRE_PYTHON:-python}" -m thinwire.workers.main --service http://10.0.0.9:8400 --job job-1 --attempt 2 '
        f"--ticket {ticket}"
    )
    assert "own-token" not in json.dumps(body)
    assert TOKEN not in json.dumps(body)


def test_services_of_one_cluster_do_not_see_each_other(cluster: Cluster, token_file: Path, run_dir: Path) -> None:
    one, other = started(URL, token_file, "aaaa"), started(URL, token_file, "bbbb")
    one.submit("job-1", run_dir, 1, {"job_id": "job-1"})
    assert one.status("job-1").state is LaunchState.RUNNING
    assert other.status("job-1").state is LaunchState.ABSENT
    assert one.logs("job-1", 6).text == "last \u00e4\n"
    with pytest.raises(NoLog):
        other.logs("job-1", 0)
    assert not any(path.rstrip("/") == "/api/jobs" for path in cluster.asked)


def test_a_cluster_that_grows_has_no_queue(token_file: Path) -> None:
    assert RayLauncher(URL, token_file, grows=True).room() is None


def test_a_token_that_was_replaced_is_read_again(cluster: Cluster, token_file: Path) -> None:
    launcher = started(URL, token_file)
    cluster.token = "n" * 64
    reason = launcher.ready()
    assert reason is not None
    assert str(token_file) in reason
    token_file.write_text(cluster.token)
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
