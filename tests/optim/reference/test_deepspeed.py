"""What DeepSpeed does otherwise, as the reference has it: padding, the hidden first call, decay, coefficients."""

from math import lcm

import pytest
import torch

from tests.optim.small_problem import EXACT, HYPER, always, assert_same, gradients, never, run, start
from tests.reference.deepspeed import DeepSpeedExchange, zero_one_schedule
from tests.reference.exchange import exact_mean
from tests.reference.papers import Fresh, Hyper, ReferenceOneBitLamb, ReferenceZeroOneAdam


@pytest.mark.parametrize("size", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("keep_padding", [False, True])
def test_deepspeeds_exchange_loses_nothing_but_what_its_padding_took(size, keep_padding):
    lengths = (91, 39, 5)
    exchange = DeepSpeedExchange(lengths, size, keep_padding=keep_padding)
    assert all((stop - begin) % (size * lcm(size, 8)) == 0 for begin, stop in exchange.worker_units)
    assert sum(stop - begin for begin, stop in exchange.worker_units) <= 135 + 3 * size * lcm(size, 8)
    assert len(exchange.server_units) == size * len(lengths)
    generator = torch.Generator().manual_seed(0)
    rounds = [[torch.randn(135, generator=generator, dtype=torch.float64) for _ in range(size)] for _ in range(20)]
    outs = [exchange(zs, "z") for zs in rounds]
    left = exchange.errors["z"].residual()
    torch.testing.assert_close(sum(outs) + left[exchange.live], sum(sum(zs) / size for zs in rounds), **EXACT)
    if keep_padding:  # what the padding holds and what it left out came from nothing, and stay nothing together
        padding = torch.ones(exchange.padded_length, dtype=torch.bool).index_fill(0, exchange.live, False)
        together = (exchange.padding["z"] + left)[padding]
        torch.testing.assert_close(together, torch.zeros_like(together), **EXACT)


def test_deepspeeds_padding_is_a_value_like_any_other():
    """One live value among 16: the scale is spread over all of them."""
    exchange = DeepSpeedExchange([1], 2)
    z = torch.tensor([4.0], dtype=torch.float64)
    first = exchange([z, z], "z")
    assert exchange.worker_units == [(0, 16)]
    assert exchange.server_units == [(0, 8), (8, 16)]
    torch.testing.assert_close(first, torch.tensor([1.0], dtype=torch.float64), **EXACT)
    assert torch.equal(DeepSpeedExchange([1], 1)([z], "z"), z)


def test_deepspeeds_zero_one_schedule_counts_from_its_hidden_first_call():
    schedule = zero_one_schedule(40, var_freeze_step=20, var_update_scaler=4, local_step_scaler=8, local_step_clipper=4)
    assert sorted(schedule.variance) == [1, 2, 3, 4, 5, 7, 9, 11, 15, 19]
    assert sorted(schedule.sync) == [21, 22, 23, 24, 25, 26, 27, 28, 29, 31, 33, 35, 39]
    assert schedule.gradient_stage == 20


@pytest.mark.parametrize("size", [2, 3])
def test_zero_one_adam_as_deepspeed_has_it_keeps_workers_equal_until_local_steps_begin(size):
    schedule = zero_one_schedule(20, 12, 4, 2, 4)
    exchange = DeepSpeedExchange([t.numel() for t in start()], size)
    reference = ReferenceZeroOneAdam(
        start(),
        size,
        HYPER,
        sync_step=lambda t: t in schedule.sync,
        variance_step=lambda t: t in schedule.variance,
        exchange=exchange,
        eps_outside=True,
        fresh=Fresh.ALWAYS,
        decay_in_sum=True,
        gradient_stage=schedule.gradient_stage,
    )
    apart = []
    for step in range(1, 21):
        reference.step(gradients(step, size))
        equal = all(torch.equal(a, b) for x in reference.x for a, b in zip(x, reference.x[0], strict=True))
        apart += [] if equal else [step]
        assert ("update" in exchange.errors) == (step > 12)  # the errors of the second stage begin at zero
    assert "gradient" in exchange.errors
    assert apart
    assert apart == [step for step in range(13, 21) if step not in schedule.sync]


def test_deepspeeds_decay_in_the_sum_decays_up_to_ten_times():
    """E2 of the deviations: lam x enters the momentum at each sync, and is added again."""
    strong = Hyper(lr=1e-4, weight_decay=0.1)
    reference = ReferenceZeroOneAdam(
        start(),
        1,
        strong,
        sync_step=always,
        variance_step=never,
        exchange=exact_mean,
        eps_outside=True,
        decay_in_sum=True,
    )
    reference.v = [4 * torch.ones_like(t) for t in start()]
    quiet = [[torch.zeros_like(x) for x in start()]]
    for _ in range(200):
        reference.step(quiet)
    before = reference.x[0][0].clone()
    reference.step(quiet)
    rate = float((1 - reference.x[0][0] / before).mean()) / (1e-4 * 0.1)
    assert rate == pytest.approx(10, rel=0.01)


def test_onebit_lamb_as_deepspeed_has_it_never_moves_a_layer_whose_coefficient_was_always_one():
    def run_with(skip):
        return run(
            ReferenceOneBitLamb(
                start(), HYPER, warmup=5, min_coeff=1.0, max_coeff=1.0, skip_unit_coefficients=skip, exchange=exact_mean
            ),
            5,
            3,
        )

    stuck, moving = run_with(True), run_with(False)
    before = [x.clone() for x in stuck.x]
    stuck.step(gradients(6, 3))
    moving.step(gradients(6, 3))
    assert_same(stuck.x, before, atol=0)
    assert all((x != old).all() for x, old in zip(moving.x, before, strict=True))
