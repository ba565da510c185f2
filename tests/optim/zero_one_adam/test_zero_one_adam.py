"""0/1 Adam against the paper's recursion, and the laws that follow from it."""

from math import inf

import pytest
import torch

from tests.covering import every_value
from tests.optim.reference.written_out import buckets_of
from tests.optim.zero_one_adam.problem import (
    FREEZE,
    HYPER,
    MODELS,
    SIZES,
    backward,
    bits,
    everywhere,
    make,
    synced,
    train,
    weight_of,
)
from tests.reference.exchange import TwoPhase, block_units, exact_mean, floor_of
from tests.reference.papers import Fresh, Hyper, ReferenceZeroOneAdam
from thinwire.comm import run_threads
from thinwire.optim import ZeroOneAdam


@every_value({"size": SIZES, "weight_decay": (0.0, 0.1), "dense": (0, 3, FREEZE + 1)}, only=(1, 3))
@pytest.mark.law
def test_follows_the_reference_in_float64(size, weight_decay, dense):
    """Two groups; a rate that rises, falls steeply and is 0 for part of a round, for a whole one, in one group only."""
    steps = 40

    def two_groups(model):
        return [{"params": model[0].parameters()}, {"params": model[2].parameters(), "weight_decay": weight_decay / 2}]

    def rate(at, step):
        idle = step in (8, 16, 24, *range(27, 31)) or (at == 1 and step in range(31, 35))
        return 0.0 if idle else 1e-2 * (step / 6 if step <= 6 else 1.0 if step <= 18 else 0.3) / (1 + at)

    def work(group):
        model, optimizer = make(group, weight_decay=weight_decay, params=two_groups, dense_steps=dense)
        start, gradients, seen = [p.detach().clone() for p in model.parameters()], [], []
        for step in range(1, steps + 1):
            for at in (0, 1):
                optimizer.param_groups[at]["lr"] = rate(at, step)
            backward(model, optimizer, step, group.rank)
            gradients.append([p.grad.clone() for p in model.parameters()])
            optimizer.step()
            seen.append([p.detach().clone() for p in model.parameters()])
        return start, gradients, seen, optimizer

    results = run_threads(size, work)
    optimizer = results[0][3]
    order = [
        next(i for i, p in enumerate(MODELS[0].parameters()) if p.shape == t.param.shape)
        for t in optimizer.space.tensors
    ]

    def flat_order(tensors):
        return [tensors[i] for i in order]

    units = block_units(optimizer.space.layout, size, buckets=buckets_of(optimizer))
    syncs = {t for t in range(1, steps + 1) if t <= 12 or (t <= 18 and t % 2 == 0) or (t > 18 and (t - 18) % 4 == 0)}
    reference = ReferenceZeroOneAdam(
        flat_order(results[0][0]),
        size,
        [Hyper(0.0, HYPER["betas"], 1e-8, weight_decay / (1 + at)) for at in (0, 0, 1, 1)],
        sync_step=syncs.__contains__,
        variance_step={dense + at for at in (1, 2, 3, 5) if dense + at <= FREEZE}.__contains__,
        dense_steps=dense,
        exchange=TwoPhase(units, units) if size > 1 else exact_mean,
        eps_outside=True,
        fresh=Fresh.AT_FIRST,
        bias_correction=True,
        freeze_at=FREEZE,
        as_momentum=True,
        longest_step=ZeroOneAdam.longest_step,
        skip_idle=True,
        floor=floor_of(block_units(optimizer.space.layout, 1)),
    )
    for step in range(steps):
        for at, hyper in zip((0, 0, 1, 1), reference.hyper, strict=True):
            hyper.lr = rate(at, step + 1)
        reference.step([flat_order(gradients[step]) for _, gradients, _, _ in results])
        for rank, (_, _, seen, _) in enumerate(results):
            for got, expected in zip(flat_order(seen[step]), reference.x[rank], strict=True):
                torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("longest", [0.25, 4.0])
def test_what_a_sync_gives_out_moves_no_element_further_than_the_longest_step(longest):
    def work(group):
        model, optimizer = make(group)
        optimizer.longest_step = longest
        s, cut = optimizer.vectors, 0
        for step in range(1, 39):  # ends with a sync
            start = optimizer.space.p_N.clone() if optimizer.at_sync else s.x_s_N.clone()
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
