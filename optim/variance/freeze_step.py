"""When does 0/1 Adam freeze its variance? At a given step, or at the end of the learning rate's warm-up.

    var_freeze_step given        after it
    lr_warmup_steps given        after it, but not before step 10 (or a quarter of the run, where that is shorter)
    neither                      once no group's rate has risen for W steps; after a quarter of the run at the latest

W is that of the automatic rule of 1-bit Adam: total_steps / 20, at least 10, at most 1 / (1 - beta2), which it also is
where total_steps is not known; then there is no latest step either. The variance itself is not asked: it is updated at
so few steps that a test of it would have to wait for most of the run.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from thinwire.optim.variance.stability import LATEST_FRACTION, VarianceStability, memory_steps

logger = logging.getLogger(__name__)

FEWEST_STEPS = 10
"""Before them the variance is of a handful of gradients; only var_freeze_step asks for that."""


class FrozenBy(StrEnum):
    """Why the variance was frozen."""

    GIVEN = "given"
    LR_WARMUP = "lr_warmup"
    RULE = "rule"
    CAP = "cap"


@dataclass(frozen=True, slots=True)
class VarianceFreeze:
    """The rule for one run. Raises: ValueError for numbers that contradict each other."""

    beta2: float
    var_freeze_step: int | None = None
    total_steps: int | None = None
    lr_warmup_steps: int | None = None

    def __post_init__(self) -> None:
        """Refuse a freeze that never comes."""
        for name, value, least in (
            ("var_freeze_step", self.var_freeze_step, 1),
            ("total_steps", self.total_steps, 1),
            ("lr_warmup_steps", self.lr_warmup_steps, 0),
        ):
            if value is None:
                continue
            if type(value) is not int or value < least:
                raise ValueError(f"{name} = {value!r}: must be a whole number, at least {least}, or None")
            if name != "total_steps" and self.total_steps is not None and value >= self.total_steps:
                raise ValueError(
                    f"{name} = {value}: must be less than total_steps = {self.total_steps}, or the variance is never "
                    "frozen and no round skipped"
                )

    @property
    def window(self) -> int:
        """W, in steps."""
        return VarianceStability(self.beta2, self.total_steps).window

    def reason(self, step: int, lr_rose_at: int) -> FrozenBy | None:
        """Why to freeze after `step` (from 1), or None. lr_rose_at: the last step, up to this one, at which it rose."""
        if self.var_freeze_step is not None:
            return FrozenBy.GIVEN if step >= self.var_freeze_step else None
        latest = None if self.total_steps is None else max(1, round(LATEST_FRACTION * self.total_steps))
        if self.lr_warmup_steps is not None:
            earliest = FEWEST_STEPS if latest is None else min(FEWEST_STEPS, latest)
            return FrozenBy.LR_WARMUP if step >= max(self.lr_warmup_steps, earliest) else None
        if step >= lr_rose_at + self.window:
            return FrozenBy.RULE
        return FrozenBy.CAP if latest is not None and step >= latest else None

    def second_end(self, start: int) -> int:
        """The last step of a second warm-up that begins after step `start`: W of what is left of the run later.

        Where var_freeze_step is given, after as many steps as that, but no more than v remembers, 1 / (1 - beta2).
        """
        if self.var_freeze_step is not None:
            return start + max(FEWEST_STEPS, min(self.var_freeze_step, memory_steps(self.beta2)))
        left = None if self.total_steps is None else max(self.total_steps - start, 1)
        return start + VarianceStability(self.beta2, left).window

    def told(self, step: int, lr_rose_at: int, variance_updates: int) -> FrozenBy | None:
        """Say in the log why the variance is frozen after `step`, and return it; None where the step was given."""
        reason = self.reason(step, lr_rose_at)
        if reason in (None, FrozenBy.GIVEN):
            return None
        logger.log(
            logging.WARNING if reason is FrozenBy.CAP else logging.INFO,
            "warmup_ended step=%d by=%s lr_rose_at=%d window=%d variance_updates=%d",
            step,
            reason,
            lr_rose_at,
            self.window,
            variance_updates,
        )
        return reason


def rose(rates: Sequence[float], before: Sequence[float]) -> bool:
    """Has a group's rate risen? Before the first step all were 0."""
    return any(now > old for now, old in zip(rates, before, strict=True))
