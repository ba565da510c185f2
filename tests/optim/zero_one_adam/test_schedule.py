"""The schedules of 0/1 Adam, by table, and the volume that they lead to."""

import itertools

import pytest
import torch

from thinwire.comm import SoloGroup
from thinwire.optim import ZeroOneAdam, ZeroOneSchedule
from thinwire.optim.engine.schedule import (
    Phase,
    Wire,
    counted_interval,
    is_variance_step,
    rate_interval,
    zero_one_adam_plan,
)

SCHEDULE = ZeroOneSchedule(dense_steps=1, local_step_clipper=16)


@pytest.mark.parametrize(
    ("scaler", "expected"),
    [
        (1, [1, 2, 4, 8, 16, 32]),
        (2, [1, 2, 3, 5, 7, 11, 15, 23, 31]),
        (4, [1, 2, 3, 4, 5, 7, 9, 11, 13, 17, 21, 25, 29, 37]),
    ],
)
def test_variance_steps_lie_2_to_the_floor_of_j_over_kappa_apart(scaler, expected):
    assert [step for step in range(1, expected[-1] + 1) if is_variance_step(step, scaler)] == expected


def test_variance_steps_of_the_paper_are_153_in_12500():
    steps = [step for step in range(1, 12501) if is_variance_step(step, 16)]
    assert [b - a for a, b in itertools.pairwise(steps)] == [2 ** (j // 16) for j in range(152)]
    assert len(steps) == 153


def test_the_counted_interval_doubles_every_scaler_steps_up_to_the_clipper():
    table = [counted_interval(step, 100, 10, 16) for step in (101, 110, 111, 120, 121, 131, 141, 151, 10**9)]
    assert table == [1, 1, 2, 2, 4, 8, 16, 16, 16]
    assert counted_interval(10**9, 100, 10, 6) == 6


@pytest.mark.parametrize(
    ("rate", "interval"),
    [(1.0, 1), (0.51, 1), (0.5, 2), (0.26, 2), (0.25, 4), (0.125, 8), (0.0625, 16), (1e-9, 16), (0.0, 16), (2.0, 1)],
)
def test_the_interval_doubles_where_the_learning_rate_has_halved(rate, interval):
    for peak in (1.0, 3e-4, 0.7):
        assert rate_interval(rate * peak, peak, 16) == interval
    assert rate_interval(0.0, 0.0, 16) == 1


@pytest.mark.parametrize("clipper", [1, 2, 6, 10, 16])
@pytest.mark.parametrize("fall", [2, 4, 6, 8, 10, 16])
def test_rounding_decides_no_interval_where_schedules_come_to_rest(fall, clipper):
    """A rate in float32 is up to 6e-8 of it away from the one that a scheduler has computed, to either side."""
    for peak in (1.0, 3e-4, 0.7):
        near = [peak / fall * (1 + off) for off in (0, 1e-16, -1e-16, 1e-9, -1e-9, 6e-8, -6e-8)]
        assert len({rate_interval(rate, peak, clipper) for rate in near}) == 1
    assert rate_interval(1 / fall, 1.0, clipper) == (clipper if fall >= clipper else 1 << (fall.bit_length() - 1))


def test_a_rate_in_a_tensor_syncs_where_a_number_does():
    """Halved by a scheduler: float32 has 0.7 * 3e-4 / 2 on one side of half of its peak, or on the other."""

    def syncs(rate):
        net = torch.nn.Linear(4, 4)
        optimizer = ZeroOneAdam(net.parameters(), lr=rate, group=SoloGroup(), var_freeze_step=1, schedule=SCHEDULE)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 if step < 4 else 1 / 2 + 1e-9)
        found = []
        for _ in range(12):
            optimizer.zero_grad()
            net(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            schedule.step()
            found.append(optimizer.at_sync)
        return found

    for rate in (3e-4, 7e-4, 1e-3):
        assert syncs(rate) == syncs(torch.tensor(rate))
        assert syncs(rate)[-2:] in ([True, False], [False, True])


def planned(steps, var_freeze_step, interval_at):
    """(syncs, full exchanges) of a run, from the plan functions alone."""
    last_sync = syncs = fulls = 0
    for step in range(1, steps + 1):
        plan = zero_one_adam_plan(
            step,
            freeze=step >= var_freeze_step,
            var_update_scaler=16,
            variance_updates=step - 1,
            frozen_at=var_freeze_step if step > var_freeze_step else None,
            last_sync=last_sync,
            interval=interval_at(step),
        )
        assert plan.freeze_variance == (step == var_freeze_step)
        assert (plan.phase is Phase.COMPRESSED) == (step > var_freeze_step)
        fulls += plan.gradient is Wire.FULL
        if plan.momentum is Wire.COMPRESSED:
            syncs, last_sync = syncs + 1, step
    return syncs, fulls


def test_bert_large_with_the_shipped_configuration_sends_half_a_bit_and_skips_half_the_rounds():
    """152,000 steps, var_freeze_step 12500, local_step_scaler 32678, clipper 16; full exchanges in 16 bits."""
    steps, freeze = 152_000, 12_500
    syncs, fulls = planned(
        steps, freeze, lambda step: counted_interval(step, freeze, 32_678, 16) if step > freeze else 1
    )
    assert fulls == 153
    assert (syncs + 16 * fulls) / steps <= 0.51
    assert 1 - syncs / steps >= 0.51


def test_bert_large_with_the_learning_rates_own_schedule_skips_nearly_half_the_rounds():
    """Linear warm-up of 12,500 steps, then x 0.99 every 520."""
    steps, freeze = 152_000, 12_500
    rate = lambda step: step / freeze if step <= freeze else 0.99 ** ((step - freeze) // 520)  # noqa: E731
    syncs, fulls = planned(steps, freeze, lambda step: rate_interval(rate(step), 1.0, 16) if step > freeze else 1)
    assert 1 - syncs / steps == pytest.approx(0.475, abs=0.01)
    assert (syncs + 16 * fulls) / steps < 0.55
