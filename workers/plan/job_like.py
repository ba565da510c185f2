"""Which job of a recipe makes the same steps as the optimizer of a script? Plans and buckets follow from that."""

from __future__ import annotations

from typing import Any

from thinwire.contract.spec import TrainSpec
from thinwire.optim import FlatOptimizer, ZeroOneAdam
from thinwire.optim.variance.freezing import FreezingOptimizer
from thinwire.optim.variance.run_length import known_length
from thinwire.optim.variance.warmup import WarmupOptimizer
from thinwire.workers.hyper import OPTIMIZERS

ASSUMED_STEPS = 1000
"""Of a run whose length the script does not tell."""


def settings_of(optimizer: FlatOptimizer[Any]) -> dict[str, Any]:
    """As in a job file: what the steps of a run follow from. Raises: ValueError for an optimizer that no job has."""
    names = [name for name, kind in OPTIMIZERS.items() if type(optimizer) is kind]
    if not names:
        raise ValueError(f"{type(optimizer).__name__}: must be one of {', '.join(OPTIMIZERS)}, not a class made of it")
    first = optimizer.param_groups[0]
    settings: dict[str, Any] = {"name": names[0], "lr": first["lr"], "full_exchange": optimizer.full_exchange}
    if "betas" in first:
        settings["betas"] = list(first["betas"])
    if isinstance(optimizer, FreezingOptimizer):
        settings["warmup"] = optimizer.warmup
    if isinstance(optimizer, ZeroOneAdam):
        settings |= {
            "var_freeze": optimizer.freeze.var_freeze_step or "auto",
            "dense_steps": optimizer.dense_steps,
            "var_update_scaler": optimizer.var_update_scaler,
            "local_step_scaler": optimizer.local_step_scaler,
            "local_step_clipper": optimizer.local_step_clipper,
        }
    return settings


def length_of(optimizer: FlatOptimizer[Any], last: int | None) -> int | None:
    """Steps of the run: `last` where the loop says so, else what the optimizer was told, or its schedulers know.

    Schedulers are asked after the first step: only then it is seen whether they count the optimizer's.
    """
    told = optimizer.total_steps if isinstance(optimizer, WarmupOptimizer) else None
    return last or told or (known_length(optimizer, optimizer.num_steps) if optimizer.num_steps else None)


def lr_warmup_of(optimizer: FlatOptimizer[Any]) -> int | None:
    """Steps in which the learning rate rises, where the optimizer was told."""
    return optimizer.lr_warmup_steps if isinstance(optimizer, WarmupOptimizer) else None


def job_like(
    settings: dict[str, Any], steps: int | None, *, lr_warmup_steps: int | None, decays: bool, **more: Any
) -> TrainSpec:
    """A job of a recipe that would make the same steps.

    settings: of the optimizer. steps: None: unknown. lr_warmup_steps: where known. decays: whether the rate falls, as
    in a cosine. more: of a job file. Raises: ValueError where the settings do not fit the length of the run.
    """
    rates: dict[str, Any] = {"warmup": lr_warmup_steps or 1, "decay": "constant"}
    if decays:
        rates = {"warmup": lr_warmup_steps or 0.05}
    steps = steps or ASSUMED_STEPS
    return TrainSpec.model_validate({"steps": steps, "optimizer": settings, "lr_schedule": rates, **more})
