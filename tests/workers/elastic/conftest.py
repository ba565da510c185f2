"""A Ray of these tests' own, and elastic jobs on it. What is started here is ended here, by process id."""

import importlib.util
import itertools
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from tests.conftest import missing

ROOT = Path(__file__).parents[3]


def until(condition, what, within_s=180.0, every_s=0.05):
    """The first true value of `condition`."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        found = condition()
        if found:
            return found
        time.sleep(every_s)
    pytest.fail(f"not within {within_s:g} s: {what() if callable(what) else what}")


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


class OwnRay:
    """A holder process and questions to it."""

    def __init__(self, folder, num_cpus):
        self.folder = folder
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "THINWIRE_"))}
        self.environment = environment | {
            "RAY_TMPDIR": str(folder),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_raylet_start_wait_time_s": "120",
            "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
            "RAY_TRAIN_ENABLE_STATE_TRACKING": "1",
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.workers.elastic.holder", str(num_cpus)],
            cwd=ROOT, env=self.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=(folder / "holder.log").open("w"), text=True,
        )  # fmt: skip
        self._answers = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self.address = self.ask("address")

    def _read(self):
        for line in self.process.stdout:
            self._answers.put(json.loads(line))
        self._answers.put({"error": "the holder has ended"})

    def ask(self, name, *arguments, **keywords):
        self.process.stdin.write(json.dumps([name, arguments, keywords]) + "\n")
        self.process.stdin.flush()
        answer = self._answers.get(timeout=120)
        if "error" in answer:
            raise RuntimeError(
                f"{name}{arguments}: {answer['error']}\n{(self.folder / 'holder.log').read_text()[-3000:]}"
            )
        return answer["answer"]

    def close(self):
        self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class ElasticJob:
    """A job of the toy train function, and what its workers wrote."""

    def __init__(self, ray, name, run_dir, **options):
        self.ray, self.name, self.run_dir = ray, name, run_dir
        self.options = {"job": name, "run_dir": str(run_dir), "address": ray.address, **options}
        self.drivers = []

    def drive(self):
        """Start a driver."""
        log = self.run_dir / f"driver-{len(self.drivers)}.log"
        driver = subprocess.Popen(
            [sys.executable, "-m", "tests.workers.elastic.drive", json.dumps(self.options)],
            cwd=ROOT, env=self.ray.environment, stdout=log.open("w"), stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        self.drivers.append(driver)
        return driver

    def log(self):
        return "\n".join(path.read_text() for path in sorted(self.run_dir.glob("driver-*.log")))

    def tail(self):
        return f"{self.lines()[-5:]}\n{self.log()[-6000:]}"

    def wait_log(self, text, times=1, within_s=60.0):
        until(lambda: self.log().count(text) >= times, lambda: f"{times} x {text}\n{self.tail()}", within_s)

    def lines(self, what=None):
        path = self.run_dir / "steps.jsonl"
        text = path.read_text() if path.exists() else ""
        lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        return [line for line in lines if what is None or line["what"] == what]

    def training(self, size, since=0.0):
        """slot -> pid, where all of a generation of this size have stepped in it since then."""
        steps = [line for line in self.lines("step") if line["time"] > since]
        if not steps:
            return None
        newest = max(line["generation"] for line in steps)
        pids = {line["slot"]: line["pid"] for line in steps if line["generation"] == newest and line["size"] == size}
        return pids if len(pids) == size else None

    def wait_training(self, size, since=0.0, within_s=180.0):
        return until(lambda: self.training(size, since), lambda: f"{size} workers training\n{self.tail()}", within_s)

    def wait_replaced(self, before, slot, within_s=60.0):
        """The pids by slot, once another process trains in this slot; the others must be the same."""

        def replaced():
            now = self.training(len(before))
            return now if now and slot in now and now[slot] != before[slot] else None

        now = until(replaced, lambda: f"slot {slot} replaced\n{self.tail()}", within_s)
        assert {s: p for s, p in now.items() if s != slot} == {s: p for s, p in before.items() if s != slot}
        return now

    def longest_pause_s(self, slot, since, pid):
        times = [line["time"] for line in self.lines("step") if line["slot"] == slot and line["pid"] == pid]
        times = [time for time in times if time > since - 0.5]
        return max(b - a for a, b in itertools.pairwise(times))

    def membership(self, method, *arguments):
        return self.ray.ask("membership", self.name, method, *arguments)

    def actors(self):
        return self.ray.ask("actors", self.name)

    def pid_of(self, actor):
        """Of "controller" or "membership"."""
        return self.actors().get(f"{self.name}/{actor}")

    def groups(self):
        return self.ray.ask("groups", self.name)

    def stop(self):
        """Let the workers come to their end. The driver's exit status."""
        (self.run_dir / "stop").touch()
        return self.wait()

    def wait(self, within_s=120.0):
        """The last driver's exit status."""
        until(lambda: self.drivers[-1].poll() is not None, lambda: f"the driver's end\n{self.tail()}", within_s)
        return self.drivers[-1].returncode

    def nothing_is_left(self, within_s=20.0):
        until(
            lambda: not self.actors() and not self.ray.ask("groups", self.name),
            lambda: f"{self.actors()} {self.ray.ask('groups', self.name)}\n{self.tail()}",
            within_s,
        )
        assert not [pid for pid in {line["pid"] for line in self.lines()} if alive(pid)]

    def close(self):
        for driver in self.drivers:
            if driver.poll() is None:
                driver.send_signal(signal.SIGTERM)
                try:
                    driver.wait(20)
                except subprocess.TimeoutExpired:
                    driver.kill()
                    driver.wait()


@pytest.fixture(scope="session")
def own_ray():
    if importlib.util.find_spec("ray") is None:
        missing("Ray is not installed: pip install 'thinwire[worker]'")
    folder = Path(tempfile.mkdtemp(prefix="tw-el-", dir="/tmp"))  # Ray's socket paths must be short
    ray = None
    try:
        ray = OwnRay(folder, num_cpus=4)
        yield ray
    finally:
        if ray is not None:
            ray.close()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def job(own_ray, tmp_path, request):
    made = []

    def make(**options):
        made.append(ElasticJob(own_ray, request.node.name.replace("[", "-").rstrip("]")[:60], tmp_path, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()
