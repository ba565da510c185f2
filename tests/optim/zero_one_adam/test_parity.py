"""0/1 Adam takes the steps of the reference in our settings; the reference takes DeepSpeed's in theirs."""

from math import inf

import pytest

from tests.covering import every_value
from tests.optim.constructing import construct
from tests.optim.reference.parity import (
    BLOCK,
    drive,
    exchange_of,
    floor_in_flat_order,
    in_groups,
    ordered_hypers,
    ordered_start,
    set_rates,
    silent_gradients,
)
from tests.optim.small_problem import SIZES
from tests.reference.papers import Fresh, ReferenceZeroOneAdam
from thinwire.optim import ZeroOneAdam
from thinwire.optim.engine.schedule import is_variance_step

FREEZE, STEPS, SCALER = 13, 40, 3  # no variance step
SCHEDULE = {"local_step_scaler": 6, "local_step_clipper": 4}


def rate(group, step):
    """It rises and falls, and is 0 for part of a round, for a whole one, in one group only."""
    idle = step in (8, 20, 28, *range(31, 35)) or (group == 1 and step in range(35, 39))
    return 0.0 if idle else 1e-2 * min(step, 5) / 5 * (1 - step / 80) / (1 + group)


def syncs():
    """The steps with an exchange of the sum, told from the rule and not by its code."""
    found, last = set(range(1, FREEZE + 1)), FREEZE
    for step in range(FREEZE + 1, STEPS + 1):
        if step - last >= min(4, 2 ** ((step - FREEZE - 1) // 6)):
            found.add(step)
            last = step
    return found


def reference_of(size, space, parameters, longest, dense):
    return ReferenceZeroOneAdam(
        ordered_start(),
        size,
        ordered_hypers(),
        sync_step=syncs().__contains__,
        variance_step=lambda step: dense < step <= FREEZE and is_variance_step(step - dense, SCALER),
        dense_steps=dense,
        exchange=exchange_of(size, space, parameters),
        eps_outside=True,
        fresh=Fresh.AT_FIRST,
        bias_correction=True,
        freeze_at=FREEZE,
        floor=floor_in_flat_order(space, parameters),
        as_momentum=True,
        longest_step=longest,
        skip_idle=True,
    )


def deviation(got, expected):
    """The largest difference, in units of the value where that is above 1."""
    return max(float(((a - b).abs() / b.abs().clamp(min=1)).max()) for a, b in zip(got, expected, strict=True))


@pytest.mark.few(1)
@every_value(
    {"size": SIZES, "longest": (ZeroOneAdam.longest_step, 1.0, inf), "dense": (0, 3, FREEZE + 1, 0)}, only=(1, 2, 3)
)
@pytest.mark.law
def test_it_equals_the_reference_at_every_step(size, longest, dense):
    """With elements that have no gradient until after the freeze: x, m and v, on every rank."""
    of, made = silent_gradients(silent=True), {}

    def make(parameters, group):
        options = {"var_update_scaler": SCALER, "var_freeze_step": FREEZE, "dense_steps": dense, **SCHEDULE}
        optimizer = construct(ZeroOneAdam, in_groups(parameters), group=group, block=BLOCK, **options)
        optimizer.longest_step = longest
        if group.rank == 0:
            made["space"], made["parameters"] = optimizer.space, parameters
        return optimizer

    paths, _ = drive(size, ordered_start(), make, lambda step: of(step, size), STEPS, rate)
    reference = reference_of(size, made["space"], made["parameters"], longest, dense)
    for step in range(1, STEPS + 1):
        set_rates(reference, rate, step)
        reference.step(of(step, size))
        for rank, path in enumerate(paths):
            for pair in zip(path[step], (reference.x[rank], reference.m[rank], reference.v), strict=True):
                assert deviation(*pair) < 1e-12
