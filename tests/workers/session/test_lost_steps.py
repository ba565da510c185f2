"""A step that is lost is made again, and nothing that a script has registered knows of it."""

import random
from collections import Counter

import pytest
import torch

from tests.covering import parametrize
from tests.workers.loop.threads_job import Plan, ThreadsJob, retained
from thinwire.comm.groups.faults import Fault
from thinwire.optim import Adam
from thinwire.train import session

STEPS, BATCH, SAMPLES, WIDTH = 40, 12, 44, 6
STYLES = ["plain", "closure", "counts", "scaled"]
"""How the loop is written: with step(closure); left by whoever counts its steps, and draws no further batch; with a
GradScaler that calls step()."""


class Exact(torch.nn.Module):
    """Its gradient is the mean of the samples, whatever its values: of these samples exact for one to four workers."""

    def __init__(self):
        super().__init__()
        self.values = torch.nn.Parameter(torch.zeros(WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls += 1
        return (self.values * x).sum(dim=1).mean()


class Average:
    """Of the weights, as people write it: moved after the step, without autograd knowing."""

    def __init__(self, model):
        self.values = model.values.detach().clone()

    def update(self, model):
        self.values.data.mul_(0.9).add_(model.values.data, alpha=0.1)

    def state_dict(self):
        return {"values": self.values}

    def load_state_dict(self, state):
        self.values.copy_(state["values"])


DATA = [
    (i, torch.randint(-9, 9, (WIDTH,), generator=torch.Generator().manual_seed(i)) * 3.0**4 * 2**6)
    for i in range(SAMPLES)
]


def script(job, worker):
    with session() as run:
        model = Exact()
        own = torch.Generator().manual_seed(worker.identity.slot)  # another one on each rank
        torch.nn.init.normal_(model.values, generator=own)
        optimizer = job.optimizer(model.parameters(), run.group)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, STEPS)
        average, counters, noise = Average(model), {"steps": 0, "by": {3: 0}}, torch.Generator().manual_seed(5)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=7, enabled=job.style == "scaled")
        run.register(model=model, optimizer=optimizer, scheduler=scheduler, ema=average, counters=counters, noise=noise)
        run.register(scaler=scaler)
        for numbers, x in run.batches(DATA, global_batch=BATCH, steps=STEPS, seed=3, shuffle=True):
            job.attempts.append((run.step_number + 1, run.group.generation, numbers.tolist()))

            def computed(x=x):
                optimizer.zero_grad()
                loss = model(x) + 0 * torch.randn((), generator=noise)
                scaler.scale(loss).backward()
                return loss

            if job.style == "closure":
                loss = optimizer.step(computed)
            else:
                loss = computed()
                scaler.step(optimizer)
                scaler.update()
            scheduler.step()
            average.update(model)
            counters["steps"] += 1
            counters["by"][3] += 2
            run.report(loss=loss, drawn=float(counters["steps"]))
            if job.style == "counts" and run.step_number + 1 == STEPS and not run.step_is_lost:
                break
    return {
        "values": model.values.detach(),
        "calls": model.calls,
        "average": average.values,
        "m": optimizer.state[model.values]["exp_avg"],
        "rate": torch.tensor(scheduler.get_last_lr()[0]),
        "counted": torch.tensor([counters["steps"], counters["by"][3]]),
        "noise": noise.get_state(),
        **({"scale": torch.tensor([scaler.get_scale(), scaler._get_growth_tracker()])} if scaler.is_enabled() else {}),
    }


def made(tmp_path, monkeypatch, name, size, plan, optimizer, style="plain"):
    job = ThreadsJob(tmp_path / name, script, size, plan)
    job.optimizer, job.style = optimizer, style
    job.run(monkeypatch)
    monkeypatch.undo()
    return job


def dense(params, group):
    return Adam(params, lr=0.1, group=group)


def assert_same(found, expected):
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@parametrize(
    ("seed", "style"),
    [
        *((3, style) for style in STYLES),
        *(pytest.param(s, STYLES[s % 4], marks=pytest.mark.slow) for s in range(4, 13)),
    ],
    usual=[0],
)
def test_all_that_is_registered_ends_bit_equal_to_an_undisturbed_run(tmp_path, monkeypatch, seed, style):
    faults = Plan()
    draw = random.Random(seed)
    for step in range(3, STEPS - 3, 6):
        faults.kills[step] = draw.randrange(4), draw.choice([None, Fault((0,), "sum", draw.randrange(2))])
        faults.joins[step + 3] = 1
    if style == "counts":
        faults.kills[STEPS - 1] = 0, Fault((0,), "sum", 0)  # in the last step
    alone = made(tmp_path, monkeypatch, "alone", 1, Plan(), dense, style)
    disturbed = made(tmp_path, monkeypatch, "disturbed", 4, faults, dense, style)
    assert len(disturbed.killed) >= 4
    (expected,) = alone.ended.values()
    for found in disturbed.ended.values():
        assert_same(found, expected)
    used = retained(disturbed)
    assert used == retained(alone)
    epochs = STEPS * BATCH // SAMPLES
    assert Counter(number for counted in used.values() for number in counted.elements()).most_common()[-1][1] >= epochs
