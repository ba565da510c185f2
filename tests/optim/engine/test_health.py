"""The numbers about an optimizer are what they say, the same on every rank, and cost the steps nothing."""

from math import sqrt

import pytest
import torch

from tests.covering import every_value
from tests.optim.constructing import construct
from thinwire.comm import run_threads
from thinwire.optim import (
    SGD,
    Adam,
    Lamb,
    OneBitAdam,
    OneBitLamb,
    OneBitMuon,
    OneBitSGD,
    ZeroOneAdam,
)
from thinwire.optim.engine.health import health

SHAPES = ((40, 30), (30,), (7,))
COMPRESSED = {
    "onebit_adam": lambda params, group: OneBitAdam(params, lr=1e-2, betas=(0.9, 0.99), warmup=3, group=group),
    "onebit_lamb": lambda params, group: OneBitLamb(params, lr=1e-2, betas=(0.9, 0.99), warmup=3, group=group),
    "onebit_sgd": lambda params, group: OneBitSGD(params, lr=1e-2, group=group),
    "zero_one_adam": lambda params, group: construct(
        ZeroOneAdam, params, lr=1e-2, betas=(0.9, 0.99), var_freeze_step=3, local_step_scaler=50, group=group
    ),
    "onebit_muon": lambda params, group: OneBitMuon(params, lr=1e-2, group=group),
}


def trained(make, size, steps, then, dtype=torch.float32):
    """`then(optimizer)` of each rank after so many steps on noise that differs between ranks."""

    def work(group):
        generator = torch.Generator().manual_seed(5)
        params = [torch.nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in SHAPES]
        optimizer = make(params, group)
        noise = torch.Generator().manual_seed(group.rank)
        for _ in range(steps):
            for param in params:
                param.grad = torch.randn(param.shape, generator=noise, dtype=dtype)
            optimizer.step()
        return then(optimizer)

    return run_threads(size, work)


@every_value({"size": [2, 3], "name": COMPRESSED})
def test_every_rank_is_told_the_same_of_a_compressed_optimizer(name, size):
    told = trained(COMPRESSED[name], size, 10, health)
    assert all(other == told[0] for other in told)
    assert 0 < told[0]["error_to_momentum"] < 5
    assert 0.3 < told[0]["sign_density_worker"] <= 1
    assert 0.3 < told[0]["sign_density_server"] <= 1
    if name == "onebit_muon":  # each rank has a momentum of its own
        assert "max_step" not in told[0]
    else:
        assert told[0]["max_step"] > 0
    assert told[0].get("floored_elements", 0) < 10


@pytest.mark.few(2)
@pytest.mark.parametrize("name", COMPRESSED)
def test_asking_changes_no_bit_of_the_run(name):
    def asked(optimizer):
        health(optimizer)
        return unasked(optimizer)

    def unasked(optimizer):
        for param in optimizer.param_groups[0]["params"]:
            param.grad = torch.ones_like(param) * (1 + optimizer.num_steps)
        optimizer.step()
        return optimizer.space.p_N.clone()

    for a, b in zip(trained(COMPRESSED[name], 3, 8, asked), trained(COMPRESSED[name], 3, 8, unasked), strict=True):
        assert torch.equal(a, b)


def test_error_to_momentum_is_that_of_the_whole_residual_and_momentum_of_a_small_model():
    def both(optimizer):
        told = health(optimizer)["error_to_momentum"]
        s = optimizer.vectors
        return told, float(s.momentum_error.residual().norm() / s.m_N.norm())

    for told, exact in trained(COMPRESSED["onebit_adam"], 3, 10, both, torch.float64):
        assert told == pytest.approx(exact, rel=1e-9)


