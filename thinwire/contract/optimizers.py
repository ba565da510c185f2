"""The optimizers that a job file may name, and their hyperparameters. Torch-free.

What each of them may be, and its default, is in hyperparameters.py; what cannot stand beside what in spec.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from thinwire.contract import hyperparameters as declared
from thinwire.contract.fields import Auto, Frozen, StepsOrFraction, Whole, refuse


def _field(number: declared.Number, default: Any = None, **otherwise: float | None) -> Any:
    """A field of a declared number. default: another one. otherwise: bounds that a job file has and the number not."""
    bounds = {"ge": number.at_least, "gt": number.above, "le": number.at_most, "lt": number.below, **otherwise}
    given: dict[str, Any] = {name: bound for name, bound in bounds.items() if bound is not None}
    if number.about:
        given["description"] = number.about
    return Field(number.default if default is None else default, **given)


_CODEC = (
    "how what is exchanged is written: in one bit a value, in 8, in 4, of each 4096 the largest 64 in 2 bits, or of "
    "all the largest hundredth in 16"
)


class FullExchange(Frozen):
    """Of those that send some gradient in full."""

    full_exchange: Literal["fp32", "bf16", "int8"] | None = Field(
        None,
        description="how the mean of the gradients is sent where it is not compressed to one bit: int8 is a quarter of "
        "fp32, with error feedback; null: bf16 where precision is bfloat16; int8 where a compressed optimizer finds "
        "the end of its warm-up by itself, with topology = flat; else fp32",
    )


class _AdamHyper(FullExchange):
    lr: float = _field(declared.LR, ge=None, gt=0.0)
    betas: tuple[Annotated[float, _field(declared.BETA1, ...)], Annotated[float, _field(declared.BETA2, ...)]] = (
        declared.BETAS
    )
    eps: float = _field(declared.EPS)
    weight_decay: float = _field(declared.WEIGHT_DECAY)


class TrustRatio(Frozen):
    """Of both forms of LAMB."""

    max_coeff: float = _field(declared.MAX_COEFF)
    min_coeff: float = _field(declared.MIN_COEFF)


class Freezing(Frozen):
    """Of those whose warm-up ends with a frozen variance."""

    warmup: Auto | StepsOrFraction = Field(
        "auto", description="uncompressed steps, their fraction of all steps, or auto: until the variance is stable"
    )


class Compressing(Frozen):
    """Of those that freeze a variance and compress."""

    refresh: float | None = _field(declared.REFRESH)

    @model_validator(mode="before")
    @classmethod
    def _of_before(cls, given: Any) -> Any:
        """Job files of earlier versions may say which norm a scale keeps."""
        if not isinstance(given, Mapping) or "scale" not in given:
            return given
        if given["scale"] != "l2":
            refuse([("optimizer.scale", given["scale"], "l2, or left out: scales of another norm are gone")])
        return {name: value for name, value in given.items() if name != "scale"}


class OneBitAdamSpec(_AdamHyper, Freezing, Compressing):
    """1-bit Adam (arXiv 2102.02888): dense Adam for `warmup`, then the momentum is exchanged in one bit."""

    name: Literal["onebit_adam"]
    variance: Literal["bf16"] | None = Field(
        None, description="bf16: the frozen variance takes half of the memory; null: fp32"
    )
    error_memory: Literal["bf16"] | None = Field(
        None, description="bf16: what compression leaves out takes half of the memory, rounded at random; null: fp32"
    )


class OneBitLambSpec(_AdamHyper, TrustRatio, Freezing, Compressing):
    """1-bit LAMB (arXiv 2104.06069): dense LAMB for `warmup`, then the momentum is exchanged in one bit."""

    name: Literal["onebit_lamb"]
    coeff_beta: float = _field(declared.COEFF_BETA)
    factor_max: float = _field(declared.FACTOR_MAX)
    factor_min: float = _field(declared.FACTOR_MIN)
    factor_threshold: float = _field(declared.FACTOR_THRESHOLD)


class ZeroOneAdamSpec(_AdamHyper, Compressing):
    """0/1 Adam (arXiv 2202.06009): local steps; at some the sum of updates is exchanged in one bit."""

    name: Literal["zero_one_adam"]
    var_freeze: Auto | StepsOrFraction = Field(
        "auto",
        description="last step that may update the variance, its fraction of all steps, or auto: lr_schedule.warmup "
        "and dense_steps are over",
    )
    dense_steps: Whole | None = _field(declared.DENSE_STEPS)
    var_update_scaler: Whole = _field(declared.VAR_UPDATE_SCALER)
    local_step_scaler: Whole | None = _field(declared.LOCAL_STEP_SCALER)
    local_step_clipper: Whole | None = _field(declared.LOCAL_STEP_CLIPPER)


class OneBitSgdSpec(Frozen):
    """SGD as torch.optim.SGD has it, whose momentum is exchanged in one bit, or by `codec`, from the first step on."""

    name: Literal["onebit_sgd"]
    lr: float = _field(declared.LR, ge=None, gt=0.0)
    momentum: float = _field(declared.MOMENTUM)
    dampening: float = _field(declared.DAMPENING)
    weight_decay: float = _field(declared.WEIGHT_DECAY)
    nesterov: bool = Field(False, description="Nesterov's momentum; with momentum above 0 and no dampening")
    codec: Literal[declared.CodecName, "powersgd"] = Field(
        "sign", description=f"{_CODEC}; powersgd: matrices as two factors of `rank` columns"
    )
    rank: Whole = _field(declared.RANK)


class SketchedSgdSpec(Frozen):
    """Sketched-SGD (arXiv 1903.04488): SGD of whose updates the largest k are found by a count-sketch and applied."""

    name: Literal["sketched_sgd"]
    lr: float = _field(declared.LR, ge=None, gt=0.0)
    momentum: float = _field(declared.MOMENTUM)
    weight_decay: float = _field(declared.WEIGHT_DECAY)
    k: Whole | None = _field(declared.SKETCH_K)
    rows: Whole = _field(declared.SKETCH_ROWS)
    columns: Whole | None = _field(declared.SKETCH_COLUMNS)
    second: Whole = _field(declared.SKETCH_SECOND)


class OneBitMuonSpec(Frozen):
    """Muon (arXiv 2502.16982) with each rank's orthogonalised update exchanged in one bit from the first step on."""

    name: Literal["onebit_muon"]
    lr: float = _field(declared.LR, ge=None, gt=0.0)
    momentum: float = _field(declared.MUON_MOMENTUM)
    weight_decay: float = _field(declared.MUON_DECAY)
    nesterov: bool = True


