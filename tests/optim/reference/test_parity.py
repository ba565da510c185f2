"""1-bit Adam, LAMB and 1-bit LAMB take the steps of the reference in our settings; that takes DeepSpeed's in theirs."""

import pytest

from tests.covering import every_value
from tests.optim.constructing import construct
from tests.optim.reference.parity import BLOCK, WARMUP, follow
from tests.optim.small_problem import SIZES
from tests.reference.papers import ReferenceLamb, ReferenceOneBitAdam, ReferenceOneBitLamb
from thinwire.optim import Lamb, OneBitAdam, OneBitLamb, onebit_lamb

TRUST = {"max_coeff": 0.5, "min_coeff": 0.01}
BOUNDS = {**TRUST, "coeff_beta": 0.9, "factor_threshold": 0.05}
LAMB = {**BOUNDS, "ratio_without_floored": True, "weigh_ratio": True}


def falling(group, step):
    """The rate of each group, from step to step."""
    return 1e-2 / (1 + 4 * group) * 0.98**step


@pytest.mark.few(1)
@every_value({"size": SIZES, "lrs": [None, falling]}, only=(0, 2, 3))
@pytest.mark.law
def test_onebit_adam_equals_the_reference_in_float64(size, lrs):
    worst, optimizer, _ = follow(
        size,
        lambda groups, group: construct(OneBitAdam, groups, warmup=WARMUP, group=group, block=BLOCK),
        lambda x, hypers, shared: ReferenceOneBitAdam(x, hypers, **shared),
        lrs,
    )
    assert worst <= 1e-12
    assert optimizer.stats()["floored_elements"] > 0


@every_value({"size": SIZES}, only=(0, 3))
def test_lamb_equals_the_reference_in_float64(size):
    worst, _, _ = follow(
        size,
        lambda groups, group: construct(Lamb, groups, group=group, **TRUST),
        lambda x, hypers, _: ReferenceLamb(x, hypers, **TRUST),
    )
    assert worst <= 1e-12


@every_value({"size": SIZES, "longest": [onebit_lamb.LONGEST_STEP, 0.5]}, only=(0, 2))
@pytest.mark.law
def test_onebit_lamb_equals_the_reference_in_float64(size, longest, monkeypatch):
    monkeypatch.setattr(onebit_lamb, "LONGEST_STEP", longest)
    worst, optimizer, reference = follow(
        size,
        lambda groups, group: construct(OneBitLamb, groups, warmup=WARMUP, group=group, block=BLOCK, **BOUNDS),
        lambda x, hypers, shared: ReferenceOneBitLamb(x, hypers, **shared, **LAMB, longest_step=longest),
    )
    assert worst <= 1e-12
    assert optimizer.stats()["floored_elements"] > 0
    order = [tensor.param.shape for tensor in optimizer.space.tensors]
    index = [[x.shape for x in reference.x].index(shape) for shape in order]
    for ours, theirs in (("coeff_T", reference.c_avg), ("factor_T", reference.r), ("scaling_T", reference.k)):
        got = getattr(optimizer.vectors, ours)
        assert got.tolist() == pytest.approx([theirs[at] for at in index], rel=1e-11), ours
