"""After any sequence of deaths, departures and arrivals every sample of an epoch has been used exactly once.

That such a run ends bit-equal to an undisturbed one, with a dense optimizer, is in ../session/test_lost_steps.py.
"""

import random
from collections import Counter

import pytest
import torch

from tests.covering import parametrize
from tests.workers.by_hand import feed_for
from tests.workers.loop.threads_job import Plan, ThreadsJob, retained
from tests.workers.small_job import small_spec
from thinwire.comm.groups.faults import Fault, When
from thinwire.contract.run_folder import RunFolder
from thinwire.workers.membership.state import Fenced
from thinwire.workers.recipes import recipe_of
from thinwire.workers.session import job as loop
from thinwire.workers.telemetry import history

STEPS = 64
BATCH = 7
ADAM = {"lr": 4e-3, "betas": [0.9, 0.99]}
OPTIMIZERS = {
    "sgd": {"name": "sgd", "lr": 0.05},
    "onebit_adam": {"name": "onebit_adam", "warmup": 6, **ADAM},
    "zero_one_adam": {
        "name": "zero_one_adam",
        "var_freeze": 6,
        "var_update_scaler": 2,
        "local_step_scaler": 8,
        "local_step_clipper": 4,
        **ADAM,
    },
    "onebit_sgd": {"name": "onebit_sgd", "lr": 0.05},
    "onebit_muon": {"name": "onebit_muon", "lr": 0.02},
    "local_steps": {"name": "local_steps", "every": 4, "inner": {"name": "sgd", "lr": 0.05}},
    "late_local_steps": {"name": "local_steps", "every": 4, "inner": {"name": "sgd", "lr": 0.05}, "overlap": True},
    "cada": {"name": "cada", "lr": 4e-3, "max_age": 6, "threshold": 0.02},
}
COLLECTIVES = {
    "sgd": ["sum"],
    "onebit_adam": ["all_to_all", "all_gather"],
    "onebit_sgd": ["all_to_all", "all_gather"],
    "onebit_muon": ["all_to_all", "all_gather"],
    "zero_one_adam": ["all_to_all"],
    "local_steps": ["all_to_all"],
    "late_local_steps": ["all_to_all", "all_gather"],
    "cada": ["all_gather", "all_to_all_v", "sum"],
}


def plan(seed, collectives):
    """Something happens every few steps: mostly deaths, each made good by a newcomer soon after."""
    draw, made, step, most = random.Random(seed), Plan(), 2, 4  # most: workers that there can be
    while (step := step + draw.randint(2, 5)) < STEPS - 6:
        what = draw.choice(["kill", "kill", "kill at a boundary", "second", "leave"])
        rank = draw.randrange(4)
        if what == "leave":
            made.leaves[step] = rank
            most -= 1
        else:
            where = Fault((rank,), draw.choice(collectives), draw.randrange(3), draw.choice(list(When)))
            made.kills[step] = rank, None if what == "kill at a boundary" else where
            if what == "second":
                made.second.add(step)
        step += draw.randint(2, 4)
        made.joins[step] = min(draw.choice([1, 1, 2]), BATCH - most)
        most += made.joins[step]
    return made


def spec(tmp_path, name):
    """Of data so small that an epoch is a few steps, which divide by nothing."""
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(random.Random(0).randbytes(2000)))
    return small_spec(
        steps=STEPS,
        global_batch=BATCH,
        optimizer=OPTIMIZERS[name],
        data={"source": "text-file", "path": str(text)},
        recipe={"layers": 1, "width": 16, "heads": 2, "context": 32},
        workers={"min": 1, "max": 7},
    )


@pytest.mark.few(1)
@parametrize("name", OPTIMIZERS, usual=[1, 3, -1])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))])
def test_every_sample_of_an_epoch_is_used_once(tmp_path, monkeypatch, name, seed):
    made = plan(seed, COLLECTIVES[name])
    run_dir = tmp_path / "run"
    job = ThreadsJob(run_dir, None, 4, made, spec=spec(tmp_path, name)).run(monkeypatch)

    assert len(job.killed) >= 4
    used = retained(job)
    assert sorted(used) == list(range(1, STEPS + 1))
    lost = sum(fields["local_steps_lost"] for kind, _, fields in job.events if kind == "regrouped")
    missing = Counter()
    for step, numbers in used.items():
        whole = Counter(range((step - 1) * BATCH, step * BATCH))
        assert numbers <= whole, f"step {step} used a sample twice, or one of another step"
        missing += whole - numbers
    assert sum(missing.values()) <= lost * BATCH
    if name not in ("zero_one_adam", "local_steps", "late_local_steps"):
        assert not missing
        assert lost == 0
        order = feed_for(recipe_of(job.spec)).order
        numbers = [number for counted in used.values() for number in counted.elements()]
        epochs = len(numbers) // order.num_samples
        assert epochs > 5
        for epoch in range(epochs):
            of_it = [number for number in numbers if number // order.num_samples == epoch]
            seen = [int(order.samples(range(number, number + 1))) for number in of_it]
            assert sorted(seen) == list(range(order.num_samples))

    samples = history.read(RunFolder(run_dir).history)
    assert [sample.step for sample in samples] == list(range(STEPS + 1))
    ended = list(job.ended.values())
    assert len(ended) >= 1
    assert all(torch.equal(one, ended[0]) for one in ended)


@parametrize("victim", [0, 1], usual=[0])
def test_the_state_before_training_is_told_though_a_peer_is_lost_in_its_evaluation(tmp_path, monkeypatch, victim):
    job = ThreadsJob(tmp_path, None, 3, Plan(), spec=small_spec(steps=8))
    plain = loop.part_of_validation

    def evaluate(*given):
        worker = job.here
        if job.generation == 1 and worker.group.rank == victim:
            worker.doomed = True
            worker.group.leave("killed in the evaluation")
            worker.die()
            raise Fenced("dead")
        return plain(*given)

    monkeypatch.setattr(loop, "part_of_validation", evaluate)
    job.run(monkeypatch)
    samples = history.read(RunFolder(tmp_path).history)
    assert [sample.step for sample in samples] == list(range(9))
    assert samples[0].validation_loss is not None
    assert samples[0].world_size == 2