@pytest.mark.parametrize("steps", [1, 3, 9])
def test_max_step_is_the_largest_change_of_an_element_in_units_of_lr(steps):
    """Step 3 is the last dense one: v is corrected there for good, m is not corrected any more by the next."""

    def largest(optimizer):
        before = optimizer.space.p_N.clone()
        for tensor in optimizer.space.tensors:  # m stays m: the next step is m / (sqrt(v) + eps)
            tensor.param.grad = optimizer.vectors.m_N[tensor.start : tensor.stop].view_as(tensor.param).clone()
        told = health(optimizer)["max_step"]
        if steps < 3:
            return told, None
        optimizer.step()
        return told, float((optimizer.space.p_N - before).abs().max()) / 1e-2

    make = lambda params, group: OneBitAdam(params, lr=1e-2, betas=(0.9, 0.99), warmup=3, group=group)  # noqa: E731
    ((told, seen),) = trained(make, 1, steps, largest, torch.float64)
    if steps == 1:
        assert told == pytest.approx(1, rel=1e-6)  # the first step of a corrected Adam is lr, whatever the gradient
    else:
        assert told == pytest.approx(seen, rel=1e-6)


@pytest.mark.parametrize("make", [Adam, Lamb])
def test_dense_optimizers_have_a_step_and_nothing_else_to_tell(make):
    (told, other) = trained(lambda params, group: make(params, lr=1e-2, group=group), 2, 1, health)
    assert told == other
    assert told.pop("max_step") == pytest.approx(1, rel=1e-3)
    assert not any(name.startswith(("error", "sign")) for name in told)


def test_without_a_variance_the_step_is_the_momentum():
    def both(optimizer):
        return health(optimizer)["max_step"], float(optimizer.vectors.m_N.abs().max())

    ((told, exact),) = trained(lambda params, group: SGD(params, lr=1e-2, group=group), 1, 4, both)
    assert told == pytest.approx(exact)


def test_what_is_not_known_is_left_out():
    assert trained(COMPRESSED["onebit_adam"], 2, 0, health) == [{"floored_elements": 0}] * 2
    warm = trained(COMPRESSED["onebit_adam"], 2, 2, health)[0]
    assert "error_to_momentum" not in warm
    (alone,) = trained(COMPRESSED["onebit_adam"], 1, 6, health)
    assert alone["error_to_momentum"] == 0
    assert "sign_density_worker" not in alone


def test_stats_and_a_loaded_run_show_the_last_health_with_its_step():
    def then(optimizer):
        told = health(optimizer)
        shown = optimizer.stats()["health"]
        saved = optimizer.state_dict()
        optimizer.evidence.clear()
        optimizer.load_state_dict(saved)
        return told, shown, optimizer.stats()["health"]

    for told, shown, loaded in trained(COMPRESSED["onebit_adam"], 2, 7, then):
        assert shown == loaded == {"step": 7, **told}


def test_the_automatic_warmup_tells_its_ratio_until_it_ends():
    def make(params, group):
        return OneBitAdam(
            params, lr=1e-2, betas=(0.9, 0.9), warmup="auto", total_steps=200, lr_warmup_steps=1, group=group
        )

    during = trained(make, 2, 15, health)[0]
    assert 0.5 < during["variance_ratio"] <= 1
    assert "error_to_momentum" not in during
    after = trained(make, 2, 60, health)[0]
    assert "variance_ratio" not in after
    assert after["error_to_momentum"] > 0


def test_floored_elements_and_skipped_rounds_are_told():
    models = []

    def make(params, group):
        params.append(torch.nn.Parameter(torch.zeros(64)))  # never gets a gradient
        models.append(params)
        return construct(ZeroOneAdam, params, lr=1e-2, var_freeze_step=2, local_step_scaler=2, group=group)

    def of_the_three(params, group):
        return make(list(params), group)

    told = trained(of_the_three, 2, 10, lambda optimizer: (optimizer.prepare_to_save(), health(optimizer))[1])[0]
    assert told["floored_elements"] >= 64
    assert told["rounds_skipped"] > 0


def test_gaussian_momentum_has_a_known_density():
    told = trained(COMPRESSED["onebit_adam"], 2, 4, health)[0]
    assert told["sign_density_worker"] == pytest.approx(sqrt(2 / torch.pi), abs=0.06)
