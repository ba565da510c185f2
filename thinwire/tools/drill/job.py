"""The job of a drill: a run folder and the driver that Ray Jobs would run, on a Ray of the drill's own."""

from __future__ import annotations

import json
import os
import platform
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from thinwire.contract.reports import Event, Sample
from thinwire.contract.run_folder import RunFolder
from thinwire.tools.drill.asked import DrillFailed, Say
from thinwire.tools.hardware import hardware
from thinwire.workers.telemetry import history
from thinwire.workers.telemetry.history import HistoryError

START_S = 300.0
"""How long a job may take to its first step."""
JOB_LOOK_S = 0.2
STOP_S = 60.0
GLOBAL_BATCH = 16


def small_gpt(workers: int, optimizer: str, *, shadow: str) -> dict[str, Any]:
    """The job: a small GPT whose schedule does not end before the drill does."""
    rate = 2e-3
    more: dict[str, Any] = {"lr": rate}
    if optimizer == "local_steps":
        more = {"every": 32, "inner": {"name": "adam", "lr": rate}}
    warmup = {"zero_one_adam": {"var_freeze": 50}, "onebit_adam": {"warmup": 50}, "onebit_lamb": {"warmup": 50}}
    return {
        "name": "drill",
        "steps": 10**8,
        "global_batch": GLOBAL_BATCH,
        "recipe": {"layers": 4, "width": 128, "heads": 4, "context": 128},
        "optimizer": {"name": optimizer, **more, **warmup.get(optimizer, {})},
        "lr_schedule": {"warmup": 20, "decay": "constant"},
        "workers": {"min": 1, "max": workers, "device": "auto", "max_restarts": 100, "shadow": shadow},
        "checkpoint": {"every_steps": 500},
        "evaluation": {"every_steps": 250, "windows": 64},
    }


def made_by() -> dict[str, Any]:
    """Versions and hardware."""
    versions = {name: version(name) for name in ("thinwire", "torch", "ray")}
    return {"versions": {"python": platform.python_version(), **versions}, "hardware": hardware()}


@contextmanager
def own_ray(num_cpus: int, own_address: str | None = None) -> Iterator[str]:
    """A Ray of this process's own, with a CPU a worker. Gives its address.

    own_address: of this machine, where others are to join; else Ray finds one.
    """
    import ray

    context = ray.init(
        address="local",
        num_cpus=num_cpus,
        include_dashboard=False,
        object_store_memory=200 * 2**20,
        log_to_driver=False,
        logging_level="ERROR",
        **({} if own_address is None else {"_node_ip_address": own_address}),
    )
    try:
        yield str(context.address_info["gcs_address"])
    finally:
        ray.shutdown()


class Left:
    """What a job of a drill has left in its folder."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self.id = run_dir, run_dir.name

    @property
    def spec(self) -> dict[str, Any]:
        """What it was asked to do. Raises: OSError; ValueError where job.json is none of a drill."""
        found = json.loads(RunFolder(self.run_dir).job.read_text())
        if not isinstance(found, dict) or not isinstance(found.get("spec"), dict):
            raise ValueError(f"{RunFolder(self.run_dir).job} holds no spec")
        return dict(found["spec"])

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


class Job(Left):
    """A job that runs within a `with`, or from start() to stop()."""

    def __init__(self, run_dir: Path, spec: dict[str, Any], ray_address: str) -> None:
        super().__init__(run_dir)
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

    def __enter__(self) -> Job:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def until_all_train(self, workers: int, say: Say) -> None:
        """Wait for a step of all workers together. Raises: DrillFailed."""
        until = time.monotonic() + START_S
        while True:
            samples = self.samples()
            if samples and samples[-1].step > 0 and samples[-1].world_size == workers:
                return
            self.check()
            if time.monotonic() > until:
                raise DrillFailed(f"no step with {workers} workers in {START_S:g} s:\n{self.why_it_ended()}")
            say(f"starting a job of {workers} workers", 0.0)
            time.sleep(JOB_LOOK_S)

    def until_step(self, steps: int, say: Say) -> None:
        """Wait until it has made so many. Raises: DrillFailed."""
        while True:
            samples = self.samples()
            step = samples[-1].step if samples else 0
            say(f"the same job undisturbed: step {step} of {steps}", step / steps)
            if step >= steps:
                return
            self.check()
            time.sleep(1.0)

    def check(self) -> None:
        """Raises: DrillFailed where its driver has ended."""
        if not self.running:
            raise DrillFailed(f"the job of {self.run_dir} ended:\n{self.why_it_ended()}")

    def membership(self) -> Any:
        """The membership's actor; None where it is away."""
        import ray

        from thinwire.workers.elastic.plan import NAMESPACE

        try:
            return ray.get_actor(f"{self.id}/membership", namespace=NAMESPACE)
        except ValueError:
            return None

    def members(self) -> dict[str, Any] | None:
        """Who trains now, as the membership says; None where it is away."""
        import ray
        from ray.exceptions import GetTimeoutError, RayActorError

        if (actor := self.membership()) is None:
            return None
        try:
            found: dict[str, Any] = ray.get(actor.snapshot.remote(), timeout=5.0)
        except (RayActorError, GetTimeoutError):
            return None
        return found

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

    def why_it_ended(self) -> str:
        """The last lines of its driver."""
        return "\n".join((self.run_dir / "driver.log").read_text(errors="replace").splitlines()[-15:])
