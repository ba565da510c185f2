"""What a step does, as data: a frozen plan, computed from the settings and what a checkpoint holds.

That of 0/1 Adam depends on the learning rates too. There are no phase flags anywhere. With warmup="auto" the freeze is
in no plan: see variance/freezing.py, update().
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import floor, inf, log2

from thinwire.contract.hyperparameters import (
    DENSE_STEPS,
    LOCAL_STEP_CLIPPER,
    LOCAL_STEP_SCALER,
    VAR_UPDATE_SCALER,
    ZERO_ONE_SCHEDULE,
)

LONGEST_INTERVAL = 16
"""Steps between two syncs of 0/1 Adam.  [Lu et al. 2022, sec. 6]"""
AHEAD = 1e-3
"""Of a doubling: how early the interval doubles, at peak / 2^k times 1.0007. Schedules come to rest at peak / 2^k
(StepLR, the middle of a cosine), rounded to one side or the other, and a rate in float32 may be 6e-8 of it away."""


class Wire(StrEnum):
    """How a quantity crosses the wire in a step."""

    LOCAL = "local"
    """Not at all."""
    FULL = "full"
    COMPRESSED = "compressed"


class Phase(StrEnum):
    """Where an optimizer is; also a label of the metrics."""

    WARMUP = "warmup"
    COMPRESSED = "compressed"
    DENSE = "dense"


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. Steps count from 1; `bias_step` is t of 1 - beta^t, None where nothing is corrected.

    It is that of parameters which were trained from the first step on; see bias_of().
    """

    phase: Phase
    gradient: Wire
    momentum: Wire
    update_variance: bool
    bias_step: int | None
    freeze_variance: bool = False
    """Keep the corrected, floored variance from here on, after this step's update."""

    def bias_of(self, seen: int | None) -> int | None:
        """t of moments that have seen so many steps: bias_step for those that were there from the first one on."""
        return None if self.bias_step is None else seen


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroOneSchedule:
    """When 0/1 Adam does what, beside the freeze. Raises: ValueError for what is no whole number, or too small.

    dense_steps: the first steps, which are Adam's, bit for bit, and send gradients in full; a given freeze ends them.
    None: 1 / (1 - beta2) of them, or where that is fewer a part of total_steps, at least 10 (VarianceFreeze). 0: none.
    A second warm-up (set_global_batch) has none.
    var_update_scaler: updates of the variance, after the dense steps, until the gap between them doubles.
    local_step_scaler: None: the interval between syncs is 2^k when the learning rate (the largest of the groups) has
    fallen to about 1/2^k of its peak. A number: it doubles every so many steps after the freeze instead.
    local_step_clipper: the longest interval, steps. None: a thousandth of total_steps, from 1 to 16; and 16 where that
    is not known, or local_step_scaler is given.
    """

    dense_steps: int | None = DENSE_STEPS.default
    var_update_scaler: int = VAR_UPDATE_SCALER.default
    local_step_scaler: int | None = LOCAL_STEP_SCALER.default
    local_step_clipper: int | None = LOCAL_STEP_CLIPPER.default

    def __post_init__(self) -> None:
        for number in ZERO_ONE_SCHEDULE:
            number.check(getattr(self, number.name))


BY_DEFAULT = ZeroOneSchedule()


def dense_plan(step: int) -> StepPlan:
    """Adam on the mean gradient, at every step."""
    return StepPlan(Phase.DENSE, Wire.FULL, Wire.LOCAL, update_variance=True, bias_step=step)


def linear_plan() -> StepPlan:
    """1-bit SGD and Muon, sketched SGD: the step is linear in what crosses, compressed always; there is no variance."""
    return StepPlan(Phase.COMPRESSED, Wire.LOCAL, Wire.COMPRESSED, update_variance=False, bias_step=None)


def uploads_plan(step: int) -> StepPlan:
    """CADA: in each step what has changed of the gradients of some ranks, and AMSGrad on the mean that follows."""
    return StepPlan(Phase.COMPRESSED, Wire.LOCAL, Wire.COMPRESSED, update_variance=True, bias_step=step)


def local_steps_plan(*, due: bool) -> StepPlan:
    """Local steps of any optimizer: nothing crosses, but where it is due what parameters have moved by."""
    crosses = Wire.COMPRESSED if due else Wire.LOCAL
    return StepPlan(Phase.COMPRESSED, Wire.LOCAL, crosses, update_variance=False, bias_step=None)


