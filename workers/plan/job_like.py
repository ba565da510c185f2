"""Which job of a recipe makes the same steps as the optimizer of a script? Plans and buckets follow from that."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from thinwire.contract.spec import TrainSpec
from thinwire.optim import FlatOptimizer, ZeroOneAdam
from thinwire.optim.variance.freezing import FreezingOptimizer
from thinwire.optim.variance.warmup import WarmupOptimizer
from thinwire.workers.hyper import OPTIMIZERS

ASSUMED_STEPS = 1000
"""Of a run whose length the script does not tell."""


def settings_of(optimizer: FlatOptimizer[Any]) -> dict[str, Any]:
    """As in a job file: what the steps of a run follow from. Raises: ValueError for an optimizer that no job has."""
    mine = type(optimizer)  # or made of it by sized(), of the same name
    names = [n for n, kind in OPTIMIZERS.items() if kind in mine.__mro__ and kind.__name__ == mine.__name__]
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
            **asdict(optimizer.schedule),
            "local_step_clipper": optimizer.local_step_clipper,
        }
    return settings


def has_scheduler(optimizer: FlatOptimizer[Any]) -> bool:
    """Has a scheduler of torch.optim been made for it? The same on every rank that runs the same program."""
    return hasattr(optimizer.step, "_wrapped_by_lr_sched")


def length_of(optimizer: FlatOptimizer[Any], last: int | None) -> int | None:
    """Steps of the run: `last` where the loop says so, else the optimizer's total_steps."""
    return last or (optimizer.total_steps if isinstance(optimizer, WarmupOptimizer) else None)


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
