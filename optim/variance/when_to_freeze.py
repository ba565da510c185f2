"""When the variance is frozen: by what it shows itself, or where the learning rate's warm-up ends.

1-bit Adam and 1-bit LAMB, the automatic end of warm-up, with its evidence (VarianceStability):

    N_t = || v_t / (1 - beta2^t) ||_1           the bias-corrected norm, over all tensors
    r_t = min(N_t, N_{t-W}) / max(N_t, N_{t-W})
    freeze when r_t >= 0.96 in PASSES tests in a row, tested from lr_warmup_end + W on

The rule of Tang et al. 2021 (sec. 7.1) with three amendments: the corrected norm, for the raw one moves by more than
4 % for 3.8 / (1 - beta2) steps even under stationary gradients; the ratio both ways, for the norm may also rise; and,
where the length of the run is known, a window that fits into it and a cap. Reasons and measurements:
docs/algorithms.md.

Where the length of the run is known, it ends between these steps, T being that length, M = 1 / (1 - beta2):

    earliest    T / 10, or min(part T, M) where that is more
    latest      T / 5, or min(part T, M) where that is more

So in a long run v has seen as many steps as it remembers. In a short one it never can, and the fewer bits a full
exchange has, the longer it may go on: part (WARMUP_PART) is 0.2 in fp32, 0.4 in bf16, 0.6 in 8 bits, and 0.7 there in
1-bit LAMB, whose trust ratios are frozen with v (LAMB_WARMUP_PART).

0/1 Adam (VarianceFreeze):

    var_freeze_step given        after it
    lr_warmup_steps given        after it, but not before step 10 (or a fifth of the run, where that is shorter)
    neither                      once no group's rate has risen for W steps; after the latest step above at the latest
    in both                      not before the end of the dense start (or that latest step)

The dense start of 0/1 Adam: M steps, or up to the latest step above where that is fewer, at least 10.

W is the same in both: total_steps / 20, at least 10, at most 1 / (1 - beta2), which it also is where total_steps is not
known; then there is no latest step either. The variance of 0/1 Adam itself is not asked: it is updated at so few steps
that a test of it would have to wait for most of the run.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import SupportsFloat

from thinwire.comm.wire.network import FullWire
from thinwire.contract.hyperparameters import LR_WARMUP_STEPS, TOTAL_STEPS, VAR_FREEZE_STEP

logger = logging.getLogger(__name__)

STABLE_RATIO = 0.96
PASSES = 5
"""Tests in a row that must hold: one alone may be a turning point."""
EARLIEST_FRACTION = 0.10
LATEST_FRACTION = 0.20
"""Of the run, where its length is known. Beyond it warm-up costs more bytes than it saves in loss."""
WARMUP_PART: dict[FullWire, float] = {"fp32": LATEST_FRACTION, "bf16": 0.4, "int8": 0.6}
"""Of a run that is shorter than what v remembers: no more bytes than a fifth of it has in fp32, and 0.6 at most."""
LAMB_WARMUP_PART: dict[FullWire, float] = {**WARMUP_PART, "int8": 0.7}
"""The same for 1-bit LAMB. At 0.6 it ended above LAMB where gradients grow late (docs/algorithms.md)."""
SHOWN = 200
"""Ratios kept as evidence; older ones are thinned out, every second one."""
FEWEST_STEPS = 10
"""Before them the variance of 0/1 Adam is of a handful of gradients; only var_freeze_step asks for that."""


class FrozenBy(StrEnum):
    """Why the variance was frozen: the step was given, or the end of the rate's warm-up; the rule, or its cap."""

    GIVEN = "given"
    LR_WARMUP = "lr_warmup"
    RULE = "rule"
    CAP = "cap"


