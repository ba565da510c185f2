"""0/1 Adam: after a large change of the global batch the variance moves again, and is frozen anew."""

import copy

import pytest
import torch

from tests.covering import every_value
from tests.optim.zero_one_adam.problem import backward, bits, everywhere, make, synced, train
from thinwire.comm import run_threads
from thinwire.optim.variance.when_to_freeze import FEWEST_STEPS, VarianceFreeze

BETA2 = 0.95  # v remembers 20 steps
GIVEN = {"var_freeze_step": 12, "betas": (0.9, BETA2)}


def rearmed(group, at=21, dtype=torch.float64, **settings):
    """A run whose global batch goes from 8 to 32 after step `at`, in the middle of a round."""
    model, optimizer = make(group, dtype, **{**GIVEN, **settings})
    assert not optimizer.set_global_batch(8)
    train(model, optimizer, at, group.rank if group else 0)
    return model, optimizer


@pytest.mark.parametrize(("size", "again"), [(15, False), (16, True), (5, False), (4, True)])
def test_the_warmup_begins_again_at_twice_or_half_the_global_batch_and_not_before(size, again):
    model, optimizer = rearmed(None)
    assert optimizer.set_global_batch(size) == again
    assert (optimizer.frozen_at is None) == again
    train(model, optimizer, 12, 0)
    assert optimizer.frozen_at == (33 if again else 12)
    if again:
        assert optimizer.stats()["rearmed"] == [[21, 8, size]]
        assert not optimizer.set_global_batch(size)
    assert optimizer.set_global_batch(64)


def test_at_first_nothing_changes_but_that_ranks_agree_and_steps_are_divided_by_what_they_were():
    def work(group):
        _, optimizer = rearmed(group)
        assert not optimizer.at_sync
        mean_x, divisor = optimizer.space.p_N.clone(), everywhere(optimizer)
        group.mean_(mean_x)
        residual = optimizer.vectors.update_error.residual()
        assert optimizer.set_global_batch(32)
        assert torch.equal(optimizer.vectors.update_error.residual(), residual)
        torch.testing.assert_close(optimizer.space.p_N, mean_x, rtol=0, atol=1e-13)
        torch.testing.assert_close(everywhere(optimizer), divisor, rtol=1e-2, atol=0)
        return bits(optimizer.space.p_N, optimizer.vectors.m_N)

    first, *others = run_threads(3, work)
    assert all(torch.equal(first, other) for other in others)


def test_new_gradients_outweigh_the_frozen_variance_by_the_second_freeze():
    """Of an eighth of the size: v of 1/64. Ten updates of v against those of the second warm-up."""
    model, optimizer = rearmed(None)
    before = float(optimizer.vectors.v_N.mean())
    optimizer.set_global_batch(32)
    while optimizer.frozen_at is None:
        backward(model, optimizer, optimizer.num_steps + 1, 0, factor=1 / 8)
        optimizer.step()
    updates = optimizer.saved["variance_updates"]
    assert updates > FEWEST_STEPS
    left = (1 - BETA2**FEWEST_STEPS) * BETA2 ** (updates - FEWEST_STEPS) / (1 - BETA2**updates)
    assert float(optimizer.vectors.v_N.mean()) / before == pytest.approx(left, abs=0.1)


@every_value({"saved_at": [0, 3, 14]}, only=(2,))
def test_a_run_loaded_in_or_after_its_second_warmup_equals_the_one_that_went_on(saved_at):
    def work(group):
        model, optimizer = rearmed(group, dtype=torch.float32)
        optimizer.set_global_batch(32)
        train(model, optimizer, saved_at, group.rank)
        state, weights = optimizer.state_dict(), copy.deepcopy(model.state_dict())
        other, resumed = make(group, torch.float32, seed=1, **GIVEN)
        other.load_state_dict(weights)
        resumed.load_state_dict(state)
        train(model, optimizer, 25, group.rank)
        train(other, resumed, 25, group.rank)
        assert resumed.frozen_at == optimizer.frozen_at == 33
        assert torch.equal(resumed.space.p_N, optimizer.space.p_N)
        while not synced(optimizer):
            train(model, optimizer, 1, group.rank)
        return bits(optimizer.space.p_N)

    first, *others = run_threads(3, work)
    assert all(torch.equal(first, other) for other in others)


def test_a_second_warmup_lasts_for_a_window_of_what_is_left_or_as_long_as_the_first():
    assert VarianceFreeze(0.99, total_steps=1000).second_end(400) == 400 + 30
    assert VarianceFreeze(0.99).second_end(400) == 400 + 100
    assert VarianceFreeze(0.99, var_freeze_step=50).second_end(400) == 400 + 50
    assert VarianceFreeze(0.99, var_freeze_step=5000).second_end(400) == 400 + 100
    assert VarianceFreeze(0.99, var_freeze_step=1).second_end(400) == 400 + 10
