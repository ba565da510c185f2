"""Optimizers by the names that job files have for them, for scripts whose command line says which one trains."""

from __future__ import annotations

from typing import Any

from torch.optim.optimizer import ParamsT

from thinwire.comm import SoloGroup
from thinwire.optim.cada import CADA
from thinwire.optim.dense import SGD, Adam, Lamb
from thinwire.optim.engine.optimizer import FlatOptimizer
from thinwire.optim.local_steps import LocalSteps
from thinwire.optim.muon import Muon, OneBitMuon
from thinwire.optim.onebit_adam import OneBitAdam
from thinwire.optim.onebit_lamb import OneBitLamb
from thinwire.optim.onebit_sgd import OneBitSGD
from thinwire.optim.sketched_sgd import SketchedSGD
from thinwire.optim.variance.warmup import WarmupOptimizer
from thinwire.optim.zero_one_adam import ZeroOneAdam

OPTIMIZERS: dict[str, Any] = {
    "onebit_adam": OneBitAdam,
    "onebit_lamb": OneBitLamb,
    "zero_one_adam": ZeroOneAdam,
    "onebit_sgd": OneBitSGD,
    "onebit_muon": OneBitMuon,
    "adam": Adam,
    "lamb": Lamb,
    "sgd": SGD,
    "muon": Muon,
    "local_steps": LocalSteps,
    "cada": CADA,
    "sketched_sgd": SketchedSGD,
}
"""By `optimizer.name` of a job's file."""
EVERY = 8
"""Steps of a round of local steps, where nothing else is asked for."""


def named(
    name: str,
    params: ParamsT,
    lr: float,
    *,
    total_steps: int | None = None,
    lr_warmup_steps: int | None = None,
    **options: Any,
) -> FlatOptimizer[Any]:
    """The optimizer of that name:  optimizer = named("onebit_adam", model.parameters(), 1e-3, group=run.group).

    total_steps, lr_warmup_steps: of the run, for those that begin to compress in the course of it; others need none.
    options: of that class, and what all of them take (optim.engine.options). "local_steps" makes those of Adam, in
    rounds of `every` = 8.
    Collective, as constructors are. Raises: ValueError for another name; TypeError, ValueError; PeerLost, WireMismatch.
    """
    if name not in OPTIMIZERS:
        raise ValueError(f"optimizer {name!r}: must be one of {', '.join(OPTIMIZERS)}")
    kind = OPTIMIZERS[name]
    if kind is LocalSteps:
        inner = Adam(params, lr=lr, group=SoloGroup())
        return LocalSteps(inner, total_steps=total_steps, **{"every": EVERY, **options})
    if issubclass(kind, WarmupOptimizer):
        options |= {"total_steps": total_steps, "lr_warmup_steps": lr_warmup_steps}
    made: FlatOptimizer[Any] = kind(params, lr=lr, **options)
    return made
