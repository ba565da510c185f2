"""Where most gradients are zero 1-bit LAMB's variance takes in the sum of all since it was brought up to date last."""

import copy

import pytest
import torch

from tests.comm.exchange.test_plain import FailingGroup
from tests.covering import every_value
from tests.optim.constructing import construct
from tests.optim.reference.parity import as_parameters, feed
from thinwire.comm import PeerLost, run_threads
from thinwire.optim import OneBitLamb
from thinwire.optim.engine.state import error_memories, replicated
from thinwire.optim.variance.floor import floor_variance_
from thinwire.optim.variance.refresh import weight_of

ROWS, WIDTH, FREEZE, FIRST, SECOND = 40, 3, 10, 20, 30


def made(group, tensors=None, **more):
    random = torch.Generator().manual_seed(1)
    start = [torch.randn(shape, generator=random, dtype=torch.float64) for shape in ((ROWS, WIDTH), (5,))]
    parameters = as_parameters(tensors or start)
    common = {"lr": 1e-2, "betas": (0.9, 0.99), "block": 16, "total_steps": 50}
    return construct(OneBitLamb, parameters, group=group, **{**common, **more}), parameters


def gradients_of(step, rank):
    """Few rows have any; the other tensor has one everywhere."""
    random = torch.Generator().manual_seed(97 * step + rank)
    rows = torch.randn((ROWS, WIDTH), generator=random, dtype=torch.float64)
    rows[torch.rand(ROWS, generator=random) < 0.85] = 0
    return [rows, torch.randn(5, generator=random, dtype=torch.float64)]


def go_on(optimizer, parameters, group, steps=1):
    for _ in range(steps):
        feed(optimizer, parameters, gradients_of(optimizer.num_steps + 1, group.rank))


def mean_of(step, size, order):
    """Of each tensor, as they lie in the flat vectors."""
    grads = [gradients_of(step, rank) for rank in range(size)]
    means = [sum(of_all).view(-1) / size for of_all in zip(*grads, strict=True)]
    return [means[i] for i in order]


def order_of(optimizer, parameters):
    return [next(i for i, p in enumerate(parameters) if p is tensor.param) for tensor in optimizer.space.tensors]


def everything(optimizer):
    s = optimizer.vectors
    errors = [part for memory in error_memories(s).values() for part in (memory.worker_N, memory.server_c)]
    return [t.clone() for t in (optimizer.space.p_N, *replicated(s).values(), *errors)]


@pytest.mark.few(2)
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.law
def test_where_most_gradients_are_zero_v_takes_in_the_square_of_their_sum(size):
    """At the first refresh and the second, to what 8 bits round of R; R itself stays where it is."""

    def work(group):
        optimizer, parameters = made(group)
        s, layout, order = optimizer.vectors, optimizer.space.layout, order_of(optimizer, parameters)
        go_on(optimizer, parameters, group, FIRST - 1)
        assert optimizer.frozen_at == FREEZE
        for step in (FIRST, SECOND):
            before, left = s.v_N.clone(), s.momentum_error.residual()
            go_on(optimizer, parameters, group)
            assert optimizer.refreshed_at == step
            w, expected = weight_of(10, step, 0.99), before.clone()
            now, gap = mean_of(step, size, order), range(step - 9, step + 1)
            sums = [sum(of_all) for of_all in zip(*(mean_of(t, size, order) for t in gap), strict=True)]
            for (start, stop), g, total in zip(layout.live, now, sums, strict=True):
                z = float((g == 0).double().mean())
                took = z * total**2 / 10 + (1 - z) * g**2
                expected[start:stop].mul_(1 - w).add_(took, alpha=w)
            floor_variance_(expected, layout.live, layout.blocks(16))
            torch.testing.assert_close(s.v_N, expected, rtol=0, atol=0.01 * float(expected.max()))
            torch.testing.assert_close(s.momentum_error.residual(), left, rtol=0, atol=1e-14)
            go_on(optimizer, parameters, group, 9)
        return s.v_N, optimizer.space.p_N

    results = run_threads(size, work)
    assert all(torch.equal(x, y) for one in results for x, y in zip(one, results[0], strict=True))


@pytest.mark.law
def test_without_compression_that_sum_is_exact():
    optimizer, parameters = made(None)
    s = optimizer.vectors
    go_on(optimizer, parameters, optimizer.group, FIRST - 1)
    order = order_of(optimizer, parameters)
    due = sum(torch.cat(mean_of(t, 1, order)) for t in range(FREEZE + 1, FIRST))
    found = torch.cat([s.fresh_v_N[start:stop] for start, stop in optimizer.space.layout.live]) / 0.1
    torch.testing.assert_close(found, due, rtol=0, atol=1e-12)


@every_value({"full": ["fp32", "int8"]}, only=(0,))
@pytest.mark.law
def test_a_run_with_such_a_sum_that_is_loaded_is_the_one_that_went_on(full):
    def work(group):
        for saved_at in (FIRST - 1, FIRST, FIRST + 4):
            optimizer, parameters = made(group, full_exchange=full)
            go_on(optimizer, parameters, group, saved_at)
            state = copy.deepcopy(optimizer.state_dict())
            other, others = made(group, [p.detach().clone() for p in parameters], full_exchange=full)
            other.load_state_dict(state)
            go_on(optimizer, parameters, group, SECOND + 2 - saved_at)
            go_on(other, others, group, SECOND + 2 - saved_at)
            pairs = zip(everything(other), everything(optimizer), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs)
        return True

    assert all(run_threads(2, work))


def test_a_refresh_that_loses_a_peer_while_the_sum_is_brought_together_changes_nothing():
    def work(group):
        failing = FailingGroup(group, fail_at=10**9)
        optimizer, parameters = made(failing)
        go_on(optimizer, parameters, group, FIRST - 1)
        before, saved = everything(optimizer), dict(optimizer.saved)
        failing._left = 2  # the mean gradient is one collective in full
        with pytest.raises(PeerLost):
            go_on(optimizer, parameters, group)
        assert all(torch.allclose(a, b, rtol=0, atol=1e-14) for a, b in zip(everything(optimizer), before, strict=True))
        assert optimizer.saved == saved
        return optimizer.num_steps == FIRST - 1

    assert all(run_threads(2, work))


def test_a_run_with_sums_goes_on_where_nobody_reads_them():
    """Its v stays as it is then, and r is as at a freeze."""

    def work(group):
        optimizer, parameters = made(group)
        go_on(optimizer, parameters, group, FIRST + 4)
        state = optimizer.state_dict()
        other, others = made(group, warmup=FREEZE)
        other.load_state_dict(state)
        assert torch.equal(other.vectors.fresh_v_N, other.vectors.v_N)
        go_on(other, others, group, 20)
        return float(other.vectors.factor_T.min()) > 0.4

    assert all(run_threads(2, work))
