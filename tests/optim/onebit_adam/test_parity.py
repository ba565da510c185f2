"""1-bit Adam takes the steps of the reference in our settings; the reference takes DeepSpeed's in theirs."""

from tests.covering import every_value
from tests.optim.constructing import construct
from tests.optim.reference.parity import BLOCK, WARMUP, follow
from tests.optim.small_problem import SIZES
from tests.reference.papers import ReferenceOneBitAdam
from thinwire.optim import OneBitAdam


@every_value({"size": SIZES}, only=(0, 2))
def test_it_equals_the_reference_in_float64(size):
    worst, optimizer, _ = follow(
        size,
        lambda groups, group: construct(OneBitAdam, groups, warmup=WARMUP, group=group, block=BLOCK),
        lambda x, hypers, shared: ReferenceOneBitAdam(x, hypers, **shared),
    )
    assert worst <= 1e-12
    assert optimizer.stats()["floored_elements"] > 0
