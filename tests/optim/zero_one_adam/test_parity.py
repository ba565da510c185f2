"""0/1 Adam equals the reference in our, the paper's and DeepSpeed's settings, and in each one switched alone.

With parity="deepspeed" it also takes the steps that DeepSpeed 0.19.6 was recorded to take.
"""

from dataclasses import replace
from math import inf

import pytest

from tests.covering import every_value
from tests.optim.reference.deepspeed_traces import load_trace
from tests.optim.reference.parity import (
    BLOCK,
    drive,
    exchange_of,
    floor_in_flat_order,
    in_groups,
    ordered_hypers,
    ordered_start,
    silent_gradients,
)
from tests.optim.small_problem import SIZES
from thinwire.optim import ZeroOneAdam
from thinwire.optim.engine.scales import Scales
from thinwire.optim.engine.schedule import is_variance_step
from thinwire.optim.reference.deepspeed import zero_one_schedule
from thinwire.optim.reference.exchange import mean
from thinwire.optim.reference.papers import ReferenceZeroOneAdam
from thinwire.optim.zero_one_settings import DEEPSPEED, LITERAL, OURS, Decay, Fresh

FREEZE, STEPS = 13, 40  # no variance step in either way of counting
SCHEDULE = {"var_freeze_step": FREEZE, "local_step_scaler": 6, "local_step_clipper": 4}


def rate(step):
    return 1e-2 * min(step, 5) / 5 * (1 - step / 80)


