"""Boxes of processes on a real Ray: one that loses a process goes, the other goes on, and Ray starts another."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.workers.elastic.conftest import ROOT, until
from thinwire.contract.run_folder import RunFolder

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(400)]

STEPS = 400


def companions():
    """The pids of processes that some box's first has started, and that of the first, by that."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            if b"thinwire.workers.companions" in (entry / "cmdline").read_bytes():
                found[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
    return found


def test_a_box_that_loses_a_process_is_replaced_and_no_step_is_lost(own_ray, tmp_path):
    recipe = {
        "name": "script",
        "entry": "sharded.py",
        "working_dir": str(ROOT / "tests/workers/session/scripts"),
        "args": [str(tmp_path), str(STEPS), "0"],
    }
    spec = {"recipe": recipe, "workers": {"min": 1, "max": 2, "per_box": 2, "device": "cpu"}}
    RunFolder(tmp_path).job.write_text(json.dumps({"job_id": "boxes", "created_at": time.time(), "spec": spec}))
    gate = tmp_path / "gate"
    gate.write_text("20")
    before = companions()
    log = tmp_path / "driver.log"
    driver = subprocess.Popen(
        [sys.executable, "-m", "thinwire.workers.main", "--run-dir", str(tmp_path)],
        cwd=ROOT,
        env=own_ray.environment | {"RAY_ADDRESS": own_ray.address},
        stdout=log.open("w"),
        stderr=subprocess.STDOUT,
    )

    def told(kind):
        file = RunFolder(tmp_path).events
        lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return [one for one in lines if one["kind"] == kind]

    def sizes():
        return [one["fields"]["world_size"] for one in told("regrouped")]

    def open_slowly(size):
        gate.write_text(str(int(gate.read_text()) + 1))
        return size in sizes()

    def tail():
        return f"{sizes()}\n{log.read_text()[-6000:]}"

    try:
        until(lambda: len(companions().keys() - before.keys()) == 2, tail)
        until(lambda: (tmp_path / "at-20").exists(), tail)
        new = {pid: first for pid, first in companions().items() if pid not in before}
        victim, first = next(iter(new.items()))
        os.kill(victim, signal.SIGKILL)
        until(lambda: open_slowly(1), tail, every_s=0.2)
        until(lambda: not Path(f"/proc/{first}").exists(), tail)
        until(lambda: open_slowly(2), tail, every_s=0.5)
        gate.write_text(str(STEPS))
        assert driver.wait(180) == 0, tail()
    finally:
        if driver.poll() is None:
            driver.send_signal(signal.SIGTERM)
            driver.wait(60)
    assert sizes() == [1, 2]
    assert all(one["fields"]["redone"] == 0 for one in told("regrouped"))
    assert json.loads(RunFolder(tmp_path).summary.read_text())["replicas_bit_equal"]
    finals = [torch.load(file, weights_only=False) for file in tmp_path.glob("final-*")]
    for rank in (0, 1):
        one, other = [final for final in finals if final["rank"] == rank]
        assert all(torch.equal(a, b) for a, b in zip(one["shards"], other["shards"], strict=True))
