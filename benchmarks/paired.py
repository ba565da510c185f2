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
from math import inf, sqrt
from statistics import fmean, stdev

T_QUANTILES = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
)
"""The 97.5 % quantile of Student's t, by degrees of freedom from 1; of more than 20 the last is taken."""
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


def interval(values: Sequence[float]) -> Interval:
    """The 95 % t interval of the mean of `values`. Raises: ValueError for none."""
    if not values:
        raise ValueError("no values: an interval needs at least one")
    if len(values) == 1:
        return Interval(values[0], inf, 1)
    t = T_QUANTILES[min(len(values) - 1, len(T_QUANTILES)) - 1]
    return Interval(fmean(values), t * stdev(values) / sqrt(len(values)), len(values))


def judge(worse_by: Interval, margin: float = MARGIN) -> Verdict:
    """worse_by: how much worse the compressed side is, in the unit of `margin`; negative where it is better."""
    if worse_by.high <= margin and worse_by.half <= margin:
        return Verdict.SAME
    return Verdict.WORSE if worse_by.low > 0 else Verdict.UNDECIDED
