"""Hyperparameters of a parameter group: torch.optim's names, and what they may be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from thinwire.contract.hyperparameters import BETA1, BETA2, BETAS, Number


@dataclass(frozen=True, slots=True)
class AdamHyper:
    """The hyperparameters of one parameter group, or of a run in it, and the slice of the flat vectors that it owns.

    seen: updates of the variance there, this step's included; None: it is not corrected for them (optim.engine.ages).
    """

    span: slice
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    seen: int | None = None

    def corrections(self, t: int | None) -> tuple[float, float]:
        """1 - beta1^t and 1 - beta2^t, which moments of t steps are divided by; 1 and 1 where t is None."""
        return (1.0, 1.0) if t is None else (1 - self.beta1**t, 1 - self.beta2**t)


def adam_defaults(lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> dict[str, Any]:
    """The per-group hyperparameters of the Adam family, under torch.optim's names."""
    refuse_other_betas(betas)
    return {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}


OF_OTHER_RULES = ("amsgrad", "dampening", "differentiable", "maximize", "momentum", "nesterov", "weight_decay")
"""Settings by which torch.optim's classes step otherwise. Any other entry of a group is its user's own."""


def check_group(group: dict[str, Any], numbers: Sequence[Number], switches: Sequence[str] = ()) -> None:
    """Refuse hyperparameters of a parameter group out of range, and such as this rule lacks. Raises: ValueError.

    numbers, switches: those that it has; a switch is True or False.
    """
    known = {*switches, *(number.name for number in numbers)}
    for name in OF_OTHER_RULES:
        if name not in known and group.get(name):
            raise ValueError(
                f"{name} = {group[name]!r} of a parameter group: this optimizer has no such setting, and would step as "
                f"if it were not there; leave it out"
            )
    if "betas" in group:
        refuse_other_betas(group["betas"])
        BETA1.check(group["betas"][0])
        BETA2.check(group["betas"][1])
    for number in numbers:
        number.check(group[number.name])
    for name in switches:
        if not isinstance(group[name], bool):
            raise ValueError(f"{name} = {group[name]!r}: must be True or False")


def as_python(value: object) -> object:
    """A number of NumPy, as schedules compute them, as Python's, which torch.load takes too; all else as it is."""
    if isinstance(value, tuple | list):
        return type(value)(map(as_python, value)) if type(value) in (tuple, list) else value
    is_pythons = type(value) is bool or type(value) is int or type(value) is float
    return float(value) if isinstance(value, Real) and not is_pythons else value


def refuse_other_betas(betas: object) -> None:
    """Raises: ValueError where they are not two."""
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise ValueError(f"betas = {betas!r}: must be two numbers, as {BETAS}")