@dataclass(slots=True)
class VarianceStability:
    """The rule over one run. All its fields are plain values, saved with the optimizer.

    total_steps, lr_warmup_steps: of the run, where known. Without total_steps there is no cap and the window is
    1 / (1 - beta2); without lr_warmup_steps the warm-up of the rate ends at the last step at which a rate rose.
    """

    beta2: float
    total_steps: int | None = None
    lr_warmup_steps: int | None = None
    norms: list[SupportsFloat] = field(default_factory=list)
    """N_t of the last W + 1 steps, newest last: as they were given, until somebody asks what they are."""
    passes: int = 0
    last_lrs: list[float] = field(default_factory=list)
    lr_rose_at: int = 0
    evidence: list[tuple[int, float]] = field(default_factory=list)
    """(step, r) of the tests so far, thinned."""
    stride: int = 1
    """Every so many tests one is kept as evidence."""
    start: int = 0
    """The step after which this warm-up began: all is counted from there, and what is left of the run is its length."""
    part: float = LATEST_FRACTION
    """Of a short run that the warm-up may take; a run that was saved without one goes on with that of fp32."""

    @property
    def window(self) -> int:
        """W, in steps."""
        longest, left = memory_steps(self.beta2), self.steps_left
        return longest if left is None else min(max(left // 20, 10), longest)

    @property
    def steps_left(self) -> int | None:
        """Steps from the start of this warm-up to the end of the run, where that is known."""
        return None if self.total_steps is None else max(self.total_steps - self.start, 0)

    @property
    def earliest_end(self) -> int:
        """The first step after which the warm-up may end, if the rate does not rise beyond what is known."""
        first_test = max(self.start + 1, self.lr_warmup_end) + self.window
        end = first_test + PASSES - 1
        return min(max(end, self.start + self._fewest), self.latest_end or end)

    @property
    def latest_end(self) -> int | None:
        """The step after which the warm-up ends at the latest; None where the length of the run is not known."""
        left = self.steps_left
        return None if left is None else self.start + _most(left, self.beta2, self.part)

    def restarted(self, start: int) -> VarianceStability:
        """The rule for a warm-up that begins anew after step `start`: without norms, with the evidence so far."""
        return replace(self, start=start, norms=[], passes=0)

    @property
    def lr_warmup_end(self) -> int:
        """The step at which the warm-up of the learning rate ends, as far as is known."""
        return self.lr_rose_at if self.lr_warmup_steps is None else self.lr_warmup_steps

    def observe(self, step: int, norm: SupportsFloat, lrs: list[float]) -> FrozenBy | None:
        """Take N_t of step `step` (from 1) and the groups' rates; the reason to freeze after it, or None.

        The same on every rank, for v and the rates are. norm: may be on a device; it is read in steps that test only,
        so that no step before them waits for it. Modifies the fields.
        """
        self.note(step, norm, lrs)
        tests = step >= max(self.lr_warmup_end, self.start) + self.window
        ratio = self._ratio() if tests else None
        if ratio is not None:
            self.passes = self.passes + 1 if ratio >= STABLE_RATIO else 0
            self._keep(step, ratio)
        else:
            self.passes = 0
        latest = self.latest_end
        if latest is not None and step >= latest:
            return FrozenBy.RULE if self._may_freeze(step) else FrozenBy.CAP
        return FrozenBy.RULE if self._may_freeze(step) else None

    def note(self, step: int, norm: SupportsFloat, lrs: list[float]) -> None:
        """Take them as observe() does, in a step that does not ask. Modifies the fields."""
        if rose(lrs, self.last_lrs or [0.0] * len(lrs)):
            self.lr_rose_at = step
        self.last_lrs = list(lrs)
        self.norms.append(norm)
        del self.norms[: -(self.window + 1)]

    def read_norms(self) -> list[float]:
        """The norms, which are numbers in the field from now on. Waits for the device where they are there."""
        norms = list(map(float, self.norms))
        self.norms = [*norms]
        return norms

    def _may_freeze(self, step: int) -> bool:
        return self.passes >= PASSES and step >= max(self.lr_warmup_end, self.start + self._fewest)

    @property
    def _fewest(self) -> int:
        """Steps of this warm-up before which the rule does not end it."""
        left = self.steps_left
        if left is None:
            return 0
        return max(round(EARLIEST_FRACTION * left), min(round(self.part * left), memory_steps(self.beta2)))

    def _ratio(self) -> float | None:
        if len(self.norms) <= self.window:
            return None
        norms = self.read_norms()
        old, new = norms[0], norms[-1]
        return min(old, new) / max(old, new) if max(old, new) > 0 else None

    def _keep(self, step: int, ratio: float) -> None:
        if step % self.stride == 0:
            self.evidence.append((step, ratio))
        if len(self.evidence) > SHOWN:
            self.stride *= 2
            self.evidence = [(s, r) for s, r in self.evidence if s % self.stride == 0]


def memory_steps(beta2: float) -> int:
    """Steps that a variance remembers: 1 / (1 - beta2), at least 1."""
    return max(1, round(1 / (1 - beta2)))


def _most(steps: int, beta2: float, part: float) -> int:
    """The longest warm-up of a run of so many steps."""
    return max(1, round(LATEST_FRACTION * steps), min(round(part * steps), memory_steps(beta2)))


@dataclass(frozen=True, slots=True)
class VarianceFreeze:
    """The rule for one run. Raises: ValueError for numbers that contradict each other."""

    beta2: float
    var_freeze_step: int | None = None
    total_steps: int | None = None
    lr_warmup_steps: int | None = None
    part: float = LATEST_FRACTION
    """Of a short run that the dense start may take."""

    def __post_init__(self) -> None:
        """Refuse a freeze that never comes."""
        TOTAL_STEPS.check(self.total_steps)
        for number, value in ((VAR_FREEZE_STEP, self.var_freeze_step), (LR_WARMUP_STEPS, self.lr_warmup_steps)):
            number.check(value)
            if value is not None and self.total_steps is not None and value >= self.total_steps:
                raise ValueError(
                    f"{number.name} = {value}: must be less than total_steps = {self.total_steps}, or the variance is "
                    "never frozen and no round skipped"
                )

    @property
    def window(self) -> int:
        """W, in steps."""
        return VarianceStability(self.beta2, self.total_steps).window

    @property
    def dense_steps(self) -> int:
        """Steps of Adam at the beginning of 0/1 Adam: as many as v remembers, or a part of the run."""
        longest, latest = memory_steps(self.beta2), self._latest
        return longest if latest is None else min(max(latest, FEWEST_STEPS), longest)

    @property
    def _latest(self) -> int | None:
        return None if self.total_steps is None else _most(self.total_steps, self.beta2, self.part)

    def reason(self, step: int, lr_rose_at: int, dense_until: int) -> FrozenBy | None:
        """Why to freeze after `step` (from 1), or None.

        lr_rose_at: the last step, up to this one, at which the rate rose. dense_until: the last of the dense start.
        """
        if self.var_freeze_step is not None:
            return FrozenBy.GIVEN if step >= self.var_freeze_step else None
        latest = self._latest
        if step < (dense_until if latest is None else min(dense_until, latest)):
            return None
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

    def logged_reason(self, step: int, lr_rose_at: int, dense_until: int, variance_updates: int) -> FrozenBy | None:
        """Say in the log why the variance is frozen after `step`, and return it; None where the step was given."""
        reason = self.reason(step, lr_rose_at, dense_until)
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
