"""What is planned (forecast.py), and the steps of its run (schedule.py), as a job file or a script's optimizer says."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from thinwire.comm.codecs import BY_NAME, CountSketch, PowerSGD
from thinwire.comm.wire.step_time import FEW_BITS
from thinwire.contract.hyperparameters import RANK
from thinwire.contract.optimizers import LocalStepsSpec, OneBitAdamSpec, OneBitLambSpec, ZeroOneAdamSpec
from thinwire.contract.spec import TrainSpec
from thinwire.optim import FlatOptimizer, LocalSteps, OneBitSGD, ZeroOneAdam
from thinwire.optim.by_name import OPTIMIZERS
from thinwire.optim.variance.freezing import FreezingOptimizer
from thinwire.optim.variance.warmup import WarmupOptimizer
from thinwire.workers.plan.schedule import RunSteps
from thinwire.workers.plan.ways import PlannedJob

ASSUMED_STEPS = 1000
"""Of a run whose length the script does not tell."""
ASSUMED_RISE = 0.05
"""Of a run whose rate falls: the part in which it rises, where nobody tells."""
FLOOR = 0.1
"""To which part of its peak a rate falls that does."""
COMPRESSED = (OneBitAdamSpec, OneBitLambSpec, ZeroOneAdamSpec)


def job_of_recipe(spec: TrainSpec) -> PlannedJob:
    """As a job file with a built-in recipe says it."""
    run, device = run_of_job(spec), spec.workers.device
    return PlannedJob(spec.name, run, spec.global_batch, spec.overlap, spec.bucket_elements, device)


def run_of_job(spec: TrainSpec) -> RunSteps:
    """As a job file says it."""
    given, schedule = spec.optimizer, spec.lr_schedule
    more: dict[str, Any] = {}
    if isinstance(given, ZeroOneAdamSpec):
        names = ("dense_steps", "var_update_scaler", "local_step_scaler", "local_step_clipper")
        more = {name: getattr(given, name) for name in names}
    if isinstance(given, COMPRESSED):
        more["refresh"] = given.refresh
    if isinstance(given, LocalStepsSpec):
        more |= {"inner": given.inner.name, "every": given.every, "parts": given.parts, "late": given.overlap}
    more["codec"] = getattr(given, "codec", "sign")
    more["own"] = given.model_dump(include={"codec", "rank", "k", "rows", "columns", "second"})
    rule = given.inner if isinstance(given, LocalStepsSpec) else given
    if hasattr(rule, "betas"):
        more["beta2"] = rule.betas[1]
    return RunSteps(
        spec.steps,
        given.name,
        lr_warmup_steps=spec.lr_warmup_steps,
        floor=schedule.final_fraction if schedule.decay == "cosine" else 1.0,
        warmup=spec.warmup_steps,
        var_freeze_step=spec.var_freeze_step,
        full_exchange=getattr(given, "full_exchange", None),
        half=spec.precision == "bfloat16",
        flat=spec.topology == "flat",
        **more,
    )


def run_of_optimizer(optimizer: FlatOptimizer[Any], last: int | None) -> RunSteps:
    """As a script's optimizer says it. last: the last step, where the loop says so.

    What nobody knows is assumed: ASSUMED_STEPS, and a rate that falls where there is a scheduler, else stays.
    Raises: ValueError for an optimizer that no job has, and settings that do not fit the length of the run.
    """
    mine = type(optimizer)  # or made of it by sized(), of the same name
    names = names_of(mine)
    if not names:
        raise ValueError(f"{mine.__name__}: must be one of {', '.join(OPTIMIZERS)}, not a class made of it")
    steps = length_of(optimizer, last) or ASSUMED_STEPS
    more: dict[str, Any] = {}
    rises = optimizer.lr_warmup_steps if isinstance(optimizer, WarmupOptimizer) else None
    if isinstance(optimizer, FreezingOptimizer):
        more["warmup"] = None if optimizer.warmup == "auto" else optimizer.warmup
    if isinstance(optimizer, ZeroOneAdam):
        more = {
            "var_freeze_step": optimizer.freeze.var_freeze_step,
            **asdict(optimizer.schedule),
            "local_step_clipper": optimizer.local_step_clipper,
        }
    if isinstance(optimizer, LocalSteps):
        inner = type(optimizer.inner.optimizer)
        known = names_of(inner) or [kind for kind in ("sgd", "muon") if kind == inner.__name__.lower()]
        more = {"inner": (known or ["adam"])[0], "every": optimizer.every}
        more |= {"parts": optimizer.parts, "late": optimizer.steps_beside > 0}
    more |= _codec_of(optimizer)
    if "betas" in optimizer.param_groups[0]:
        more["beta2"] = optimizer.param_groups[0]["betas"][1]
    falls = has_scheduler(optimizer)
    return RunSteps(
        steps,
        names[0],
        lr_warmup_steps=rises or (max(1, round(ASSUMED_RISE * steps)) if falls else 1),
        floor=FLOOR if falls else 1.0,
        full_exchange=optimizer.full_exchange,
        **more,
    )


def _codec_of(optimizer: FlatOptimizer[Any]) -> dict[str, Any]:
    """codec and own, of RunSteps; one of the user's own costs nobody knows what, and counts as signs."""
    codec = optimizer.codec
    if isinstance(codec, CountSketch):
        return {"own": {"k": codec.k, "rows": codec.rows, "columns": codec.columns, "second": codec.second}}
    name = getattr(codec, "name", "")
    as_named = isinstance(codec, PowerSGD) or (name in FEW_BITS and BY_NAME.get(name) == codec)
    known = name if as_named else "sign"
    if isinstance(optimizer, OneBitSGD):
        rank = codec.rank if isinstance(codec, PowerSGD) else RANK.default
        return {"codec": known, "own": {"codec": known, "rank": rank}}
    return {"codec": known, "own": {"codec": known} if isinstance(optimizer, LocalSteps) else {}}


def names_of(kind: type) -> list[str]:
    """What a job file calls this class of optimizers, or one that sized() has made of it; empty where nothing."""
    return [name for name, one in OPTIMIZERS.items() if one in kind.__mro__ and one.__name__ == kind.__name__]


def length_of(optimizer: FlatOptimizer[Any], last: int | None) -> int | None:
    """Steps of the run: `last` where the loop says so, else the optimizer's total_steps."""
    return last or (optimizer.total_steps if isinstance(optimizer, WarmupOptimizer) else None)


def has_scheduler(optimizer: FlatOptimizer[Any]) -> bool:
    """Has a scheduler of torch.optim been made for it? The same on every rank that runs the same program."""
    return hasattr(optimizer.step, "_wrapped_by_lr_sched")
