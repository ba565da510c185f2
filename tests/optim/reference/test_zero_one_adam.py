"""Laws of the reference of 0/1 Adam: T8, T10, and what our switches change."""

import pytest
import torch

from tests.covering import every_value
from tests.optim.small_problem import HYPER, SHAPES, SHARED, SIZES, always, assert_same, gradients, never, run, start
from tests.reference.exchange import TwoPhase, exact_mean, floor_of, tensor_units
from tests.reference.papers import Fresh, Hyper, ReferenceAdam, ReferenceZeroOneAdam
from tests.reference.state import mean_gradient


def test_zero_one_adam_synchronised_at_every_step_is_adam_with_the_variance_of_the_step_before():
    reference = ReferenceZeroOneAdam(
        start(), 3, SHARED, sync_step=always, variance_step=always, exchange=exact_mean, eps_outside=False
    )
    x, m, v = start(), [torch.zeros_like(t) for t in start()], [torch.ones_like(t) for t in start()]
    reference.v = [t.clone() for t in v]  # from 0 the first step would be divided by sqrt(eps)
    for step in range(1, 30):
        grads = gradients(step, 3)
        reference.step(grads)
        for at, g in enumerate(mean_gradient(grads)):
            m[at] = 0.9 * m[at] + 0.1 * g
            x[at] = x[at] - 1e-2 * m[at] / (v[at] + 1e-8).sqrt()
            v[at] = 0.99 * v[at] + 0.01 * g**2
    for own_x, own_m in zip(reference.x, reference.m, strict=True):
        assert_same(own_x, x)
        assert_same(own_m, m)


def test_zero_one_adam_with_the_fresh_variance_is_adam():
    reference = ReferenceZeroOneAdam(
        start(),
        3,
        HYPER,
        sync_step=always,
        variance_step=always,
        exchange=exact_mean,
        eps_outside=True,
        fresh=Fresh.ALWAYS,
    )
    adam = run(ReferenceAdam(start(), HYPER, bias_correction=False), 25, 3)
    assert_same(run(reference, 25, 3).x[2], adam.x)


@every_value({"eps_outside": [False, True], "size": SIZES}, only=(2, 4))
def test_t8_a_sync_leaves_y_as_it_was_and_makes_workers_equal(size, eps_outside):
    exchange = TwoPhase(tensor_units(start()))
    reference = ReferenceZeroOneAdam(
        start(),
        size,
        SHARED,
        sync_step=never,
        variance_step=never,
        exchange=exchange,
        eps_outside=eps_outside,
    )
    reference.v = [t.square() + 0.1 for t in start(3)]
    for step in range(1, 41):
        reference.t = step
        reference.local_step(gradients(step, size))
        if step % 4 == 0:
            before = reference.agreed(exchange.residual("update"))
            reference.synchronize()
            assert_same(reference.agreed(exchange.residual("update")), before)
            for x, u in zip(reference.x, reference.u, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(x, reference.x[0], strict=True))
                assert not any(t.any() for t in u)


def test_t8_y_follows_local_steps_that_nothing_was_left_out_of():
    """Between and across syncs y moves by the mean of the workers' own steps, whatever is compressed."""
    exchange = TwoPhase()
    reference = ReferenceZeroOneAdam(
        start(), 3, SHARED, sync_step=lambda t: t % 3 == 0, variance_step=never, exchange=exchange
    )
    reference.v = [t.square() + 0.1 for t in start(3)]
    for step in range(1, 31):
        y, grads = reference.agreed(exchange.residual("update")), gradients(step, 3)
        moves = [
            sum(0.9 * m[at] + 0.1 * g[at] for m, g in zip(reference.m, grads, strict=True)) / 3
            for at in range(len(SHAPES))
        ]
        reference.step(grads)
        expected = [a - 1e-2 * move / root for a, move, root in zip(y, moves, reference.roots(), strict=True)]
        assert_same(reference.agreed(exchange.residual("update")), expected)


@pytest.mark.parametrize("interval", [1, 16])
def test_t10_zero_one_adam_decays_once(interval):
    strong = Hyper(lr=1e-2, weight_decay=0.1)
    reference = ReferenceZeroOneAdam(
        start(), 3, strong, sync_step=lambda t: t % interval == 0, variance_step=never, exchange=exact_mean
    )
    run(reference, 64, 3, lambda step, n: [[torch.zeros_like(x) for x in start()]] * n)
    assert_same(reference.x[1], [x * (1 - 1e-2 * 0.1) ** 64 for x in start()])


