"""What of a job is saved goes back bit for bit, at any number of ranks, in any precision."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.covering import every_value
from tests.optim.seeded import seeded
from tests.workers.checkpoints.states import CPU, bits
from thinwire.comm import SoloGroup, run_threads
from thinwire.optim import (
    Adam,
    OneBitAdam,
    OneBitMuon,
    ZeroOneAdam,
    ZeroOneSchedule,
)
from thinwire.workers.checkpoints import CheckpointId, CheckpointStore, Writer
from thinwire.workers.data.feed import MapFeed
from thinwire.workers.saving import collect, restore, restored
from thinwire.workers.session.registered import Registered
from thinwire.workers.session.training import Training
from thinwire.workers.telemetry.meter import Meter

GENERATION = 7
SIZES = (1, 2, 3, 4, 8)
AT = 9


class Small(torch.nn.Module):
    """Tied weights, a frozen parameter, statistics, and biases; no size divides by eight ranks."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = torch.nn.Linear(7, 13), torch.nn.BatchNorm1d(13), torch.nn.Linear(13, 7)
        self.tied = self.first
        self.frozen = torch.nn.Parameter(torch.randn(7), requires_grad=False)

    def forward(self, x):
        return self.last(self.norm(torch.tanh(self.tied(x)))) * self.frozen


OPTIMIZERS = {
    "onebit_adam": lambda params, group: OneBitAdam(params, lr=1e-2, betas=(0.9, 0.99), warmup=4, group=group),
    "onebit_muon": lambda params, group: OneBitMuon(params, lr=1e-2, group=group),
    "zero_one_adam": lambda params, group: ZeroOneAdam(
        params,
        lr=1e-2,
        var_freeze_step=4,
        schedule=ZeroOneSchedule(local_step_scaler=4, local_step_clipper=4),
        group=group,
    ),
}


def make(name, group, dtype):
    model = seeded(0, Small).to(dtype)
    return model, OPTIMIZERS[name]([p for p in model.parameters() if p.requires_grad], group), Meter(group.stats)


def of(model, optimizer):
    """The model, registered."""
    registered = Registered(optimizer)
    registered.add("model", model)
    return registered


def train(model, optimizer, rank, steps):
    for step in steps:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        x = torch.randn(6, 7, generator=generator).to(next(model.parameters()).dtype)
        optimizer.zero_grad()
        (model(x) - torch.sin(x)).square().mean().backward()
        optimizer.step()


def saving_run(store, name, size, dtype):
    """By rank: what it held at the checkpoint."""

    def work(group):
        model, optimizer, meter = make(name, group, dtype)
        train(model, optimizer, group.rank, range(1, AT + 1))
        writer = Writer(store)
        writer.save(CheckpointId(GENERATION, AT), group.rank, group.size, collect(meter, of(model, optimizer)))
        then = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        train(model, optimizer, group.rank, range(AT + 1, AT + 3))  # while it is written
        assert writer.close(30)
        assert not [ticket.failure for ticket in writer.ended() if ticket.failure]
        return then

    return run_threads(size, work)


def loading_run(store, name, size, dtype):
    """By rank: what it held when loaded."""

    def work(group):
        model, optimizer, meter = make(name, group, dtype)
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        state = restored(store.load(store.newest_whole(), CPU))
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizers"][0])
        meter.load(state["meter"])
        return copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())

    return run_threads(size, work)


