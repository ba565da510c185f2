"""0/1 Adam: the laws that follow from its recursion. That it follows that: test_parity.py."""

from math import inf

import pytest
import torch

from tests.covering import every_value
from tests.optim.zero_one_adam.problem import (
    FREEZE,
    HYPER,
    SIZES,
    backward,
    bits,
    everywhere,
    make,
    synced,
    train,
    weight_of,
)
from thinwire.comm import run_threads


@pytest.mark.parametrize("longest", [0.25, 4.0])
def test_what_a_sync_gives_out_moves_no_element_further_than_the_longest_step(longest):
    def work(group):
        model, optimizer = make(group)
        optimizer.longest_step = longest
        s, cut = optimizer.vectors, 0
        for step in range(1, 39):  # ends with a sync
            start = optimizer.common_parameters.clone()
            backward(model, optimizer, step, group.rank)
            weight = weight_of(optimizer)
            optimizer.step()
            if synced(optimizer):
                bound = longest * weight
                moves = (optimizer.space.p_N - start).abs()
                assert float(moves.max()) <= bound * (1 + 1e-12)
                if step > FREEZE:  # the divisor of this step is still there
                    assert float((s.m_N / everywhere(optimizer)).abs().max()) <= longest * (1 + 1e-12)
                cut += int((moves > bound * (1 - 1e-9)).sum())
        assert synced(optimizer)
        return cut, bits(optimizer.space.p_N, s.m_N)

    results = run_threads(3, work)
    assert all(torch.equal(state, results[0][1]) for _, state in results)
    assert results[0][0] > 0 or longest > 1


@pytest.mark.few(1)
@every_value({"size": SIZES, "weight_decay": (0.0, 0.1)}, only=(2, 4))
@pytest.mark.law
def test_t8_a_sync_leaves_the_mean_of_the_parameters_less_the_residual_unchanged(size, weight_decay):
    """y = mean_i x_i - r R / d, r the mean rate of the round: before, this step's local part done by hand, and after.

    Where nothing is cut off.
    """

    def work(group):
        model, optimizer = make(group, weight_decay=weight_decay)
        optimizer.longest_step = inf
        s, worst = optimizer.vectors, 0.0
        lr, beta1 = HYPER["lr"], HYPER["betas"][0]
        train(model, optimizer, FREEZE, group.rank)
        divisor = everywhere(optimizer)
        for step in range(FREEZE + 1, 41):
            backward(model, optimizer, step, group.rank)
            m = beta1 * s.m_N + (1 - beta1) * optimizer.space.g_N
            x = (1 - lr * weight_decay) * optimizer.space.p_N - lr * m / divisor
            group.mean_(x)
            residual, since, weight = s.update_error.residual(), optimizer.saved["last_sync"], weight_of(optimizer)
            optimizer.step()
            if synced(optimizer):
                given = (residual - s.update_error.residual()) * weight / (step - since) / divisor
                worst = max(worst, float((optimizer.space.p_N - (x - given)).abs().max()))
        return worst

    assert max(run_threads(size, work)) < 1e-12


@every_value({"interval": [1, 16], "size": [1, 3]})
@pytest.mark.law
def test_t10_without_gradients_the_parameters_shrink_by_exactly_the_configured_decay(size, interval):
    """Step 1 has lr 0, so that it gives the variance a scale and leaves the momentum at zero."""
    decay, steps = 0.5, 50

    def work(group):
        model, optimizer = make(
            group, lr=0.0, weight_decay=decay, var_freeze_step=1, local_step_scaler=None, local_step_clipper=16
        )
        train(model, optimizer, 1, group.rank)
        start, expected = float(optimizer.space.p_N.norm()), 1.0
        for step in range(steps):
            lr = 0.1 if step == 0 else 0.1 / interval * (1 - step / 1000)
            optimizer.param_groups[0]["lr"] = lr
            optimizer.zero_grad()
            optimizer.step()
            expected *= 1 - lr * decay
        return float(optimizer.space.p_N.norm()) / start / expected, optimizer.stats()["num_syncs"]

    for ratio, num_syncs in run_threads(size, work):
        assert abs(ratio - 1) < 1e-12
        assert num_syncs == (steps if interval == 1 else 1 + (steps - 1) // 16)


def test_one_rank_equals_the_uncompressed_algorithm():
    """Local steps and syncs of one rank are descent along the momentum, v fixed; a sync makes m the round's mean."""
    model, optimizer = make()
    train(model, optimizer, FREEZE, rank=0)
    p, m, d = optimizer.space.p_N.clone(), optimizer.vectors.m_N.clone(), everywhere(optimizer)
    since = []
    for step in range(FREEZE + 1, 40):
        backward(model, optimizer, step, rank=0)
        m = torch.lerp(m, optimizer.space.g_N, 0.1)
        p = p - 1e-2 * m / d
        since.append(m)
        optimizer.step()
        torch.testing.assert_close(optimizer.space.p_N, p, rtol=0, atol=1e-13)
        if synced(optimizer):
            m, since = sum(since) / len(since), []
    assert not optimizer.vectors.update_error.residual().any()
    assert optimizer.reduce.stats.sent_bytes == 0
    assert optimizer.saved["num_syncs"] < 39