def test_zero_one_adam_keeps_x_where_its_sum_says_under_decay():
    """x_i = x_s - u_i / root between syncs, so that a sync only replaces u_i by its mean."""
    strong = Hyper(lr=1e-2, betas=(0.9, 0.99), weight_decay=5.0)
    exchange = TwoPhase()
    reference = ReferenceZeroOneAdam(
        start(), 3, strong, sync_step=lambda t: t % 5 == 0, variance_step=never, exchange=exchange, eps_outside=True
    )
    reference.v = [t.square() + 0.1 for t in start(3)]
    for step in range(1, 24):
        reference.step(gradients(step, 3))
        for x, u in zip(reference.x, reference.u, strict=True):
            sums = zip(reference.x_s, u, reference.roots(), strict=True)
            assert_same(x, [x_s - part / root for x_s, part, root in sums])


def test_zero_one_adam_with_the_first_variance_used_at_once_has_no_step_without_scale():
    """Started from v = 0 the paper divides by sqrt(eps), and its first step is far beyond the learning rate."""

    def first_move(fresh):
        reference = ReferenceZeroOneAdam(
            start(), 3, SHARED, sync_step=always, variance_step=always, exchange=exact_mean, fresh=fresh
        )
        run(reference, 1, 3)
        return max(float((a - b).abs().max()) for a, b in zip(reference.x[0], start(), strict=True))

    assert first_move(Fresh.AT_FIRST) <= 10 * SHARED.lr
    assert first_move(Fresh.NEVER) >= 100 * SHARED.lr
    assert first_move(Fresh.ALWAYS) == first_move(Fresh.AT_FIRST)


def test_zero_one_adam_freezes_what_it_has_been_dividing_by():
    floor = floor_of(tensor_units(start()))
    reference = ReferenceZeroOneAdam(
        start(),
        2,
        SHARED,
        sync_step=always,
        variance_step=lambda t: t <= 6,
        fresh=Fresh.ALWAYS,
        bias_correction=True,
        freeze_at=6,
        floor=floor,
    )
    plain = ReferenceAdam(start(), SHARED)
    for step in range(1, 7):
        reference.step(gradients(step, 2))
        plain.step(gradients(step, 2))
    expected = floor([v / (1 - 0.99**6) for v in plain.v])
    assert_same(reference.v, expected)
    assert_same(run(reference, 5, 2).v, expected, atol=0)


def test_zero_one_adam_is_safe_at_learning_rate_zero():
    idle = Hyper(lr=0.0)
    reference = ReferenceZeroOneAdam(start(), 2, idle, sync_step=always, variance_step=always)
    run(reference, 5, 2)
    for x in reference.x:
        assert_same(x, start(), atol=0)
    assert all(torch.isfinite(m).all() for worker in reference.m for m in worker)


def test_zero_one_adam_may_leave_momentum_alone_at_learning_rate_zero():
    idle = Hyper(lr=0.0)
    reference = ReferenceZeroOneAdam(start(), 2, idle, sync_step=never, variance_step=never, skip_idle=True)
    run(reference, 3, 2)
    assert not any(m.any() for worker in reference.m for m in worker)


def test_zero_one_adam_sends_nothing_after_a_round_of_learning_rate_zero():
    def exchange(zs, memory):
        raise AssertionError("there is nothing to send")

    reference = ReferenceZeroOneAdam(
        start(), 2, Hyper(lr=0.0), sync_step=always, variance_step=never, exchange=exchange
    )
    run(reference, 3, 2)
    assert_same(reference.x[0], start())


def test_momentum_after_a_round_is_the_gradient_that_was_constant_in_it_decay_or_not():
    forgetful = Hyper(lr=1e-2, betas=(0.0, 0.99), weight_decay=5.0)
    reference = ReferenceZeroOneAdam(
        start(), 2, forgetful, sync_step=lambda t: t == 8, variance_step=never, exchange=exact_mean
    )
    reference.v = [torch.ones_like(t) for t in start()]
    run(reference, 8, 2, lambda step, n: [start(9)] * n)
    assert_same(reference.m[0], start(9))
