"""Which rate a method has in a workload: the best of those that were tried with the first seed, found by climbing."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, isfinite, log

FACTOR = 2.0
"""From one rate to the next."""
WIDEST = 16.0
"""As far as a search goes, either way, from the script's own rate."""


def best(tried: Mapping[float, float], *, higher_is_better: bool) -> float:
    """Of rates, as times the script's own, that whose score is best; of equals the nearest to 1.

    Of scores that are not finite none is better than another. Raises: ValueError for nothing tried.
    """
    return max(tried, key=lambda times: (_worth(tried[times], higher_is_better), -abs(log(times))))


def following(tried: Mapping[float, float], *, higher_is_better: bool) -> float | None:
    """The next rate to try; None where the best one stands between two that are worse, or at the end of the range."""
    if 1.0 not in tried:
        return 1.0
    top = best(tried, higher_is_better=higher_is_better)
    beside = (top * FACTOR, top / FACTOR)
    return next((one for one in beside if one not in tried and 1 / WIDEST <= one <= WIDEST), None)


def _worth(score: float, higher_is_better: bool) -> float:
    return (score if higher_is_better else -score) if isfinite(score) else -inf
