"""0/1 Adam takes the steps of the reference in our settings; the reference takes DeepSpeed's in theirs."""

from math import inf

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
    silent_gradients,
)
from tests.optim.small_problem import SIZES
from tests.reference.papers import Fresh, ReferenceZeroOneAdam
from thinwire.optim import ZeroOneAdam
from thinwire.optim.engine.schedule import is_variance_step

FREEZE, STEPS, SCALER = 13, 40, 3  # no variance step
SCHEDULE = {"local_step_scaler": 6, "local_step_clipper": 4}


def rate(step):
    return 1e-2 * min(step, 5) / 5 * (1 - step / 80)


def syncs():
    """The steps with an exchange of the sum, told from the rule and not by its code."""
    found, last = set(range(1, FREEZE + 1)), FREEZE
    for step in range(FREEZE + 1, STEPS + 1):
        if step - last >= min(4, 2 ** ((step - FREEZE - 1) // 6)):
            found.add(step)
            last = step
    return found


def reference_of(size, space, parameters, longest):
    return ReferenceZeroOneAdam(
        ordered_start(),
        size,
        ordered_hypers(),
        sync_step=syncs().__contains__,
        variance_step=lambda step: step <= FREEZE and is_variance_step(step, SCALER),
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


@every_value({"size": SIZES, "longest": (ZeroOneAdam.longest_step, 1.0, inf)}, only=(0, 3))
def test_it_equals_the_reference_at_every_step(size, longest):
    """With elements that have no gradient until after the freeze: x, m and v, on every rank."""
    of, made = silent_gradients(silent=True), {}

    def make(parameters, group):
        options = {"var_update_scaler": SCALER, "var_freeze_step": FREEZE, "dense_steps": 0, **SCHEDULE}
        optimizer = construct(ZeroOneAdam, in_groups(parameters), group=group, block=BLOCK, **options)
        optimizer.longest_step = longest
        if group.rank == 0:
            made["space"], made["parameters"] = optimizer.space, parameters
        return optimizer

    paths, _ = drive(size, ordered_start(), make, lambda step: of(step, size), STEPS, rate)
    reference = reference_of(size, made["space"], made["parameters"], longest)
    for step in range(1, STEPS + 1):
        for hyper in reference.hyper:
            hyper.lr = rate(step)
        reference.step(of(step, size))
        for rank, path in enumerate(paths):
            for pair in zip(path[step], (reference.x[rank], reference.m[rank], reference.v), strict=True):
                assert deviation(*pair) < 1e-12
