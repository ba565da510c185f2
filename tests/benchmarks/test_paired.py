"""The statistics of paired runs."""

from math import inf, isclose

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.paired import Interval, Verdict, interval, judge


def test_the_interval_of_a_textbook_sample():
    """Sleep data of Student 1908: ten paired differences, mean 1.58, 95 % interval 0.70 to 2.46."""
    found = interval([1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4])
    assert (found.mean, found.low, found.high) == pytest.approx((1.58, 0.70, 2.46), abs=5e-3)


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=12), st.floats(-10, 10))
def test_the_same_offset_on_every_seed_moves_the_interval_and_does_not_widen_it(values, offset):
    one, moved = interval(values), interval([value + offset for value in values])
    assert isclose(moved.mean, one.mean + offset, abs_tol=1e-9)
    assert isclose(moved.half, one.half, abs_tol=1e-8)


def test_one_seed_decides_nothing_unless_nothing_can_be_said():
    assert interval([-3.0]).half == inf
    assert judge(interval([-3.0])) is Verdict.UNDECIDED
    with pytest.raises(ValueError, match="no values"):
        interval([])


@pytest.mark.parametrize(
    ("mean", "half", "verdict"),
    [
        (0.0, 0.5, Verdict.SAME),
        (0.5, 0.5, Verdict.SAME),  # ends at +1 %
        (0.8, 0.1, Verdict.SAME),  # worse for certain, and by less than 1 %
        (-3.0, 1.0, Verdict.SAME),  # better is allowed
        (-3.0, 1.1, Verdict.UNDECIDED),  # better, and known too roughly
        (0.6, 0.5, Verdict.WORSE),
        (2.0, 0.1, Verdict.WORSE),
        (0.6, 0.9, Verdict.UNDECIDED),
        (0.0, 1.5, Verdict.UNDECIDED),
    ],
)
def test_the_rule(mean, half, verdict):
    assert judge(Interval(mean, half, 8)) is verdict


def test_turning_an_interval_round_keeps_its_width():
    turned = Interval(0.5, 0.2, 8).scaled(-100)
    assert (turned.low, turned.high, turned.half) == pytest.approx((-70, -30, 20))
