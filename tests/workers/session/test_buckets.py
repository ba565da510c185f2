"""The size of buckets is chosen once, for all ranks and all steps of a run; a restart has the same."""

import json

import pytest
import torch

from tests.workers.loop.threads_job import ThreadsJob
from tests.workers.plan.test_scripts import spec_of
from thinwire.comm import SoloGroup, run_threads
from thinwire.comm.layout import DEFAULT_BUCKET
from thinwire.comm.wire.network import NO_FULL_STEPS
from thinwire.contract.run_folder import RunFolder
from thinwire.optim import SGD, Adam, OneBitAdam, OneBitLamb, ZeroOneAdam
from thinwire.train import session
from thinwire.workers.plan.schedule import full_steps
from thinwire.workers.plan.scripts import Learned
from thinwire.workers.session import joining
from thinwire.workers.session.joining import kept_bucket

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
    """What a job's script gives where buckets are chosen, and its optimizers."""
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
            planned.append(optimizer)

    monkeypatch.setattr(joining, "kept_bucket", kept_bucket)
    job = ThreadsJob(tmp_path, script, 2)
    job.run(monkeypatch)
    assert not job.errors
    return asked, planned


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_they_are_made_for_the_steps_that_its_plan_has(tmp_path, monkeypatch, name):
    asked, planned = full_steps_of_script(tmp_path, monkeypatch, *OPTIMIZERS[name], STEPS)
    planned_job = Learned.of(planned[0], STEPS, 4, 0.1, 0.1, 1).as_job(spec_of(tmp_path))
    assert asked
    assert all(one == full_steps(planned_job.run) for one in asked)
    assert (asked[0] == NO_FULL_STEPS) == (name in ("given", "dense"))


def test_a_class_made_of_an_optimizer_has_buckets_for_its_compressed_steps(tmp_path, monkeypatch):
    asked, _ = full_steps_of_script(tmp_path, monkeypatch, Own, {}, STEPS)
    assert asked
    assert all(one == NO_FULL_STEPS for one in asked)


CPU = torch.device("cpu")
NUMEL = 1 << 22


def chosen(tmp_path, ranks=2, numel=NUMEL):
    sizes = run_threads(ranks, lambda group: kept_bucket(tmp_path, group, numel, CPU))
    assert len(set(sizes)) == 1
    return sizes[0]


def test_what_was_chosen_is_kept_with_the_network_it_was_chosen_for(tmp_path):
    size = chosen(tmp_path)
    found = json.loads(RunFolder(tmp_path).buckets.read_text())
    assert (found["bucket_elements"], found["elements"], found["ranks"]) == (size, NUMEL, 2)
    assert found["latency_s"] >= 0
    assert found["bytes_per_s"] > 0


def test_a_restart_takes_the_kept_size_and_another_number_of_ranks_does_not(tmp_path):
    file = RunFolder(tmp_path).buckets
    file.write_text(json.dumps({"bucket_elements": 131_072, "elements": NUMEL, "ranks": 2}))
    assert chosen(tmp_path) == 131_072
    assert chosen(tmp_path, ranks=3) != 131_072 or json.loads(file.read_text())["ranks"] == 3
    assert json.loads(file.read_text())["ranks"] == 3


@pytest.mark.parametrize("text", ["", "{}", '{"ranks": 2, "elements": 4194304, "bucket_elements": "many"}'])
def test_a_damaged_file_is_told_and_replaced(tmp_path, text, caplog):
    RunFolder(tmp_path).buckets.write_text(text)
    size = chosen(tmp_path)
    assert "buckets_unreadable" in caplog.text
    assert json.loads(RunFolder(tmp_path).buckets.read_text())["bucket_elements"] == size


def test_one_rank_measures_nothing_and_writes_nothing(tmp_path):
    assert kept_bucket(tmp_path, SoloGroup(), NUMEL, CPU) == DEFAULT_BUCKET
    assert kept_bucket(None, SoloGroup(), NUMEL, CPU) == DEFAULT_BUCKET
    assert not list(tmp_path.iterdir())
