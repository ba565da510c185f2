"""Where does the host wait for a GPU in a step? Once, in finish(); elsewhere in seldom steps, which stand here."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.emulation.emulator import require_compiler
from tests.emulation.pretend import FINISH
from tests.emulation.whole_steps import PLANTED, cases
from tests.once import once

ROOT = Path(__file__).parents[2]
FLOOR = {f"optim.variance.floor.{name}" for name in ("_sums_of", "_raise", "floor_variance_")}
SELDOM = {
    "first step": {"optim.engine.first_step.FirstStep.look_at_mean"},
    "ranks compare what they hold": {"optim.engine.parameters.digest"},
    "freeze": FLOOR
    | {
        "optim.variance.freezing.FreezingOptimizer.update",
        "optim.variance.rare.zeros_of",
        "optim.variance.warmup.WarmupOptimizer.count_errors_as_sent_",
        "optim.onebit_lamb.OneBitLamb.on_freeze",
        "optim.variance.sparse.SparseVarianceOptimizer._use_",
    },
    "refresh": FLOOR | {"optim.variance.warmup.WarmupOptimizer.keep_refreshed", "optim.variance.rare.zeros_of"},
    "0/1 Adam moves its variance": FLOOR
    | {
        "optim.variance.sparse.SparseVarianceOptimizer._use_",
        "optim.variance.sparse.SparseVarianceOptimizer._counts",
        "optim.variance.warmup.WarmupOptimizer.count_errors_as_sent_",
    },
    "the automatic rule tests": {
        "optim.variance.when_to_freeze.VarianceStability.read_norms",
        "optim.variance.rare.zeros_of",
    },
    "buffers of model=": {
        "optim.engine.buffers.Buffers.equalise_",
        "optim.engine.buffers.Buffers._written",
        "optim.engine.buffers._differing",
        "optim.engine.buffers._passed",
    },
}
"""As docs/gpu.md has it, "Where the host waits": in which steps, and what of the product waits in them."""


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """Of seldom cases, or of the others: what a process of its own has found."""
    return cache(lambda seldom: once(tmp_path_factory, f"waits-{seldom}", lambda folder: found(seldom)))


def found(seldom: bool):
    """A device that is made up stays in its process."""
    require_compiler()
    names = [name for name, case in cases().items() if case.seldom == seldom]
    argv = [sys.executable, "-m", "tests.emulation.whole_steps", *names]
    done = subprocess.run(
        argv, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def happens(name, step):
    """Which of SELDOM a step is."""
    compressed, zero_one = step["phase"] == "compressed", name.startswith("0/1")
    found = {
        "first step": step["step"] == 1,
        "ranks compare what they hold": step["compares"],
        "freeze": step["freezes"],
        "refresh": compressed and step["moves_variance"],
        "0/1 Adam moves its variance": zero_one and step["moves_variance"] and not compressed,
        "the automatic rule tests": "auto" in name and not compressed,
        "buffers of model=": "buffers" in name,
    }
    return {what for what, does in found.items() if does}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if case.seldom else name for name, case in cases().items()]
)
def test_a_step_waits_for_the_device_in_finish_alone(told, name):
    steps = told(cases()[name].seldom)[name]
    assert len(steps) == cases()[name].steps
    assert sum(step["compares"] for step in steps) <= 4
    for step in steps:
        waits = step["waits"]
        at_finish = sum(times for wait, times in waits.items() if wait.startswith(f"{FINISH}:"))
        assert at_finish == step["full"] + step["bits"], step
        allowed = {FINISH}.union(*(SELDOM[what] for what in happens(name, step)))
        assert {wait for wait in waits if wait.split(": ")[0] not in allowed} == set(), step


def test_what_may_wait_does_wait_somewhere_else_it_need_not_be_allowed(told):
    run = told(False)
    found = {wait.split(": ")[0] for name in run if name != "planted" for step in run[name] for wait in step["waits"]}
    assert set().union(*SELDOM.values()) <= found


def test_what_makes_the_host_wait_is_seen(told):
    assert told(False)["planted"] == PLANTED
