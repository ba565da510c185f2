"""benchmarks.defaults: a task has the dense method's best rate, between worse ones; and what is told of a pair."""

from math import log2

import pytest

from benchmarks.convergence.paired import Interval
from benchmarks.defaults.__main__ import PILOT_RATES, next_rate
from benchmarks.defaults.table import _verdict


def piloted(loss):
    """Rates to losses, as the pilot has tried them."""
    tried = {}
    while lr := next_rate(PILOT_RATES["adam"], tried):
        assert lr not in tried
        tried[lr] = loss(lr)
    return tried


@pytest.mark.parametrize("optimum", [1e-3, 4.1e-3, 1.4e-2, 0.0227, 0.3])
def test_the_best_rate_is_found_wherever_it_is_and_lies_between_worse_ones(optimum):
    tried = piloted(lambda lr: log2(lr / optimum) ** 2)
    best = min(tried, key=tried.__getitem__)
    assert abs(log2(best / optimum)) < 0.26
    octaves = [log2(lr / best) for lr in tried if lr != best]
    assert min(x for x in octaves if x > 0) == pytest.approx(0.5, abs=0.01)
    assert max(x for x in octaves if x < 0) == pytest.approx(-0.5, abs=0.01)


def test_rates_that_diverge_are_worse_than_any():
    assert min(piloted(lambda lr: float("inf") if lr > 5e-3 else -lr)) < 4e-3


@pytest.mark.parametrize(
    ("mean", "half", "verdict"),
    [(0.5, 0.4, "same"), (-0.5, 0.4, "same"), (0.9, 0.4, "worse"), (0.9, 1.4, "undecided"), (-3.0, 2.0, "better")],
)
def test_a_wide_interval_on_the_better_side_is_better_and_all_else_is_the_studys_rule(mean, half, verdict):
    assert _verdict(Interval(mean, half, 5)) == verdict
