"""The examples run as they stand."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(*command: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_two_line_change_compresses_under_torchrun():
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    told = run(*torchrun, str(EXAMPLES / "two_line_change.py"))
    warmup, compressed = re.search(r"bytes a step: ([\d,]+) in warm-up, ([\d,]+) compressed", told).groups()
    assert int(warmup.replace(",", "")) / int(compressed.replace(",", "")) == pytest.approx(32, rel=0.03)
    losses = [float(loss) for loss in re.findall(r"loss (\d\.\d+)", told)]
    assert losses[-1] < losses[0] / 10


def test_the_two_line_change_runs_on_one_worker_and_sends_nothing():
    told = run(sys.executable, str(EXAMPLES / "two_line_change.py"))
    assert "sent 0 bytes" in told.splitlines()[-1]
