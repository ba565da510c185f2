"""One job of the drill: a run folder, and the driver that Ray Jobs would run, on a Ray of the drill's own."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from thinwire.contract.reports import Event, Sample
from thinwire.contract.run_folder import RunFolder
from thinwire.workers.telemetry import history
from thinwire.workers.telemetry.history import HistoryError

STOP_S = 60.0


class Job:
    """A job that runs from start() to stop(); what it leaves is in its folder."""

    def __init__(self, run_dir: Path, spec: dict[str, Any], ray_address: str) -> None:
        self.run_dir, self.id = run_dir, run_dir.name
        self._ray_address = ray_address
        self._process: subprocess.Popen[bytes] | None = None
        run_dir.mkdir(parents=True)
        folder = RunFolder(run_dir)
        folder.job.write_text(json.dumps({"job_id": self.id, "created_at": time.time(), "spec": spec}))
        token = os.open(folder.token, os.O_WRONLY | os.O_CREAT, 0o600)
        os.write(token, secrets.token_hex(32).encode())
        os.close(token)

    def start(self) -> None:
        """Start its driver, whose output goes to driver.log."""
        with (self.run_dir / "driver.log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "thinwire.workers.main", "--run-dir", str(self.run_dir)],
                stdout=log,
                stderr=subprocess.STDOUT,
                # No dashboard runs that could show the Train run.
                env={**os.environ, "RAY_ADDRESS": self._ray_address, "RAY_TRAIN_ENABLE_STATE_TRACKING": "0"},
                start_new_session=True,
            )

    @property
    def running(self) -> bool:
        """Has its driver not ended yet?"""
        return self._process is not None and self._process.poll() is None

    def stop(self) -> None:
        """End it, as a cancelled job is ended. Does nothing where it has ended."""
        if self._process is None:
            return
        if self.running:
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def samples(self) -> list[Sample]:
        """Its history so far."""
        try:
            return history.read(RunFolder(self.run_dir).history)
        except (FileNotFoundError, HistoryError):  # not begun, or being rewritten
            return []

    def events(self) -> list[Event]:
        """What has happened so far, without a line that is being written."""
        try:
            lines = RunFolder(self.run_dir).events.read_text().split("\n")[:-1]
        except FileNotFoundError:
            return []
        return [Event.model_validate_json(line) for line in lines]

    def why_it_ended(self) -> str:
        """The last lines of its driver."""
        return "\n".join((self.run_dir / "driver.log").read_text(errors="replace").splitlines()[-15:])
