"""Steps by kind, against the plans that the optimizers themselves follow."""

import pytest
import torch

from tests.workers.small_job import small_spec
from thinwire.comm.codecs import Int8Codec, ThresholdCodec
from thinwire.comm.groups.blocking import MirroredGroup, SoloGroup
from thinwire.comm.wire.network import Exchange
from thinwire.optim import OneBitSGD
from thinwire.optim.by_name import OPTIMIZERS
from thinwire.optim.engine.schedule import Wire, is_variance_step
from thinwire.workers.plan import schedule
from thinwire.workers.plan.asked import run_of_job, run_of_optimizer
from thinwire.workers.plan.schedule import RunSteps
from thinwire.workers.recipes import recipe_of
from thinwire.workers.recipes.of_job import hyperparameters, learning_rate

ZERO_ONE = {"name": "zero_one_adam", "lr": 1e-3, "betas": [0.9, 0.99]}


def small_run(**changes):
    return run_of_job(small_spec(**changes))


def kinds_that_ran(spec):
    """Of a real optimizer over the whole run, on one parameter."""
    param = torch.nn.Parameter(torch.ones(8))
    optimizer = OPTIMIZERS[spec.optimizer.name]([param], group=MirroredGroup(2), **hyperparameters(spec))
    found = {"full": 0, "both": 0, "compressed": 0, "local": 0}
    for step in range(1, spec.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(spec, step)
        plan = optimizer.plan(step)
        full, bits = plan.gradient is Wire.FULL, plan.momentum is Wire.COMPRESSED
        found[
            {(True, True): "both", (True, False): "full", (False, True): "compressed"}.get((full, bits), "local")
        ] += 1
        param.grad = torch.full((8,), 0.5)
        optimizer.step()
    return found


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "optimizer",
    [
        ZERO_ONE,
        {**ZERO_ONE, "dense_steps": 0},
        {**ZERO_ONE, "var_freeze": 40, "local_step_clipper": 8},
        {**ZERO_ONE, "var_freeze": 5},
        {**ZERO_ONE, "local_step_scaler": 7, "var_update_scaler": 2, "dense_steps": 3, "var_freeze": 0.5},
        {"name": "onebit_adam", "warmup": 30},
        {"name": "onebit_lamb", "warmup": 0.25},
        {"name": "onebit_adam", "warmup": 0.2, "refresh": 0.4},
        {**ZERO_ONE, "var_freeze": 0.3, "refresh": 0.25},
    ],
)
def test_kinds_are_those_that_the_optimizer_makes(optimizer):
    spec = small_spec(steps=150, optimizer=optimizer, lr_schedule={"warmup": 12})
    count = schedule.zero_one if optimizer["name"] == "zero_one_adam" else schedule.one_bit
    kinds = count(run_of_job(spec))
    ran = kinds_that_ran(spec)
    assert {name: getattr(kinds, name) for name in ran} == ran
    assert kinds.latest_warmup is None


