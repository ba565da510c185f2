"""Hyperparameters of a parameter group: torch.optim's names, and what they may be."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from numbers import Real
from typing import Any

from torch import Tensor


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


def adam_defaults(lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> dict[str, Any]:
    """The per-group hyperparameters of the Adam family, under torch.optim's names."""
    refuse_other_betas(betas)
    return {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}


def check_adam_group(group: dict[str, Any]) -> None:
    """Refuse hyperparameters of the Adam family out of range. Raises: ValueError."""
    refuse_other_betas(group["betas"])
    beta1, beta2 = group["betas"]
    for name in ("lr", "eps", "weight_decay"):
        refuse_no_number(name, group[name])
    refuse_out_of_range(
        ("lr", group["lr"], "at least 0, and finite", 0 <= group["lr"] < inf),
        ("betas[0]", beta1, "in [0, 1)", 0 <= beta1 < 1),
        ("betas[1]", beta2, "in (0, 1)", 0 < beta2 < 1),
        ("eps", group["eps"], "above 0, and finite", 0 < group["eps"] < inf),
        ("weight_decay", group["weight_decay"], "at least 0, and finite", 0 <= group["weight_decay"] < inf),
    )


def as_python(value: object) -> object:
    """A number of NumPy, as schedules compute them, as Python's, which torch.load takes too; all else as it is."""
    if isinstance(value, tuple | list):
        return type(value)(map(as_python, value)) if type(value) in (tuple, list) else value
    is_pythons = type(value) is bool or type(value) is int or type(value) is float
    return float(value) if isinstance(value, Real) and not is_pythons else value


def refuse_other_betas(betas: object) -> None:
    """Raises: ValueError where they are not two numbers."""
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise ValueError(f"betas = {betas!r}: must be two numbers, as (0.9, 0.999)")
    for i, beta in enumerate(betas):
        refuse_no_number(f"betas[{i}]", beta)


def refuse_no_number(name: str, value: object) -> None:
    """Raises: ValueError; a tensor of one element is a number too, as in torch.optim."""
    is_number = isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1)
    if not is_number or isinstance(value, bool):
        raise ValueError(f"{name} = {value!r}: must be a number")


def refuse_no_count(name: str, value: object, least: int) -> None:
    """Raises: ValueError where it is neither None nor an int of at least `least`; torch.load refuses NumPy's."""
    if value is not None and (type(value) is not int or value < least):
        raise ValueError(f"{name} = {value!r}: must be a whole number (int), at least {least}, or None")


def refuse_out_of_range(*checks: tuple[str, float, str, bool]) -> None:
    """checks: (name, value, what is allowed, whether it holds). Raises: ValueError for the first that does not."""
    for name, value, allowed, holds in checks:
        if not holds:
            raise ValueError(f"{name} = {value}: must be {allowed}")
