"""0/1 Adam: when the variance is frozen: after a given step, or at the end of the learning rate's warm-up."""

import logging

import pytest
import torch

from tests.covering import every_value
from tests.optim.zero_one_adam.problem import HYPER, backward, make
from thinwire.comm import run_threads
from thinwire.optim.variance.when_to_freeze import FrozenBy, VarianceFreeze


def frozen(freeze, rate, dense_until=None, steps=10_000):
    """(step, reason) of the freeze, under the rates of a run. dense_until: None: the default."""
    dense_until = freeze.dense_steps if dense_until is None else dense_until
    rose_at, before = 0, 0.0
    for step in range(1, steps + 1):
        rose_at = step if rate(step) > before else rose_at
        before = rate(step)
        reason = freeze.reason(step, rose_at, dense_until)
        if reason:
            return step, reason
    return None


def rising(warmup):
    return lambda step: min(step / warmup, 1.0) * (1 - step / 10_000)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"var_freeze_step": 7, "lr_warmup_steps": 50}, (7, FrozenBy.GIVEN)),
        ({"lr_warmup_steps": 50}, (100, FrozenBy.LR_WARMUP)),
        ({"lr_warmup_steps": 150}, (150, FrozenBy.LR_WARMUP)),
        ({"lr_warmup_steps": 50, "total_steps": 100}, (50, FrozenBy.LR_WARMUP)),
        ({"lr_warmup_steps": 10, "total_steps": 100}, (20, FrozenBy.LR_WARMUP)),
        ({"lr_warmup_steps": 0}, (100, FrozenBy.LR_WARMUP)),
        ({"lr_warmup_steps": 1, "total_steps": 20}, (4, FrozenBy.LR_WARMUP)),
        ({}, (40 + 100, FrozenBy.RULE)),
        ({"total_steps": 1000}, (100, FrozenBy.RULE)),
        ({"total_steps": 300}, (60, FrozenBy.RULE)),
        ({"total_steps": 100_000}, (40 + 100, FrozenBy.RULE)),
        ({"total_steps": 160}, (32, FrozenBy.CAP)),
        ({"total_steps": 3}, (1, FrozenBy.CAP)),
    ],
)
def test_the_variance_is_frozen_where_the_warmup_ends_by_number_or_once_the_rate_has_not_risen_for_a_window(
    settings, expected
):
    """A rate that rises for 40 steps; beta2 = 0.99, so that the longest window is 100."""
    assert frozen(VarianceFreeze(0.99, **settings), rising(40)) == expected


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"lr_warmup_steps": 50}, (50, FrozenBy.LR_WARMUP)),
        ({"lr_warmup_steps": 0}, (10, FrozenBy.LR_WARMUP)),
        ({"total_steps": 1000}, (40 + 50, FrozenBy.RULE)),
    ],
)
def test_without_a_dense_start_the_freeze_does_not_wait_for_one(settings, expected):
    assert frozen(VarianceFreeze(0.99, **settings), rising(40), dense_until=0) == expected


def test_alone_a_constant_rate_freezes_after_the_memory_of_the_variance_and_a_rising_one_never():
    assert frozen(VarianceFreeze(0.999), lambda step: 1.0) == (1001, FrozenBy.RULE)
    assert frozen(VarianceFreeze(0.999), float) is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"var_freeze_step": 0}, r"var_freeze_step = 0: must be a whole number \(int\), at least 1"),
        ({"lr_warmup_steps": 1.5}, "lr_warmup_steps = 1.5"),
        ({"total_steps": True}, "total_steps = True"),
        ({"var_freeze_step": 100, "total_steps": 100}, "must be less than total_steps = 100"),
        ({"lr_warmup_steps": 100, "total_steps": 100}, "must be less than total_steps = 100"),
    ],
)
def test_a_freeze_that_never_comes_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        VarianceFreeze(0.99, **settings)


def train_rising(model, optimizer, rank, steps, warmup=8):
    for _ in range(steps):
        step = optimizer.num_steps + 1
        optimizer.param_groups[0]["lr"] = 1e-2 * rising(warmup)(step)
        backward(model, optimizer, step, rank)
        optimizer.step()


@pytest.mark.few(1)
@pytest.mark.parametrize("saved_at", [3, 12, 17])
def test_the_freeze_is_found_at_the_same_step_on_every_rank_and_after_a_resume(saved_at, caplog):
    """beta2 = 0.9: a window of 10, so step 18; the reason is in stats, evidence and the log."""

    def work(group):
        model, optimizer = make(group, torch.float32, var_freeze_step=None, betas=(0.9, 0.9))
        train_rising(model, optimizer, group.rank, saved_at)
        state = optimizer.state_dict()
        other, resumed = make(group, torch.float32, seed=1, var_freeze_step=None, betas=(0.9, 0.9))
        other.load_state_dict(model.state_dict())
        resumed.load_state_dict(state)
        train_rising(model, optimizer, group.rank, 30 - saved_at)
        train_rising(other, resumed, group.rank, 30 - saved_at)
        assert torch.equal(resumed.space.p_N, optimizer.space.p_N)
        return [(o.frozen_at, o.stats()["warmup_ended_by"]) for o in (optimizer, resumed)]

    with caplog.at_level(logging.INFO):
        assert run_threads(2, work) == [[(18, "rule"), (18, "rule")]] * 2
    assert "warmup_ended step=18 by=rule lr_rose_at=8 window=10" in caplog.text


def test_a_freeze_by_the_cap_is_a_warning_and_a_given_one_says_nothing(caplog):
    model, optimizer = make(var_freeze_step=None, total_steps=24)
    with caplog.at_level(logging.INFO):
        train_rising(model, optimizer, 0, 8, warmup=20)
    assert (optimizer.frozen_at, optimizer.stats()["warmup_ended_by"]) == (5, "cap")
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    caplog.clear()
    model, optimizer = make(var_freeze_step=5)
    with caplog.at_level(logging.INFO):
        train_rising(model, optimizer, 0, 8)
    assert optimizer.frozen_at == 5
    assert "warmup_ended_by" not in optimizer.stats()
    assert not caplog.records


def test_a_frozen_run_does_not_unfreeze_when_it_is_loaded_with_another_freeze():
    model, optimizer = make(var_freeze_step=5)
    train_rising(model, optimizer, 0, 8)
    _, other = make(var_freeze_step=500)
    other.load_state_dict(optimizer.state_dict())
    assert other.frozen_at == 5
    assert not other.plan(9).update_variance


@pytest.mark.few(1)
@every_value({"freeze": [1, 2, 3], "beta2": [0.99, 0.999]})
def test_a_variance_of_one_two_or_three_gradients_neither_explodes_nor_stops_the_run(freeze, beta2):
    """Measured: 53 lr with a variance of one noisy gradient, 28 of three. beta2 is no matter."""

    def work(group):
        model, optimizer = make(group, torch.float32, var_freeze_step=freeze, betas=(0.9, beta2), lr=3e-3)
        largest, losses = 0.0, []
        for step in range(1, 121):
            losses.append(backward(model, optimizer, step, group.rank))
            before = optimizer.space.p_N.clone()
            optimizer.step()
            largest = max(largest, float((optimizer.space.p_N - before).abs().max()))
        return largest, sum(losses[:10]), sum(losses[-10:])

    for largest, first, last in run_threads(3, work):
        assert largest < 100 * 3e-3
        assert last < 0.9 * first


def test_defaults_need_no_number():
    _, optimizer = make(var_freeze_step=None, betas=HYPER["betas"])
    assert optimizer.freeze.window == 100
