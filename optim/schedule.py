"""What a step does, as data: a frozen plan computed from saved integers. There are no phase flags anywhere."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


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
    """One step. Steps count from 1; `bias_step` is t of 1 - beta^t, None where nothing is corrected."""

    phase: Phase
    gradient: Wire
    momentum: Wire
    update_variance: bool
    bias_step: int | None
    freeze_variance: bool = False
    """Keep the corrected, floored variance from here on, after this step's update."""


def dense_plan(step: int) -> StepPlan:
    """Adam on the mean gradient, at every step."""
    return StepPlan(Phase.DENSE, Wire.FULL, Wire.LOCAL, update_variance=True, bias_step=step)


def onebit_adam_plan(step: int, warmup: int | None, frozen_at: int | None) -> StepPlan:
    """1-bit Adam: steps 1..warmup are dense, later ones exchange the momentum in one bit.  [Tang et al. 2021, Alg. 1]

    warmup: None where the optimizer decides by what it sees. frozen_at: the step after which the variance was frozen,
    None before. It decides, not `warmup`: a run that is loaded with another `warmup` does not unfreeze.
    """
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
