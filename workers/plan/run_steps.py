"""The steps of a run, as a job file says them or a script's optimizer does: plans and sizes of buckets follow."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Self

from thinwire.comm.protocol import FullWire
from thinwire.contract.spec import OneBitAdamSpec, OneBitLambSpec, TrainSpec, ZeroOneAdamSpec
from thinwire.optim import FlatOptimizer, ZeroOneAdam
from thinwire.optim.variance.freezing import FreezingOptimizer
from thinwire.optim.variance.warmup import WarmupOptimizer
from thinwire.workers.hyper import OPTIMIZERS, risen_and_fallen

ASSUMED_STEPS = 1000
"""Of a run whose length the script does not tell."""
ASSUMED_RISE = 0.05
"""Of a run whose rate falls: the part in which it rises, where nobody tells."""
FLOOR = 0.1
"""To which part of its peak a rate falls that does."""
COMPRESSED = (OneBitAdamSpec, OneBitLambSpec, ZeroOneAdamSpec)


@dataclass(frozen=True, slots=True)
class RunSteps:
    """Of one run. method: as a job file names its optimizer; where that compresses nothing, what the others would do.

    warmup: steps in full before the freeze, of 1-bit Adam and LAMB; None: they find it, or there is none.
    var_freeze_step, dense_steps, var_update_scaler, local_step_scaler, local_step_clipper: of 0/1 Adam.
    refresh: of all that freeze a variance.
    lr_warmup_steps: in which the learning rate rises; then it falls as a cosine to `floor` of its peak, 1: stays.
    full_exchange: None: half, flat: low-precision parameters, topology flat, from which it follows.
    Raises: ValueError where these cannot stand together.
    """

    steps: int
    method: str
    lr_warmup_steps: int = 1
    floor: float = 1.0
    beta2: float = 0.999
    warmup: int | None = None
    refresh: float | None = None
    full_exchange: FullWire | None = None
    half: bool = False
    flat: bool = True
    var_freeze_step: int | None = None
    dense_steps: int | None = None
    var_update_scaler: int = 16
    local_step_scaler: int | None = None
    local_step_clipper: int | None = None

    def __post_init__(self) -> None:
        for name, most in (
            ("warmup", self.steps - 1),
            ("var_freeze_step", max(self.steps - 1, 1)),
            ("lr_warmup_steps", self.steps),
        ):
            value = getattr(self, name)
            if value is not None and value > most:
                raise ValueError(f"{name} = {value} in a run of {self.steps} steps: at most {most} is possible")

    @classmethod
    def of_job(cls, spec: TrainSpec) -> Self:
        """As a job file says it."""
        given, schedule = spec.optimizer, spec.lr_schedule
        more: dict[str, Any] = {}
        if isinstance(given, ZeroOneAdamSpec):
            names = ("dense_steps", "var_update_scaler", "local_step_scaler", "local_step_clipper")
            more = {name: getattr(given, name) for name in names}
        if isinstance(given, COMPRESSED):
            more["refresh"] = given.refresh
        if hasattr(given, "betas"):
            more["beta2"] = given.betas[1]
        return cls(
            spec.steps,
            given.name,
            lr_warmup_steps=spec.lr_warmup_steps,
            floor=schedule.final_fraction if schedule.decay == "cosine" else 1.0,
            warmup=spec.warmup_steps,
            var_freeze_step=spec.var_freeze_step,
            full_exchange=given.full_exchange,
            half=spec.precision == "bfloat16",
            flat=spec.topology == "flat",
            **more,
        )

    @classmethod
    def of_optimizer(cls, optimizer: FlatOptimizer[Any], last: int | None) -> Self:
        """As a script's optimizer says it. last: the last step, where the loop says so.

        What nobody knows is assumed: ASSUMED_STEPS, and a rate that falls where there is a scheduler, else stays.
        Raises: ValueError for an optimizer that no job has, and settings that do not fit the length of the run.
        """
        mine = type(optimizer)  # or made of it by sized(), of the same name
        names = [n for n, kind in OPTIMIZERS.items() if kind in mine.__mro__ and kind.__name__ == mine.__name__]
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
        if "betas" in optimizer.param_groups[0]:
            more["beta2"] = optimizer.param_groups[0]["betas"][1]
        falls = has_scheduler(optimizer)
        return cls(
            steps,
            names[0],
            lr_warmup_steps=rises or (max(1, round(ASSUMED_RISE * steps)) if falls else 1),
            floor=FLOOR if falls else 1.0,
            full_exchange=optimizer.full_exchange,
            **more,
        )

    def rate(self, step: int) -> float:
        """The learning rate of a step (from 1), of its peak."""
        return risen_and_fallen(step, self.steps, self.lr_warmup_steps, self.floor)


def length_of(optimizer: FlatOptimizer[Any], last: int | None) -> int | None:
    """Steps of the run: `last` where the loop says so, else the optimizer's total_steps."""
    return last or (optimizer.total_steps if isinstance(optimizer, WarmupOptimizer) else None)


def has_scheduler(optimizer: FlatOptimizer[Any]) -> bool:
    """Has a scheduler of torch.optim been made for it? The same on every rank that runs the same program."""
    return hasattr(optimizer.step, "_wrapped_by_lr_sched")
