"""0/1 Adam: no step explodes: rates of zero or nearly, no gradient at all, rows without variance."""

import pytest
import torch

from tests.covering import every_value
from tests.optim.zero_one_adam.problem import HYPER, backward, bits, make, synced, train
from thinwire.comm import run_threads


@pytest.mark.parametrize("clipper", [1, 4])
def test_a_learning_rate_of_zero_for_whole_rounds_is_safe_and_moves_and_sends_nothing(clipper):
    def work(group):
        model, optimizer = make(group, torch.float32, local_step_scaler=None, local_step_clipper=clipper)
        train(model, optimizer, 15, group.rank)
        p, m, sent = optimizer.space.p_N.clone(), optimizer.vectors.m_N.clone(), group.stats.sent_bytes
        optimizer.param_groups[0]["lr"] = 0.0
        train(model, optimizer, 8, group.rank)
        assert torch.equal(optimizer.space.p_N, p)
        assert torch.equal(optimizer.vectors.m_N, m)
        assert group.stats.sent_bytes == sent
        optimizer.param_groups[0]["lr"] = HYPER["lr"]
        train(model, optimizer, 8, group.rank)
        assert synced(optimizer)
        assert torch.isfinite(optimizer.space.p_N).all()
        return float((optimizer.space.p_N - p).abs().max()), bits(optimizer.space.p_N, optimizer.vectors.m_N)

    results = run_threads(3, work)
    for moved, state in results:
        assert 0 < moved < 8 * 5 * HYPER["lr"]
        assert torch.equal(state, results[0][1])


def test_a_learning_rate_of_zero_from_the_first_step_is_safe():
    model, optimizer = make(lr=0.0)
    before = optimizer.space.p_N.clone()
    train(model, optimizer, 3, rank=0)
    assert torch.equal(optimizer.space.p_N, before)
    optimizer.param_groups[0]["lr"] = 1e-2
    train(model, optimizer, 30, rank=0)
    assert torch.isfinite(optimizer.space.p_N).all()


@every_value({"clipper": [1, 4], "low": [1e-17, 1e-3], "tail": [1, 24]})
def test_a_restart_after_a_low_learning_rate_does_not_explode(clipper, low, tail):
    """Error memory of the high rate, divided by a sum of low ones, would be a momentum of thousands to 1e17."""

    def work(group):
        model, optimizer = make(group, torch.float32, local_step_scaler=None, local_step_clipper=clipper)
        train(model, optimizer, 15, group.rank)
        optimizer.param_groups[0]["lr"] = HYPER["lr"] * low
        train(model, optimizer, tail, group.rank)
        optimizer.param_groups[0]["lr"] = HYPER["lr"]
        largest = 0.0
        for _ in range(8):
            before = optimizer.space.p_N.clone()
            train(model, optimizer, 1, group.rank)
            largest = max(largest, float((optimizer.space.p_N - before).abs().max()))
        return largest

    assert max(run_threads(2, work)) < 10 * HYPER["lr"]


def test_batches_without_any_gradient_before_the_first_real_one_are_safe():
    def work(group):
        model, optimizer = make(group, torch.float32, var_freeze_step=3)
        for _ in range(7):
            optimizer.zero_grad()
            optimizer.step()
        assert optimizer.frozen_at is None
        before = optimizer.space.p_N.clone()
        backward(model, optimizer, 8, group.rank)
        optimizer.step()
        assert optimizer.frozen_at == 8
        return float((optimizer.space.p_N - before).abs().max())

    assert 0 < max(run_threads(2, work)) < 10 * HYPER["lr"]


def test_gradients_that_cancel_before_there_is_a_variance_move_nothing():
    """Their mean is zero, so there is no scale yet, while each rank's update is not."""

    def work(group):
        model, optimizer = make(group, torch.float32)
        before = optimizer.space.p_N.clone()
        for _ in range(3):
            for p in model.parameters():
                a, b = torch.randint(-3, 4, (2, *p.shape), generator=torch.Generator().manual_seed(1)).float()
                p.grad = (a, b, -a - b)[group.rank]
            optimizer.step()
        assert torch.equal(optimizer.space.p_N, before)
        train(model, optimizer, 10, group.rank)
        return float((optimizer.space.p_N - before).abs().max())

    assert 0 < max(run_threads(3, work)) < 10 * 20 * HYPER["lr"]