def onebit_adam_plan(step: int, warmup: int | None, frozen_at: int | None, *, refresh: bool = False) -> StepPlan:
    """1-bit Adam: steps 1..warmup are dense, later ones exchange the momentum in one bit.  [Tang et al. 2021, Alg. 1]

    warmup: None where the optimizer decides by what it sees. frozen_at: the step after which the variance was frozen,
    None before. It decides, not `warmup`: a run that is loaded with another `warmup` does not unfreeze. refresh: is the
    frozen variance to be brought up to date? Such a step is Adam's, and the error memory waits.
    """
    if frozen_at is not None and refresh:
        return StepPlan(Phase.COMPRESSED, Wire.FULL, Wire.LOCAL, update_variance=True, bias_step=None)
    if frozen_at is not None:
        return StepPlan(Phase.COMPRESSED, Wire.LOCAL, Wire.COMPRESSED, update_variance=False, bias_step=None)
    return StepPlan(
        Phase.WARMUP,
        Wire.FULL,
        Wire.LOCAL,
        update_variance=True,
        bias_step=step,
        freeze_variance=warmup is not None and step >= warmup,
    )


def is_variance_step(step: int, scaler: int) -> bool:
    """Is `step` in T_v of 0/1 Adam: steps 1 = k_0 < k_1 < ... with k_(j+1) - k_j = 2^floor(j / scaler).

    A closed form of the global step, so that nothing is to be saved.  [Lu et al. 2022]
    """
    offset = step - 1
    doublings = (offset // scaler + 1).bit_length() - 1  # gaps of 2^k begin scaler (2^k - 1) steps after step 1
    gap = 1 << doublings
    return (offset - scaler * (gap - 1)) % gap == 0


def counted_interval(step: int, frozen_at: int, scaler: int, clipper: int) -> int:
    """Steps from one sync to the next at `step` > frozen_at: 1, doubled every `scaler` steps, at most `clipper`."""
    return int(min(clipper, 2 ** min((step - frozen_at - 1) // scaler, clipper.bit_length())))


def longest_interval(total_steps: int | None, *, counted: bool) -> int:
    """Steps from one sync to the next at most, where nothing is asked: a thousandth of the run, up to LONGEST_INTERVAL.

    Between syncs a rank does not know what the others have found. Over eight steps of a thousand that shows in the loss
    (docs/algorithms.md). counted: the interval doubles with steps, as somebody has asked for.
    """
    if total_steps is None or counted:
        return LONGEST_INTERVAL
    return min(max(total_steps // 1000, 1), LONGEST_INTERVAL)


def rate_interval(lr: float, peak_lr: float, clipper: int) -> int:
    """Steps from one sync to the next: 2^k where the learning rate has fallen to about peak / 2^k, at most `clipper`.

    While the rate rises it is its own peak, so the interval is 1. A rate of 0 has the longest interval.
    """
    if lr >= peak_lr:
        return 1
    doublings = inf if lr <= 0 else log2(peak_lr / lr) + AHEAD
    return clipper if doublings >= log2(clipper) else int(2 ** floor(doublings))


def zero_one_adam_plan(
    step: int,
    *,
    freeze: bool,
    var_update_scaler: int,
    variance_updates: int,
    frozen_at: int | None,
    last_sync: int,
    interval: int,
    warmup_from: int = 0,
    dense_until: int = 0,
    refresh: bool = False,
) -> StepPlan:
    """0/1 Adam: a sync at every step while the variance still moves, then every `interval` steps after the last one.

    freeze: is this the last step that moves the variance? variance_updates: made so far; until one has given a scale
    every step tries. frozen_at decides, as in 1-bit Adam. Every step of T_v is a sync.  [Lu et al. 2022, Alg. 1]
    dense_until: up to this step, and not after the freeze, a step is Adam's on the mean gradient; T_v is counted from
    there.
    warmup_from: the step after which a second warm-up began; T_v is counted from there, and no step of it is dense.
    refresh: is the frozen variance to be brought up to date at the next sync?
    """
    if frozen_at is not None:
        due = step - last_sync >= interval
        sync, refresh = Wire.COMPRESSED if due else Wire.LOCAL, refresh and due
        gradient = Wire.FULL if refresh else Wire.LOCAL
        return StepPlan(Phase.COMPRESSED, gradient, sync, update_variance=refresh, bias_step=None)
    if step <= dense_until and not warmup_from:
        t = variance_updates + 1
        return StepPlan(Phase.WARMUP, Wire.FULL, Wire.LOCAL, update_variance=True, bias_step=t, freeze_variance=freeze)
    update = variance_updates == 0 or is_variance_step(step - (warmup_from or dense_until), var_update_scaler)
    return StepPlan(
        Phase.WARMUP,
        Wire.FULL if update else Wire.LOCAL,
        Wire.COMPRESSED,
        update_variance=update,
        bias_step=None,
        freeze_variance=freeze,
    )