class AdamSpec(_AdamHyper):
    """Dense Adam with decoupled decay (AdamW), the uncompressed baseline of 1-bit Adam."""

    name: Literal["adam"]


class LambSpec(_AdamHyper, TrustRatio):
    """Dense LAMB, the uncompressed baseline of 1-bit LAMB."""

    name: Literal["lamb"]


class SgdSpec(FullExchange):
    """SGD with momentum and coupled decay, as torch.optim.SGD has it."""

    name: Literal["sgd"]
    lr: float = _field(declared.LR, ge=None, gt=0.0)
    momentum: float = _field(declared.MOMENTUM)
    weight_decay: float = _field(declared.WEIGHT_DECAY)


class MuonSpec(FullExchange):
    """Dense Muon, the uncompressed baseline of 1-bit Muon."""

    name: Literal["muon"]
    lr: float = _field(declared.LR, ge=None, gt=0.0)
    momentum: float = _field(declared.MUON_MOMENTUM)
    weight_decay: float = _field(declared.MUON_DECAY)
    nesterov: bool = True


class OuterSpec(Frozen):
    """The outer step: what all workers do with the mean of what they have moved by (OuterSGD)."""

    lr: float = _field(declared.OUTER_LR)
    momentum: float = _field(declared.OUTER_MOMENTUM)
    nesterov: bool = True


Inner = Annotated[AdamSpec | LambSpec | SgdSpec | MuonSpec, Field(discriminator="name")]


class LocalStepsSpec(Frozen):
    """Local steps (DiLoCo, arXiv 2311.08105): each worker steps alone; every so many steps their moves are averaged."""

    name: Literal["local_steps"]
    every: Whole = _field(declared.EVERY)
    inner: Inner = Field(
        description="the optimizer of each worker alone, whose lr is the run's: adam, lamb, sgd or muon, without "
        "full_exchange"
    )
    outer: OuterSpec = Field(default_factory=OuterSpec)
    codec: declared.CodecName = Field("sign", description=_CODEC)
    overlap: bool = Field(
        False, description="the exchange of a round runs beside the steps of the next, and counts one round late"
    )
    parts: Whole = _field(declared.PARTS)

    @property
    def lr(self) -> float:
        """The peak learning rate, which the schedule shapes: the inner optimizer's."""
        return self.inner.lr


class CadaSpec(Frozen):
    """CADA (arXiv 2012.15469): AMSGrad, where a worker sends its gradient only when that has changed enough."""

    name: Literal["cada"]
    lr: float = _field(declared.CADA_LR, ge=None, gt=0.0)
    betas: tuple[Annotated[float, _field(declared.BETA1, ...)], Annotated[float, _field(declared.BETA2, ...)]] = (
        declared.BETAS
    )
    eps: float = _field(declared.EPS)
    weight_decay: float = _field(declared.WEIGHT_DECAY)
    rule: Literal[1, 2] = Field(
        2,
        description="1: gradients are compared with those at a point that all workers renew every max_age steps; 2: "
        "with those at the point where the worker last sent",
    )
    max_age: Whole = _field(declared.MAX_AGE)
    horizon: Whole = _field(declared.HORIZON)
    threshold: float = _field(declared.THRESHOLD)


Optimizer = Annotated[
    OneBitAdamSpec
    | OneBitLambSpec
    | ZeroOneAdamSpec
    | OneBitSgdSpec
    | OneBitMuonSpec
    | AdamSpec
    | LambSpec
    | SgdSpec
    | MuonSpec
    | LocalStepsSpec
    | CadaSpec
    | SketchedSgdSpec,
    Field(discriminator="name"),
]
