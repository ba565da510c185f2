"""The examples run as they stand."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(*command: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    try:
        told, errors = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # torchrun's workers too: they would live on
        process.communicate()
        raise
    assert process.returncode == 0, errors
    return told


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
