"""The laws of simulator/laws.py hold under any schedule of faults; and the simulator finds what each old rule loses."""

import contextlib
import io
import os
import subprocess
import sys

import pytest

from tests.workers.membership.simulator.job import Job, Settings
from tests.workers.membership.simulator.old_rules import OLD_RULES
from tests.workers.membership.simulator.timeline import written

SLOW_RANGES = [range(low, low + 1000) for low in range(200, 10200, 1000)]


def hold(seeds: range) -> None:
    for seed in seeds:
        job = Job(seed, Settings())
        broken = job.run()
        assert broken is None, written(seed, job.timeline, broken)


@pytest.mark.parametrize("seeds", [range(100), pytest.param(range(100, 200), marks=pytest.mark.slow)], ids=str)
def test_the_laws_hold_under_any_faults(seeds):
    hold(seeds)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", SLOW_RANGES, ids=str)
def test_the_laws_hold_under_many_more_faults(seeds):
    hold(seeds)


OLD = {
    "deaf": (range(400), 5),
    "silence-counts": (range(400), 5),
    "no-lease": (range(70, 400), 1),
    "tokens-by-clock": (range(21640, 21700), 6),
}
"""Within which seeds an old rule breaks which law, among others."""


@pytest.mark.few(2)
@pytest.mark.parametrize("old", OLD)
def test_an_old_rule_put_back_breaks_its_law(old):
    seeds, law = OLD[old]
    for seed in seeds:
        broken = Job(seed, OLD_RULES[old]).run()
        if broken is not None and broken.startswith(f"law {law}:"):
            assert Job(seed, Settings()).run() is None
            return
    pytest.fail(f"no seed of {seeds} breaks law {law} with the old rule {old}")


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_a_seed_replays_exactly_whatever_the_order_of_sets_is(seeds):
    code = (
        "import hashlib; from tests.workers.membership.simulator.job import Job, Settings\n"
        f"for seed in range({seeds}):\n"
        "    job = Job(seed, Settings()); job.run()\n"
        "    print(len(job.timeline), hashlib.sha256(repr(job.timeline).encode()).hexdigest())\n"
    )
    here = io.StringIO()
    with contextlib.redirect_stdout(here):
        exec(code, {})  # with the hash seed of this process, which is another one
    there = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert here.getvalue() == there
    assert len(set(there.splitlines())) == seeds
