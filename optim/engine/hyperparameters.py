"""Hyperparameters of a parameter group: torch.optim's names, and what they may be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


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
    return {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}


def check_adam_group(group: dict[str, Any]) -> None:
    """Refuse hyperparameters of the Adam family out of range. Raises: ValueError."""
    beta1, beta2 = group["betas"]
    refuse_out_of_range(
        ("lr", group["lr"], "at least 0", group["lr"] >= 0),
        ("betas[0]", beta1, "in [0, 1)", 0 <= beta1 < 1),
        ("betas[1]", beta2, "in (0, 1)", 0 < beta2 < 1),
        ("eps", group["eps"], "above 0", group["eps"] > 0),
        ("weight_decay", group["weight_decay"], "at least 0", group["weight_decay"] >= 0),
    )


def refuse_out_of_range(*checks: tuple[str, float, str, bool]) -> None:
    """checks: (name, value, what is allowed, whether it holds). Raises: ValueError for the first that does not."""
    for name, value, allowed, holds in checks:
        if not holds:
            raise ValueError(f"{name} = {value}: must be {allowed}")
