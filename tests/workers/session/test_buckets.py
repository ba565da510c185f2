"""The buckets of a script's exchanges are made for all of its steps, as `thinwire plan` takes them."""

import pytest
import torch

from tests.workers.loop.threads_job import ThreadsJob
from tests.workers.plan.test_scripts import spec_of
from thinwire.comm.wire.network import NO_FULL_STEPS
from thinwire.optim import SGD, Adam, OneBitAdam, OneBitLamb, ZeroOneAdam
from thinwire.train import session
from thinwire.workers.plan.dry_script import DrySteps, learned
from thinwire.workers.plan.schedule import full_steps
from thinwire.workers.session import joining

DATA = torch.utils.data.TensorDataset(torch.randn(8, 4), torch.randn(8, 1))
STEPS = 6
OPTIMIZERS = {
    "defaults": (OneBitAdam, {}),
    "lamb": (OneBitLamb, {"total_steps": 30}),
    "zero_one": (ZeroOneAdam, {}),
    "given": (OneBitAdam, {"warmup": 3}),
    "given in 8 bits": (OneBitAdam, {"warmup": 3, "full_exchange": "int8"}),
    "dense": (SGD, {"lr": 0.1}),
    "dense in bf16": (Adam, {"full_exchange": "bf16"}),
}


class Own(OneBitAdam):
    """A user's own."""


def full_steps_of_script(tmp_path, monkeypatch, kind, settings, steps):
    """What a job's script gives where buckets are chosen, and the steps by its plan."""
    asked, planned = [], []

    def kept_bucket(run_dir, group, numel, device, full=NO_FULL_STEPS):
        asked.append(full)
        return 64

    def script(job, worker):
        with session() as run:
            model = torch.nn.Linear(4, 1)
            optimizer = kind(model.parameters(), group=run.group, **settings)
            run.register(model=model, optimizer=optimizer)
            for x, y in run.batches(DATA, global_batch=4, steps=steps):
                run.step((model(x) - y).square().mean())
            planned.append(DrySteps(optimizer, 0.1, 0.1, 1, steps, 4))

    monkeypatch.setattr(joining, "kept_bucket", kept_bucket)
    job = ThreadsJob(tmp_path, script, 2)
    job.run(monkeypatch)
    assert not job.errors
    return asked, planned


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_they_are_made_for_the_steps_that_its_plan_has(tmp_path, monkeypatch, name):
    asked, planned = full_steps_of_script(tmp_path, monkeypatch, *OPTIMIZERS[name], STEPS)
    planned_job = learned(planned[0]).as_job(spec_of(tmp_path))
    assert asked
    assert all(one == full_steps(planned_job.run) for one in asked)
    assert (asked[0] == NO_FULL_STEPS) == (name in ("given", "dense"))


def test_a_class_made_of_an_optimizer_has_buckets_for_its_compressed_steps(tmp_path, monkeypatch):
    asked, _ = full_steps_of_script(tmp_path, monkeypatch, Own, {}, STEPS)
    assert asked
    assert all(one == NO_FULL_STEPS for one in asked)
