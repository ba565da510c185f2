"""What a job file says of the optimizer and of the learning rate, as the constructors of thinwire.optim take it."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import torch

from thinwire.contract.spec import TrainSpec
from thinwire.optim import (
    SGD,
    Adam,
    FlatOptimizer,
    Lamb,
    LambBounds,
    OneBitAdam,
    OneBitLamb,
    ZeroOneAdam,
    ZeroOneSchedule,
)
from thinwire.optim.variance.freezing import FreezingOptimizer

OPTIMIZERS: dict[str, Any] = {
    "onebit_adam": OneBitAdam,
    "onebit_lamb": OneBitLamb,
    "zero_one_adam": ZeroOneAdam,
    "adam": Adam,
    "lamb": Lamb,
    "sgd": SGD,
}
"""By `optimizer.name` of the spec."""

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""What parameters are made of, by `precision` of the spec."""


def learning_rate(spec: TrainSpec, step: int) -> float:
    """The rate of step `step` (from 1): linear to the peak over the warm-up, then cosine to final_fraction of it."""
    floor = 1.0 if spec.lr_schedule.decay == "constant" else spec.lr_schedule.final_fraction
    return risen_and_fallen(step, spec.steps, spec.lr_warmup_steps, floor, peak=spec.optimizer.lr)


def risen_and_fallen(step: int, steps: int, warmup: int, floor: float, *, peak: float = 1.0) -> float:
    """Linear to the peak over `warmup` steps, then a cosine to `floor` of it at the last; a floor of 1: constant."""
    if step <= warmup:
        return peak * step / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))


def hyperparameters(spec: TrainSpec) -> dict[str, Any]:
    """The hyperparameters of the job file, under the constructors' names, and the run's steps where they are needed."""
    hyper = spec.optimizer.model_dump(exclude={"name"})
    if "warmup" in hyper:
        hyper["warmup"] = spec.warmup_steps or "auto"
        hyper |= {"total_steps": spec.steps, "lr_warmup_steps": spec.lr_warmup_steps}
    if "var_freeze" in hyper:
        del hyper["var_freeze"]
        hyper["var_freeze_step"] = spec.var_freeze_step
        # A rate that rises to the very end leaves the last step for what follows the freeze.
        hyper |= {"total_steps": spec.steps, "lr_warmup_steps": min(spec.lr_warmup_steps, spec.steps - 1)}
        hyper["schedule"] = ZeroOneSchedule(**_taken(hyper, ZeroOneSchedule))
    if "max_coeff" in hyper:
        hyper["bounds"] = LambBounds(**_taken(hyper, LambBounds))
    if "error_memory" in hyper:
        hyper["narrow"] = [name for name in ("variance", "error_memory") if hyper.pop(name) == "bf16"]
    return hyper


def _taken(hyper: dict[str, Any], kind: Any) -> dict[str, Any]:
    """Out of these those that are fields of a dataclass."""
    return {field.name: hyper.pop(field.name) for field in fields(kind) if field.name in hyper}


def take_settings(optimizer: FlatOptimizer[Any], spec: TrainSpec) -> None:
    """The hyperparameters of the job file, in place of those that a checkpoint of another job has brought. Local."""
    hyper = hyperparameters(spec)
    for group in optimizer.param_groups:
        group.update({name: value for name, value in hyper.items() if name in group})
    if isinstance(optimizer, FreezingOptimizer) and optimizer.stability is not None:
        optimizer.stability = replace(
            optimizer.stability,
            beta2=optimizer.beta2,
            total_steps=hyper["total_steps"],
            lr_warmup_steps=hyper["lr_warmup_steps"],
            part=optimizer.warmup_part[optimizer.full_exchange],
        )
