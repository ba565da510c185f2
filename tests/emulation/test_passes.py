"""How many bytes a step reads and writes for each value, and how often it launches: at most what was counted."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.emulation.emulator import require_compiler
from tests.emulation.passes import STEPS

ROOT = Path(__file__).parents[2]
MOST = {  # launches of ours, bytes a value with torch's operations
    "1-bit adam, warm-up in 8 bits": (11, 48.5),
    "0/1 adam, a sync each step": (7, 33.7),
    "0/1 adam, a local step": (1, 36.1),
    "1-bit lamb": (9, 42.2),
    "lamb": (3, 56.2),
    "1-bit lamb, warm-up": (3, 56.2),
    "1-bit adam": (7, 25.9),
    "1-bit adam, bfloat16": (7, 19.3),
    "0/1 adam, a sync that ends a round": (7, 37.8),
}
ALWAYS = ("1-bit adam, warm-up in 8 bits", "0/1 adam, a sync each step")


@pytest.mark.slow
@pytest.mark.parametrize("names", [ALWAYS, pytest.param(tuple(set(MOST) - set(ALWAYS)), marks=pytest.mark.slow)])
def test_a_step_moves_no_more_bytes_than_were_counted(names):
    require_compiler()
    argv = [sys.executable, "-m", "tests.emulation.passes", "--json", *names]
    done = subprocess.run(
        argv, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert set(found) == set(names) <= set(STEPS)
    for name in names:
        launches, moved = MOST[name]
        assert found[name]["launches"] <= launches, name
        assert 0.9 * moved < found[name]["kernels"] + found[name]["torch"] <= moved, name
