"""The statistics: the mean of paired differences with its Student t interval, and what the study's rule says of it.

With d_1 .. d_n the differences of n seeds, s their standard deviation (n - 1), the 95 % interval of their mean is

    mean(d) +- t s / sqrt(n),   t the 97.5 % quantile of Student's t with n - 1 degrees of freedom

Pairing removes what both sides of a seed share: initial values and data. Differences of one seed are taken as
independent of those of another and near enough to normal; a dozen seeds cannot test that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import exp, inf, lgamma, log, log1p, sqrt
from statistics import fmean, stdev

CONFIDENCE = 0.95
MARGIN = 1.0
"""How much worse still counts as the same: per cent of the loss, or points of accuracy. Fixed before measuring."""


class Verdict(StrEnum):
    """What the rule says of a pair."""

    SAME = "same"
    """The interval ends at or below +MARGIN and is no wider than MARGIN to each side."""
    WORSE = "worse"
    """Not the same, and the whole interval lies on the worse side of zero."""
    UNDECIDED = "undecided"
    """Neither: more seeds are needed."""
    DIVERGED = "diverged"
    """A compressed run ended in values that are not finite where its baseline did not."""


@dataclass(frozen=True, slots=True)
class Interval:
    """mean +- half of n values; half is infinite for n < 2."""

    mean: float
    half: float
    n: int

    @property
    def low(self) -> float:
        """The lower end."""
        return self.mean - self.half

    @property
    def high(self) -> float:
        """The upper end."""
        return self.mean + self.half

    def scaled(self, factor: float) -> Interval:
        """The interval in another unit; a negative factor turns it round."""
        return Interval(self.mean * factor, abs(factor) * self.half if self.half != inf else inf, self.n)


def interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """The t interval of the mean of `values`. Raises: ValueError for none."""
    if not values:
        raise ValueError("no values: an interval needs at least one")
    if len(values) == 1:
        return Interval(values[0], inf, 1)
    t = t_quantile(0.5 + confidence / 2, len(values) - 1)
    return Interval(fmean(values), t * stdev(values) / sqrt(len(values)), len(values))


def judge(worse_by: Interval, margin: float = MARGIN) -> Verdict:
    """worse_by: how much worse the compressed side is, in the unit of `margin`; negative where it is better."""
    if worse_by.high <= margin and worse_by.half <= margin:
        return Verdict.SAME
    return Verdict.WORSE if worse_by.low > 0 else Verdict.UNDECIDED


def t_quantile(p: float, degrees: int) -> float:
    """The p-quantile of Student's t, by bisection of its distribution, to 1e-9. Raises: ValueError out of range."""
    if not 0.5 <= p < 1 or degrees < 1:
        raise ValueError(f"p = {p}, degrees = {degrees}: p must be in [0.5, 1), degrees at least 1")
    low, high = 0.0, 1.0
    while _t_distribution(high, degrees) < p:
        high *= 2
    while high - low > 1e-10 * max(1.0, high):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_distribution(middle, degrees) < p else (low, middle)
    return (low + high) / 2


def _t_distribution(t: float, degrees: int) -> float:
    """P(T <= t) for t >= 0 = 1 - I_x(degrees/2, 1/2) / 2 with x = degrees / (degrees + t^2)."""
    return 1 - _incomplete_beta(degrees / (degrees + t * t), degrees / 2, 0.5) / 2


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """The regularised I_x(a, b), by its continued fraction, on the side where that converges fast."""
    if x <= 0 or x >= 1:
        return min(max(x, 0.0), 1.0)
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(1 - x, b, a)
    front = exp(lgamma(a + b) - lgamma(a) - lgamma(b) + a * log(x) + b * log1p(-x))
    return front * _beta_fraction(x, a, b) / a


def _beta_fraction(x: float, a: float, b: float) -> float:
    """The continued fraction of I_x, by the modified method of Lentz.  [Abramowitz and Stegun, 26.5.8]"""
    tiny = 1e-300
    d = 1 / ((1 - (a + b) * x / (a + 1)) or tiny)
    c, value = 1.0, d
    for m in range(1, 300):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1 / ((1 + term * d) or tiny)
            c = (1 + term / c) or tiny
            value *= d * c
        if abs(d * c - 1) < 1e-15:
            break
    return value
