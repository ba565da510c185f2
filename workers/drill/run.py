"""The drill: a job whose workers are killed, then the same job undisturbed up to the same step, on a Ray of its own.

A job is a run folder, and the driver that Ray Jobs would run. The worker that is killed next is any that trains, at
random, by SIGKILL to its process on this machine.
"""

from __future__ import annotations

import json
import os
import platform
import random
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from thinwire.contract.drill import PICTURE_NAME, Account, Drill, DrillFailed, Say
from thinwire.contract.reports import Event, Sample
from thinwire.contract.run_folder import RunFolder
from thinwire.workers.drill.account import Kill, account, draw
from thinwire.workers.telemetry import history
from thinwire.workers.telemetry.history import HistoryError

START_S = 300.0
"""How long a job may take to its first step."""
LOOK_S = 0.2
STOP_S = 60.0
GLOBAL_BATCH = 16
FIGURES_NAME = "drill.json"


def run(drill: Drill, say: Say) -> Account:
    """Run both jobs; figures, picture and run folders are in drill.out. Takes about twice drill.minutes.

    Raises: DrillFailed; OSError.
    """
    with _ray(drill.workers) as address:
        killed = Job(drill.out / f"killed-{time.time_ns() // 10**6}", _spec(drill), address)
        killer = _disturb(drill, killed, say)
        samples = killed.samples()
        if not samples or samples[-1].step < 2:
            raise DrillFailed(
                f"all workers were dead at once, before there was a checkpoint, and the job has begun again: kill less "
                f"often than every {drill.kill_every_s:g} s, or give more than {drill.workers} workers"
            )
        other = Job(drill.out / f"undisturbed-{time.time_ns() // 10**6}", _spec(drill), address)
        _undisturbed(other, samples[-1].step, say)
    undisturbed = other.samples()
    found = account(samples, killed.events(), killer.kills, undisturbed, drill.workers, GLOBAL_BATCH)
    kills = [asdict(kill) for kill in killer.kills]
    whole = {"drill": {**asdict(drill), "out": ""}, **made_by(), "figures": found.as_json(), "kills": kills}
    (drill.out / FIGURES_NAME).write_text(json.dumps(whole, indent=2) + "\n")
    draw(drill.out / PICTURE_NAME, samples, killer.kills, undisturbed, found)
    return found


def _spec(drill: Drill) -> dict[str, Any]:
    """The job: a small GPT whose schedule does not end before the drill does."""
    warmup = {"var_freeze": 50} if drill.optimizer == "zero_one_adam" else {"warmup": 50}
    dense = drill.optimizer in ("adam", "lamb", "sgd")
    return {
        "name": "drill",
        "steps": 10**8,
        "global_batch": GLOBAL_BATCH,
        "recipe": {"layers": 4, "width": 128, "heads": 4, "context": 128},
        "optimizer": {"name": drill.optimizer, "lr": 2e-3, **({} if dense else warmup)},
        "lr_schedule": {"warmup": 20, "decay": "constant"},
        "workers": {"min": 1, "max": drill.workers, "device": "auto", "max_restarts": 100, "shadow": drill.shadow},
        "checkpoint": {"every_steps": 500},
        "evaluation": {"every_steps": 250, "windows": 64},
    }


def made_by() -> dict[str, Any]:
    """Versions and hardware."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    cpu = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
    versions = {name: version(name) for name in ("thinwire", "torch", "ray")}
    return {
        "versions": {"python": platform.python_version(), **versions},
        "hardware": {"cpu": cpu, "cores": os.cpu_count(), "system": f"{platform.system()} {platform.machine()}"},
    }


def _disturb(drill: Drill, job: Job, say: Say) -> Killer:
    with _running(job):
        _first_step(job, drill.workers, say)
        killer = Killer(lambda: _snapshot(job.id), drill.kill_every_s, drill.seed)
        until = time.monotonic() + 60 * drill.minutes
        while (left_s := until - time.monotonic()) > 0:
            _alive(job)
            kill = killer.look()
            if kill is not None:
                say(f"killed worker {kill.slot} (rank {kill.rank})", 1 - left_s / (60 * drill.minutes))
            time.sleep(LOOK_S)
    return killer


def _undisturbed(job: Job, steps: int, say: Say) -> None:
    with _running(job):
        while True:
            samples = job.samples()
            step = samples[-1].step if samples else 0
            say(f"the same job undisturbed: step {step} of {steps}", step / steps)
            if step >= steps:
                return
            _alive(job)
            time.sleep(1.0)


def _first_step(job: Job, workers: int, say: Say) -> None:
    """Wait until all workers train together."""
    until = time.monotonic() + START_S
    while True:
        samples = job.samples()
        if samples and samples[-1].step > 0 and samples[-1].world_size == workers:
            return
        _alive(job)
        if time.monotonic() > until:
            raise DrillFailed(f"no step with {workers} workers in {START_S:g} s:\n{job.why_it_ended()}")
        say(f"starting a job of {workers} workers", 0.0)
        time.sleep(LOOK_S)


def _alive(job: Job) -> None:
    if not job.running:
        raise DrillFailed(f"the job of {job.run_dir} ended:\n{job.why_it_ended()}")


@contextmanager
def _running(job: Job) -> Iterator[None]:
    job.start()
    try:
        yield
    finally:
        job.stop()


@contextmanager
def _ray(workers: int) -> Iterator[str]:
    """A Ray of this process's own, with a CPU a worker. Gives its address."""
    import ray

    context = ray.init(
        address="local",
        num_cpus=workers,
        include_dashboard=False,
        object_store_memory=200 * 2**20,
        log_to_driver=False,
        logging_level="ERROR",
    )
    try:
        yield str(context.address_info["gcs_address"])
    finally:
        ray.shutdown()


def _snapshot(job_id: str) -> dict[str, Any] | None:
    """Who trains now, as the job's membership says; None where it is away."""
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError

    from thinwire.workers.elastic.plan import NAMESPACE

    try:
        actor = ray.get_actor(f"{job_id}/membership", namespace=NAMESPACE)
        found: dict[str, Any] = ray.get(actor.snapshot.remote(), timeout=5.0)
    except (ValueError, RayActorError, GetTimeoutError):
        return None
    return found


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


class Killer:
    """Kills every `every_s` seconds, from `every_s` after it was made. snapshot: of the membership, None where away."""

    def __init__(self, snapshot: Callable[[], dict[str, Any] | None], every_s: float, seed: int) -> None:
        self.kills: list[Kill] = []
        self._snapshot, self._every_s, self._random = snapshot, every_s, random.Random(seed)
        self._next = time.monotonic() + every_s

    def look(self) -> Kill | None:
        """Kill one, if it is time and there is one. Returns it."""
        if time.monotonic() < self._next:
            return None
        known = self._snapshot() or {}
        members = known.get("members") or []
        if not members:
            return None
        chosen = self._random.choice(members)
        try:
            os.kill(chosen["pid"], signal.SIGKILL)
        except ProcessLookupError:  # it has just died of something else
            return None
        self._next = time.monotonic() + self._every_s
        kill = Kill(time.time(), chosen["slot"], chosen["rank"], known["last_step"])
        self.kills.append(kill)
        return kill