def syncs(settings):
    """The steps with an exchange of the sum, told from the rule and not by its code."""
    if settings.aligned:
        found = zero_one_schedule(STEPS, **SCHEDULE).sync
    else:
        found, last = set(), FREEZE
        for step in range(FREEZE + 1, STEPS + 1):
            if step - last >= min(4, 2 ** ((step - FREEZE - 1) // 6)):
                found.add(step)
                last = step
    return found if settings.gradient_stage else {*found, *range(1, FREEZE + 1)}


def variance_steps(settings, scaler):
    if settings.aligned:
        return zero_one_schedule(STEPS, **SCHEDULE, var_update_scaler=scaler).variance
    return {step for step in range(1, FREEZE + 1) if is_variance_step(step, scaler)}


def switched(exchange, settings, step_now):
    """The exchange of the reference with two choices more: that -u is sent, that errors of gradients are delivered."""
    left = 0.0  # R, by its law: what went in and has not come out

    def exchanged(zs, memory):
        nonlocal left
        if memory == "update":
            return -exchange([-z for z in zs], memory) if settings.negated else exchange(zs, memory)
        out = mean(zs) + left if settings.deliver_errors and step_now() == FREEZE else exchange(zs, memory)
        left = left + mean(zs) - out
        return out

    return exchanged


def reference_of(settings, size, space, parameters, scaler):
    reference = ReferenceZeroOneAdam(
        ordered_start(),
        size,
        ordered_hypers(),
        sync_step=syncs(settings).__contains__,
        variance_step=variance_steps(settings, scaler).__contains__,
        exchange=switched(exchange_of(settings.scales, size, space, parameters), settings, lambda: reference.t),
        eps_outside=settings.eps_outside,
        fresh=settings.fresh,
        bias_correction=settings.bias_correction,
        freeze_at=FREEZE,
        floor=floor_in_flat_order(space, parameters) if settings.floor else None,
        slowest_fall=settings.slowest_fall,
        as_momentum=settings.as_momentum,
        longest_step=settings.longest_step,
        skip_idle=True,
        decay_in_sum=settings.decay is Decay.IN_SUM,
        gradient_stage=FREEZE if settings.gradient_stage else 0,
    )
    return reference


def deviation(got, expected):
    """The largest difference, in units of the value where that is above 1."""
    return max(float(((a - b).abs() / b.abs().clamp(min=1)).max()) for a, b in zip(got, expected, strict=True))


def trained(size, silent, scaler=3, **given):
    """A run of STEPS: what `deviations` compares with references."""
    of = silent_gradients(silent)
    made = {}

    def make(parameters, group):
        optimizer = ZeroOneAdam(
            in_groups(parameters),
            group=group,
            block=BLOCK,
            var_update_scaler=scaler,
            dense_steps=0,
            **SCHEDULE,
            **given,
        )
        if group.rank == 0:
            made["space"], made["parameters"] = optimizer.space, parameters
        return optimizer

    paths, _ = drive(size, ordered_start(), make, lambda step: of(step, size), STEPS, rate)
    return paths, of, lambda described: reference_of(described, size, made["space"], made["parameters"], scaler)


def deviations(run, described):
    """At each step the largest difference from the reference: of x, m and v, on every rank."""
    paths, of, reference_in = run
    reference = reference_in(described)
    for step in range(1, STEPS + 1):
        for hyper in reference.hyper:
            hyper.lr = rate(step)
        reference.step(of(step, len(paths)))
        dues = [(reference.x[rank], reference.m[rank], reference.v) for rank in range(len(paths))]
        pairs = [pair for path, due in zip(paths, dues, strict=True) for pair in zip(path[step], due, strict=True)]
        yield max(deviation(*pair) for pair in pairs)


def worst_deviation(size, described, silent, **given):
    return max(deviations(trained(size, silent, **given), described))


@every_value({"size": SIZES}, only=(0, 3))
def test_our_settings_equal_the_reference_at_every_step(size):
    """With elements that have no gradient until after the freeze."""
    assert worst_deviation(size, OURS, silent=True) < 1e-12


@every_value({"size": SIZES}, only=(1, 3))
def test_the_papers_settings_equal_the_reference_at_every_step(size):
    assert worst_deviation(size, LITERAL, silent=False, settings=LITERAL) < 1e-12


@every_value({"size": SIZES}, only=(0, 2))
def test_deepspeeds_settings_equal_the_reference_at_every_step(size):
    """On one rank too, where DeepSpeed itself leaves gradients out; and with elements of v = 0, which explode."""
    assert worst_deviation(size, DEEPSPEED, silent=True, parity="deepspeed") < 1e-12


SWITCHED = {
    "ours, v updated before use": replace(OURS, fresh=Fresh.ALWAYS),
    "ours, v never updated before use": replace(OURS, fresh=Fresh.NEVER),
    "ours, uncorrected": replace(OURS, bias_correction=False),
    "ours, eps inside the root": replace(OURS, eps_outside=False),
    "ours, no floor": replace(OURS, floor=False),
    "ours, sums are sent": replace(OURS, as_momentum=False, slowest_fall=0.95),
    "ours, steps of any length": replace(OURS, longest_step=inf),
    "ours, shorter steps": replace(OURS, longest_step=1.0),
    "ours, decay in the sum": replace(OURS, decay=Decay.IN_SUM),
    "ours, gradients first": replace(OURS, gradient_stage=True),
    "ours, gradients first, their errors dropped": replace(OURS, gradient_stage=True, deliver_errors=False),
    "ours, aligned": replace(OURS, aligned=True),
    "ours, negated": replace(OURS, negated=True),
    "ours, one scale": replace(OURS, scales=Scales.WHOLE),
    "deepspeed, paper's v": replace(DEEPSPEED, fresh=Fresh.NEVER),
    "deepspeed, corrected": replace(DEEPSPEED, bias_correction=True),
    "deepspeed, eps inside the root": replace(DEEPSPEED, eps_outside=False),
    "deepspeed, floor": replace(DEEPSPEED, floor=True),
    "deepspeed, divisors bounded": replace(DEEPSPEED, slowest_fall=0.95),
    "deepspeed, decay of the sum": replace(DEEPSPEED, decay=Decay.OF_SUM),
    "deepspeed, no gradient stage": replace(DEEPSPEED, gradient_stage=False),
    "deepspeed, errors delivered": replace(DEEPSPEED, deliver_errors=True),
    "deepspeed, not aligned": replace(DEEPSPEED, aligned=False),
    "deepspeed, not negated": replace(DEEPSPEED, decay=Decay.OF_SUM, negated=False),
    "deepspeed, scale a group": replace(DEEPSPEED, scales=Scales.GROUP),
}


@every_value({"name": SWITCHED}, only=(2, 5, 8, 13, 17, 20, 22))
def test_each_difference_can_be_switched_alone_and_is_one(name):
    """The run equals the reference with the same switch, and not the one without it."""
    settings, unswitched = SWITCHED[name], OURS if name.startswith("ours") else DEEPSPEED
    given = {"settings": settings, "silent": settings.floor}
    if name == "deepspeed, not negated":  # seen where a sum is 0: no decay in it, no gradient exchanged in one bit
        unswitched = replace(DEEPSPEED, decay=Decay.OF_SUM)
        given |= {"silent": True, "scaler": 20}
    run = trained(3, **given)
    assert max(deviations(run, settings)) < 1e-12
    assert any(differs > 1e-6 for differs in deviations(run, unswitched))


@every_value({"size": [2, 3, 4]}, only=(1,))
def test_parity_takes_the_steps_that_deepspeed_was_recorded_to_take(size):
    trace = load_trace("zero_one_adam", size)
    paths, _ = drive(
        size,
        trace.start,
        lambda parameters, group: ZeroOneAdam(
            trace.param_groups(parameters), group=group, parity="deepspeed", **trace.settings
        ),
        trace.gradients.__getitem__,
        trace.steps,
        trace.lrs.__getitem__,
    )
    for step in trace.recorded:
        for rank, path in enumerate(paths):
            theirs = trace.x[step][rank], trace.m[step][rank], trace.v[step][rank]
            assert max(deviation(*pair) for pair in zip(path[step], theirs, strict=True)) < 1e-9


def test_parity_and_settings_exclude_each_other():
    with pytest.raises(ValueError, match="give one of them"):
        ZeroOneAdam([], parity="deepspeed", settings=OURS)
    with pytest.raises(ValueError, match="parity = 'apex'"):
        ZeroOneAdam([], parity="apex")
