"""A script in a job, its workers killed and replaced: nothing of it can be seen in what it ends with."""

import importlib.util
import json

import pytest
import torch

from tests.conftest import missing
from tests.workers.session.script_job import ScriptJob
from thinwire.contract.run_folder import RunFolder
from thinwire.workers.membership.seats import Limits
from thinwire.workers.telemetry import history

STEPS = 16
PATIENCE_S = 300.0
"""To import a trainer takes long on a busy machine, and each worker does."""
NEEDS = {"exact_trainer.py": "transformers", "exact_lightning.py": "lightning"}
SCRIPTS = [
    pytest.param("exact.py", False),
    *(pytest.param(script, last, marks=pytest.mark.slow) for script in NEEDS for last in (False, True)),
]

pytestmark = pytest.mark.timeout(1200)


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def undisturbed(folder, *script):
    with ScriptJob(folder, Limits(1, 1), *script, steps=STEPS) as job:
        job.start(0)
        job.wait(PATIENCE_S)
        (state,) = job.finals()
        return state


@pytest.mark.parametrize(("script", "last"), SCRIPTS)
def test_a_script_whose_worker_is_killed_ends_bit_equal_to_one_that_was_not_disturbed(tmp_path, script, last):
    """last: another one is killed in the last step, which a loop that counts its steps must not take for made."""
    if script in NEEDS and importlib.util.find_spec(NEEDS[script]) is None:
        missing(f"{NEEDS[script]} is not installed")
    script = script, STEPS, 1  # one process to load samples
    expected = undisturbed(tmp_path / "alone", *script)
    with ScriptJob(tmp_path / "job", Limits(1, 2), *script, steps=STEPS) as job:
        job.allow(5)
        job.start(0, 1)
        job.until(lambda: job.server.snapshot().last_step == 5, PATIENCE_S)
        job.kill(1)
        job.allow(10)
        job.until(lambda: job.server.snapshot().last_step == 10, PATIENCE_S)
        job.start(1)
        job.until(lambda: job.joined(1) == 2, PATIENCE_S)
        # Before that the rest of the steps may be over, and nobody to regroup.
        job.until(lambda: any(one.kind == "confirmed" for one in list(job.said)), PATIENCE_S)
        if last:
            job.allow(STEPS - 1)
            job.until(lambda: job.server.snapshot().last_step == STEPS - 1, PATIENCE_S)
            job.kill(1)
        job.allow(STEPS)
        job.wait(PATIENCE_S)
        assert job.regroups() == ([1, 2, 1] if last else [1, 2])
        finals = job.finals()
        assert len(finals) == (1 if last else 2)
        assert all(same(state, expected) for state in finals)
        samples = history.read(RunFolder(job.run_dir).history)
        assert [sample.step for sample in samples] == list(range(STEPS + 1))
        assert all(sample.loss is not None for sample in samples[1:])
        if script[0] == "exact.py":
            assert [sample.reported["steps"] for sample in samples[1:]] == list(range(1, STEPS + 1))
        assert json.loads((job.run_dir / "summary.json").read_text())["steps"] == STEPS


def test_a_process_that_a_script_forks_ends_without_a_word_about_the_run(tmp_path):
    """Whether by sys.exit(), by an error, or out of the loop: before, it told the others that its worker had failed."""
    with ScriptJob(tmp_path, Limits(1, 2), "forks.py", steps=8) as job:
        job.start(0, 1)
        job.wait(PATIENCE_S)
        assert job.regroups() == []
        assert job.finals() == [8, 8]
