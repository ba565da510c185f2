"""Every example is a job as it stands: one of its workers is killed, the job is resized, and it learns to its end."""

import importlib.util
import json
from pathlib import Path

import pytest

from tests.conftest import missing
from tests.workers.session.script_job import ScriptJob
from thinwire.contract.run_folder import RunFolder
from thinwire.workers.membership.seats import Limits
from thinwire.workers.telemetry import history

EXAMPLES = Path(__file__).parent.parent / "examples"
KILLED_AT, RESIZED_AT = 5, 10
PATIENCE_S = 300.0
"""To import a trainer takes long on a busy machine, and each worker does."""

pytestmark = [pytest.mark.timeout(1200), pytest.mark.slow]


@pytest.mark.parametrize(
    ("script", "needs", "steps", "arguments", "learned"),
    [
        ("nanogpt.py", "tokenizers", 60, ("--steps", 60), 0.9),
        ("images.py", "torch", 60, ("--steps", 60), 0.7),
        ("accelerate_loop.py", "accelerate", 120, (), 0.2),
        ("transformers_trainer.py", "transformers", 80, (), 0.7),
        ("transformers_trainer.py", "transformers", 80, ("--muon",), 0.7),
        ("sft.py", "trl", 60, (), 0.5),
        ("sft.py", "trl", 60, ("--lora",), 0.9),
        ("dpo.py", "trl", 45, (), 0.5),
        ("lightning_session.py", "lightning", 147, (), 0.5),
        ("papers/bert_pretrain.py", "datasets", 60, ("--steps", 60), 0.95),
        ("papers/bert_pretrain.py", "datasets", 40, ("--phase", 2, "--steps", 40), 1.0),
        ("papers/squad.py", "datasets", 40, ("--steps", 40), 0.9),
        ("papers/glue.py", "sklearn", 40, ("--steps", 40), 1.02),
        ("papers/gpt2.py", "datasets", 60, ("--steps", 60), 0.9),
        ("papers/resnet.py", "sklearn", 40, ("--steps", 40), 0.7),
        # A discriminator's loss tells little: it has learned something against a generator that has as well.
        ("papers/dcgan.py", "torch", 60, ("--steps", 60), 1.0),
    ],
)
def test_it_goes_on_through_a_kill_and_a_resize(tmp_path, monkeypatch, script, needs, steps, arguments, learned):
    """learned: the last losses over the first, at most."""
    if importlib.util.find_spec(needs) is None:
        missing(f"{needs} is not installed")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with ScriptJob(tmp_path, Limits(1, 2), script, *arguments, steps=steps, folder=EXAMPLES, told=False) as job:
        job.allow(KILLED_AT)
        job.start(0, 1)
        job.until(lambda: job.server.snapshot().last_step == KILLED_AT, PATIENCE_S)
        job.kill(1)
        job.allow(RESIZED_AT)
        job.until(lambda: job.server.snapshot().last_step == RESIZED_AT, PATIENCE_S)
        job.server.set_limits(Limits(1, 3))
        job.start(1, 2)
        job.until(lambda: job.joined(1) == 2 and job.joined(2) == 1, PATIENCE_S)
        job.allow(steps)
        job.wait(PATIENCE_S)
        sizes = job.regroups()
        assert (sizes[0], sizes[-1]) == (1, 3)
        assert all(one["redone"] == 0 for one in job.events("regrouped"))
        samples = history.read(RunFolder(job.run_dir).history)
        assert [sample.step for sample in samples] == list(range(steps + 1))
        losses = [sample.loss for sample in samples[1:]]
        assert sum(losses[-5:]) < learned * sum(losses[:5])
        summary = json.loads((job.run_dir / "summary.json").read_text())
        assert (summary["steps"], summary["world_size"], summary["replicas_bit_equal"]) == (steps, 3, True)
