"""0/1 Adam: no step explodes: rates of zero or nearly, no gradient at all, rows without variance."""

import copy

import pytest
import torch

from tests.covering import every_value
from tests.optim.constructing import construct
from tests.optim.zero_one_adam.problem import HYPER, backward, bits, make, synced, train
from thinwire.comm import run_threads
from thinwire.optim import ZeroOneAdam


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


class Embedder(torch.nn.Module):
    """Rows that are never, late and always used; a bias whose true gradient is zero (added before a softmax)."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(64, 16)
        self.head = torch.nn.Linear(16, 8)
        self.shift = torch.nn.Parameter(torch.zeros(1))

    def forward(self, tokens, targets):
        return torch.nn.functional.cross_entropy(self.head(self.table(tokens)) + self.shift, targets)


EMBEDDER = Embedder()


@every_value({"size, dense": [(1, 0), (2, 10), (4, 0)]}, only=(0, 1))
@pytest.mark.law
def test_t13_rows_without_variance_neither_explode_before_or_after_the_freeze_nor_die(size, dense):
    lr, freeze = 1e-2, 30

    def work(group):
        model = copy.deepcopy(EMBEDDER)
        optimizer = construct(
            ZeroOneAdam,
            model.parameters(),
            lr=lr,
            betas=(0.9, 0.99),
            var_freeze_step=freeze,
            dense_steps=dense,
            local_step_scaler=30,
            local_step_clipper=4,
            group=group,
        )
        generator = torch.Generator().manual_seed(group.rank)
        early, late, others, untouched = 0.0, 0.0, 0.0, None
        for step in range(1, 121):
            rows = 48 if step <= 2 * freeze else 60  # 48..59 come late, 60..63 never
            tokens = torch.randint(0, rows, (64,), generator=generator)
            optimizer.zero_grad()
            model(tokens, tokens % 8).backward()
            before = optimizer.space.p_N.clone()
            if step == 2 * freeze:
                untouched = model.table.weight[48:60].detach().clone()
            optimizer.step()
            moves = (optimizer.space.p_N - before).abs()
            early = max(early, float(moves.max())) if step <= freeze + 20 else early
            if step > freeze:
                late = max(late, float(moves[: 64 * 16].view(64, 16)[48:].max()))
                others = max(others, float(moves[: 64 * 16].view(64, 16)[:48].max()))
        moved = (model.table.weight[48:60].detach() - untouched).abs().max()
        return early, late / others, float(moved), optimizer.stats()["floored_elements"]

    for early, late_to_others, moved, floored in run_threads(size, work):
        assert early <= 4.001 * lr  # longest_step; without the floor 1e6 at the second step
        assert late_to_others <= 15  # 10 is the root of the floor; without it about 1e6
        assert moved > 10 * lr
        assert floored >= 16 * 16