@pytest.mark.few(2)
@every_value(
    {
        "size": SIZES,
        "new_size": SIZES[2:] + SIZES[:2],
        "name": OPTIMIZERS,
        "dtype": [torch.float32, torch.bfloat16],
    }
)
def test_any_number_of_ranks_loads_what_any_number_wrote(tmp_path, size, new_size, name, dtype):
    """What a run that has loaded this goes on to is the law of tests/optim/engine/test_resume.py."""
    store = CheckpointStore(tmp_path, keep=1)
    (model, optimizer), *_ = saving_run(store, name, size, dtype)
    for model_too, optimizer_too in loading_run(store, name, new_size, dtype):
        assert set(model) == set(model_too)
        assert all(bits(model[name]) == bits(model_too[name]) for name in model)
        assert set(optimizer) == set(optimizer_too)
        for kind in ("vectors", "residuals"):
            ours, theirs = optimizer[kind], optimizer_too[kind]
            assert {name: bits(v_N) for name, v_N in ours.items()} == {name: bits(v_N) for name, v_N in theirs.items()}
        plain = set(optimizer) - {"vectors", "residuals", "master"}
        assert repr([optimizer[key] for key in plain]) == repr([optimizer_too[key] for key in plain])
        assert ("master" in optimizer) == (dtype == torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_checkpoint_is_at_most_a_tenth_larger_than_parameters_m_v_and_r(tmp_path, dtype):
    """Of low-precision parameters the master is what counts: the rounded ones are not written beside it."""
    store = CheckpointStore(tmp_path, keep=1)

    def work(group):
        model = seeded(0, lambda: torch.nn.Sequential(torch.nn.Linear(101, 307), torch.nn.Linear(307, 101))).to(dtype)
        optimizer = OneBitAdam(model.parameters(), warmup=4, group=group)
        writer = Writer(store)
        writer.save(
            CheckpointId(GENERATION, 1),
            group.rank,
            group.size,
            collect(Meter(group.stats), of(model, optimizer)),
        )
        assert writer.close(30)
        return sum(param.numel() for param in model.parameters())

    numel, *_ = run_threads(3, work)
    size_bytes = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert 16 * numel <= size_bytes <= 1.1 * 16 * numel


def test_a_checkpoint_of_a_recipe_from_before_recipes_were_scripts_is_gone_on_from(tmp_path):
    """It has no registered objects: the model of a recipe was saved by itself."""
    group = SoloGroup()

    def built(seed):
        model = seeded(seed, lambda: torch.nn.Linear(5, 3))
        optimizer = Adam(model.parameters(), group=group)
        return model, Training(group, CPU, optimizer, of(model, optimizer), MapFeed([0], 1, 1))

    model, training = built(1)
    content = collect(Meter(group.stats), training.registered)
    plain = {name: value for name, value in content.plain.items() if name not in ("registered", "modules")}
    other, fresh = built(2)
    restore(replace(content, plain=plain), fresh)
    assert all(map(torch.equal, other.parameters(), model.parameters()))
    assert restored(replace(content, plain=plain))["model"].keys() == model.state_dict().keys()


def test_what_others_keep_in_the_state_of_the_optimizer_goes_back_too(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    model, optimizer, meter = make("onebit_adam", SoloGroup(), torch.float32)
    train(model, optimizer, 0, range(1, AT + 1))
    z = torch.arange(13, dtype=torch.bfloat16)
    optimizer.state[model.first.bias].update(z=z, count=3)
    writer = Writer(store)
    writer.save(CheckpointId(GENERATION, AT), 0, 1, collect(meter, of(model, optimizer)))
    assert writer.close(60)
    content = store.load(CheckpointId(GENERATION, AT), CPU)
    other, loaded, meter = make("onebit_adam", SoloGroup(), torch.float32)
    state = restored(content)
    assert set(state["model"]) == set(restored(collect(meter, of(other, loaded)))["model"])
    loaded.load_state_dict({**state["optimizers"][0], "parameters": content.flat["parameters"]})
    assert torch.equal(loaded.state[other.first.bias]["z"], z)
    assert loaded.state[other.first.bias]["count"] == 3
    assert set(loaded.state[other.last.bias]) == {"step", "exp_avg", "exp_avg_sq"}


FORMAT_4 = Path(__file__).parents[1] / "data/checkpoints-of-format-4"


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_checkpoint_of_the_oldest_format_that_is_promised_is_gone_on_from(dtype, size):
    name = f"onebit_adam-{str(dtype).partition('.')[2]}"
    held = torch.load(FORMAT_4 / "held.pt", weights_only=True)[name]
    store = CheckpointStore(FORMAT_4 / name, keep=1)

    def work(group):
        model, optimizer, meter = make("onebit_adam", group, dtype)
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        training = Training(group, CPU, optimizer, of(model, optimizer), MapFeed([0], 1, 1))
        content = store.load(store.newest_whole(), CPU)
        restore(content, training)
        meter.load(restored(content)["meter"])
        then = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        train(model, optimizer, group.rank, range(AT + 1, AT + 4))
        assert all(torch.isfinite(param).all() for param in model.parameters())
        return then

    for model, optimizer in run_threads(size, work):
        assert {name: bits(x) for name, x in model.items()} == {name: bits(x) for name, x in held["model"].items()}
        assert (optimizer["num_steps"], optimizer["format"]) == (held["num_steps"], 6)
        for kind in ("vectors", "residuals"):
            assert {name: bits(x) for name, x in held[kind].items()} == {
                name: bits(x) for name, x in optimizer[kind].items() if name in held[kind]
            }
        assert held["master"] is None or bits(optimizer["master"]) == bits(held["master"])


def test_of_a_checkpoint_of_a_0_1_adam_that_is_no_more_the_model_is_left():
    store = CheckpointStore(FORMAT_4 / "zero_one_adam-float32", keep=1)
    model, optimizer, _ = make("zero_one_adam", SoloGroup(), torch.float32)
    state = restored(store.load(store.newest_whole(), CPU))
    with pytest.raises(ValueError, match="which this version does not have: go on with the version that saved it, or"):
        optimizer.load_state_dict(state["optimizers"][0])
    model.load_state_dict(state["model"])
    held = torch.load(FORMAT_4 / "held.pt", weights_only=True)["zero_one_adam-float32"]["model"]
    assert {name: bits(x) for name, x in model.state_dict().items()} == {name: bits(x) for name, x in held.items()}