@pytest.mark.parametrize(
    ("name", "wire", "first"),
    [
        ("onebit_adam", "fp32", 200),
        ("onebit_adam", "bf16", 400),
        ("onebit_adam", None, 600),
        ("onebit_lamb", "bf16", 400),
        ("onebit_lamb", None, 700),
    ],
)
def test_an_automatic_warmup_is_assumed_to_end_as_early_as_it_may(name, wire, first):
    run = small_run(steps=1000, optimizer={"name": name, "full_exchange": wire}, lr_schedule={"warmup": 50})
    kinds = schedule.one_bit(run, lamb=name == "onebit_lamb")
    assert (kinds.full - kinds.refreshes, kinds.full + kinds.compressed, kinds.latest_warmup) == (first, 1000, first)
    age, refreshes = first, 0
    while age + max(age // 16, 10) <= 1000:
        age, refreshes = age + max(age // 16, 10), refreshes + 1
    assert kinds.refreshes == refreshes


@pytest.mark.parametrize(
    ("more", "exchange", "part"),
    [
        ({"optimizer": {"name": "onebit_adam"}}, Exchange.FLAT_8, 0.608),  # 600 steps and the refreshes
        ({"optimizer": {"name": "onebit_adam"}, "precision": "bfloat16"}, Exchange.FLAT_16, 0.4),
        ({"optimizer": {"name": "onebit_lamb"}}, Exchange.FLAT_8, 0.705),
        ({"optimizer": {"name": "zero_one_adam"}}, Exchange.FLAT_8, 0.608),
        ({"optimizer": {"name": "adam", "full_exchange": "int8"}}, Exchange.FLAT_8, 1.0),
        ({"optimizer": {"name": "adam"}}, Exchange.DENSE_FP32, 0.0),
        ({"optimizer": {"name": "onebit_adam", "full_exchange": "int8", "warmup": 100}}, Exchange.FLAT_8, 0.1),
        ({"optimizer": {"name": "onebit_adam", "warmup": 100}}, Exchange.DENSE_FP32, 0.0),
    ],
)
def test_smaller_buckets_are_asked_for_by_the_steps_in_few_bits(more, exchange, part):
    found = schedule.full_steps(small_run(steps=1000, **more))
    assert found.exchange is exchange
    assert found.part == pytest.approx(part, abs=0.015)


def test_a_job_of_another_optimizer_is_counted_as_if_it_had_this_one():
    run = small_run(steps=1000, optimizer={"name": "sgd"})
    assert schedule.one_bit(run).warmup == schedule.one_bit(run).refreshes + 600
    assert schedule.zero_one(run).full == 600
    assert schedule.zero_one(small_run(steps=4000, optimizer={"name": "sgd"})).local > 500
    assert schedule.dense(run).full == 1000


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_says_of_its_run_what_its_job_file_says(name):
    given = {"name": name, "lr": 1e-3}
    if name == "local_steps":
        given = {"name": name, "every": 8, "codec": "int8", "inner": {"name": "adam", "lr": 1e-3, "betas": (0.8, 0.95)}}
        given |= {"parts": 3, "overlap": True}
    spec = small_spec(steps=100, optimizer=given, lr_schedule={"warmup": 9, "decay": "constant"})
    param = torch.nn.Parameter(torch.ones(8, 8))
    optimizer = recipe_of(spec).optimizer([param], MirroredGroup(2))
    found, told = run_of_optimizer(optimizer, 100), run_of_job(spec)
    assert schedule.full_steps(found) == schedule.full_steps(told)
    for of_run in ("steps", "method", "beta2", "inner", "every", "parts", "late", "codec", "own"):
        assert getattr(found, of_run) == getattr(told, of_run), of_run


@pytest.mark.parametrize(
    "changes",
    [{"warmup": 10}, {"var_freeze_step": 10}, {"lr_warmup_steps": 11}],
    ids=lambda changes: next(iter(changes)),
)
def test_what_cannot_stand_together_is_refused(changes):
    with pytest.raises(ValueError, match=f"{next(iter(changes))} = 1. in a run of 10 steps"):
        RunSteps(10, "onebit_adam", **changes)


@pytest.mark.parametrize(("steps", "scaler"), [(0, 1), (1, 1), (37, 1), (100, 3), (1000, 16)])
def test_variance_steps_are_counted_as_they_are_planned(steps, scaler):
    assert schedule.variance_steps(steps, scaler) == sum(is_variance_step(n, scaler) for n in range(1, steps + 1))


def test_a_long_run_is_counted_at_some_of_its_steps(monkeypatch):
    run = small_run(steps=9000, optimizer=ZERO_ONE)
    exact = schedule.zero_one(run)
    monkeypatch.setattr(schedule, "MOST_LOOKED_AT", 2000)
    assert schedule.zero_one(run).compressed == pytest.approx(exact.compressed, rel=0.01)


def test_a_run_of_a_billion_steps_takes_no_time_to_count():
    kinds = schedule.zero_one(small_run(steps=10**9, optimizer=ZERO_ONE))
    assert kinds.warmup + kinds.later == pytest.approx(10**9)


@pytest.mark.parametrize(
    ("codec", "due"),
    [("threshold", "threshold"), (ThresholdCodec(0.1), "sign"), (Int8Codec(), "int8"), (Int8Codec(64), "sign")],
)
def test_a_codec_with_settings_of_a_script_s_own_is_not_taken_for_the_one_of_that_name(codec, due):
    """Its bytes would be another's."""
    optimizer = OneBitSGD(torch.nn.Linear(2, 2).parameters(), codec=codec, group=SoloGroup())
    assert run_of_optimizer(optimizer, 100).codec == due
