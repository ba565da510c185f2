"""The code before the newest migration serves a standing cluster, of its own code too; this one takes its job over."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from alembic.config import Config
from alembic.script import ScriptDirectory

from tests.conftest import missing
from tests.e2e.conftest import wait_for
from tests.job_file import small_job

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]


def free_ports(count: int) -> list[int]:
    """Different ports that are free now."""
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    found = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return found


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """The tree as it was before the newest version of the schema came, whatever the file of its migration was named."""
    config = Config()
    config.set_main_option("script_location", "thinwire.service:migrations")
    newest = ScriptDirectory.from_config(config).get_current_head()
    path = f"service/migrations/versions/{newest}_*.py"

    def git(*words: str) -> bytes:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True)
        if done.returncode != 0:
            missing(f"no history to take the version before {newest} from: {done.stderr.decode().strip()}")
        return done.stdout

    added = git("log", "--format=%H", "--diff-filter=A", "--", path).decode().split()
    if not added:
        pytest.skip(f"{newest} is not committed yet: there is no version before it")
    folder = tmp_path / "old"
    folder.mkdir()
    subprocess.run(["tar", "-x"], cwd=folder, input=git("archive", f"{added[-1]}^"), check=True)
    assert not list(folder.glob(path))
    return folder


class Boxed:
    """A cluster of one box and a service, each run from the code that is named."""

    def __init__(self, folder: Path) -> None:
        self.home, self.box, self.store = folder / "home", folder / "box", folder / "store"
        self.store.mkdir()
        self.head, self.dashboard, self.port = free_ports(3)
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = (folder / "service.log").open("ab")
        self.service: subprocess.Popen[bytes] | None = None
        self.env = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("THINWIRE_", "RAY_"))},
            "THINWIRE_HOME": str(self.home),
            "THINWIRE_BOX": str(self.box),
            "THINWIRE_LAUNCHER": "ray",
            "THINWIRE_RAY_ADDRESS": f"http://127.0.0.1:{self.dashboard}",
            "THINWIRE_RAY_TOKEN_FILE": str(self.box / "auth_token"),
            "THINWIRE_PUBLIC_URL": self.url,
            "THINWIRE_SHARED_FOLDERS": json.dumps([str(self.store)]),
        }

    def command(self, code: Path, *words: str) -> str:
        """`thinwire` of a version. What it says."""
        done = subprocess.run(
            [sys.executable, "-m", "thinwire.cli.main", *words],
            env={**self.env, "PYTHONPATH": str(code)},
            cwd=self.store,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def serve(self, code: Path) -> None:
        """Start the service of a version, and wait until it is ready."""
        self.service = subprocess.Popen(
            [sys.executable, "-m", "thinwire.cli.main", "serve", "--port", str(self.port)],
            env={**self.env, "PYTHONPATH": str(code)},
            cwd=self.store,
            stdout=self.log,
            stderr=self.log,
            start_new_session=True,
        )
        wait_for("the service is ready", self._ready)

    def end(self) -> None:
        """An orderly end of the service."""
        if self.service is not None:
            self.service.send_signal(signal.SIGTERM)
            assert self.service.wait(60) == 0
            self.service = None

    def _ready(self) -> bool:
        assert self.service is not None
        assert self.service.poll() is None, Path(self.log.name).read_text()[-3000:]
        try:
            return httpx.get(f"{self.url}/readyz").is_success
        except httpx.HTTPError:
            return False

    def asked(self, path: str) -> Any:
        """What the service answers its operator."""
        token = (self.home / "token").read_text().strip()
        answer = httpx.get(f"{self.url}/v1/{path}", headers={"Authorization": f"Bearer {token}"}, timeout=30)
        assert answer.is_success, answer.text
        return answer.json()


@pytest.fixture
def boxed(tmp_path: Path) -> Iterator[Boxed]:
    if importlib.util.find_spec("ray") is None:
        missing("ray is not installed: pip install 'thinwire[worker]'")
    made = Boxed(tmp_path)
    try:
        yield made
    finally:
        try:
            made.end()
        finally:
            made.command(ROOT, "down")
            made.log.close()


def test_a_new_version_takes_over_a_job_that_runs(old: Path, boxed: Boxed) -> None:
    ports = ["--port", str(boxed.head), "--dashboard-port", str(boxed.dashboard)]
    boxed.command(old, "up", "--head", "--num-cpus", "2", *ports)
    boxed.serve(old)
    job = small_job(
        name="goes-on",
        steps=100_000,
        evaluation={"every_steps": 50_000, "windows": 8},
        checkpoint={"every_steps": 50_000, "store": str(boxed.store)},
    )
    (boxed.store / "job.json").write_text(json.dumps(job))
    job_id = boxed.command(old, "submit", "job.json").strip()

    def beyond(step: int) -> int:
        def now() -> int | None:
            found = boxed.asked(f"jobs/{job_id}")
            assert found["state"] not in ("SUCCEEDED", "FAILED", "CANCELLED"), found["reason"]
            at = (found["progress"] or {"step": 0})["step"]
            return at if at > step else None

        reached: int = wait_for(f"{job_id} is beyond step {step}", now)
        return reached

    before = beyond(20)
    boxed.end()
    ended = time.time()
    boxed.serve(ROOT)
    shown = boxed.asked(f"jobs/{job_id}")
    assert (shown["state"], shown["attempt"], shown["unreadable"]) == ("RUNNING", 1, None)
    assert shown["submitted_by"] is None  # which the old version did not write down
    after = beyond(before + 200)
    history = boxed.asked(f"jobs/{job_id}/metrics?limit=10000")
    samples = [one for one in history["samples"] if one["step"] <= after]
    assert [one["step"] for one in samples] == list(range(len(samples))), "none is missing, none was run again"
    assert any(one["time"] > ended for one in samples)
    assert [one["kind"] for one in history["events"] if one["kind"].startswith("job_")].count("job_submitting") == 1
    assert not [one for one in history["events"] if one["kind"] == "resumed"]
    boxed.command(ROOT, "cancel", job_id)
    wait_for("it is cancelled", lambda: boxed.asked(f"jobs/{job_id}")["state"] == "CANCELLED")
