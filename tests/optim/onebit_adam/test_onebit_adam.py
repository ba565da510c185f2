"""1-bit Adam: what one rank computes, and its plan. Its recursion: reference/test_parity.py."""

import copy

import pytest
import torch

from tests.covering import every_value
from tests.optim.seeded import seeded
from thinwire.comm import run_threads
from thinwire.optim import OneBitAdam
from thinwire.optim.engine.schedule import Phase, Wire, onebit_adam_plan

SIZES = (1, 2, 3, 4, 8)
HYPER = {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.01}


def small_model(dtype=torch.float64, seed=0):
    layers = lambda: torch.nn.Sequential(torch.nn.Linear(7, 13), torch.nn.Tanh(), torch.nn.Linear(13, 3))  # noqa: E731
    return seeded(seed, layers).to(dtype)


MODEL = small_model()


def batch(step, rank, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(6, 7, generator=generator, dtype=dtype)
    return x, torch.sin(x[:, :3] * 2)


def train(model, optimizer, steps, rank, first=1):
    losses = []
    for step in range(first, first + steps):
        x, y = batch(step, rank, next(model.parameters()).dtype)
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.law
def test_t11_one_rank_equals_the_uncompressed_algorithm():
    """After the freeze one rank is momentum descent under a fixed variance, with nothing left out."""
    model = copy.deepcopy(MODEL)
    optimizer = OneBitAdam(model.parameters(), warmup=5, **HYPER)
    train(model, optimizer, 5, rank=0)
    v, m = optimizer.vectors.v_N.clone(), optimizer.vectors.m_N.clone()
    for step in range(6, 15):
        p = optimizer.space.p_N.clone()
        x, y = batch(step, 0)
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        m = torch.lerp(m, optimizer.space.g_N, 1 - 0.9)
        optimizer.step()
        expected = p * (1 - 1e-2 * 0.01) - 1e-2 * m / (v.sqrt() + 1e-8)
        torch.testing.assert_close(optimizer.space.p_N, expected, rtol=0, atol=1e-14)
        assert torch.equal(optimizer.vectors.v_N, v)
    assert not optimizer.vectors.momentum_error.residual().any()
    assert optimizer.reduce.stats.sent_bytes == 0


@every_value({"size": SIZES}, only=(0, 3))
@pytest.mark.law
def test_t11_identical_shards_equal_one_rank_in_warmup(size):
    def work(group):
        model = copy.deepcopy(MODEL)
        optimizer = OneBitAdam(model.parameters(), warmup=10, group=group, **HYPER)
        train(model, optimizer, 10, rank=0)
        return optimizer.space.p_N

    alone = copy.deepcopy(MODEL)
    optimizer = OneBitAdam(alone.parameters(), warmup=10, **HYPER)
    train(alone, optimizer, 10, rank=0)
    for p in run_threads(size, work):
        torch.testing.assert_close(p, optimizer.space.p_N, rtol=0, atol=1e-13)


def test_plan_is_a_function_of_saved_integers():
    assert onebit_adam_plan(20, 20, None).freeze_variance
    assert not onebit_adam_plan(19, 20, None).freeze_variance
    first = onebit_adam_plan(21, 20, 20)
    assert (first.phase, first.momentum, first.gradient) == (Phase.COMPRESSED, Wire.COMPRESSED, Wire.LOCAL)
    assert onebit_adam_plan(21, 1000, 20) == first


@pytest.mark.parametrize("warmup", [0, -1, 1.5, True, None, "soon"])
def test_a_freeze_before_the_first_update_is_refused(warmup):
    with pytest.raises(ValueError, match="at least 1"):
        OneBitAdam(copy.deepcopy(MODEL).parameters(), warmup=warmup)
