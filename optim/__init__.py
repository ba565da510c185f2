"""What is computed: communication-compressed optimizers for any PyTorch model, and the dense baselines beside them.

    optimizer = OneBitAdam(model.parameters(), model=model, lr=1e-3)     # instead of torch.optim.AdamW and DDP

Gradients are local: do not wrap the model in DistributedDataParallel. Under torchrun call
torch.distributed.init_process_group first; without it the optimizer runs on one rank, and refuses to where a launcher
has started several.

Each name is imported when it is first asked for, so that what needs no torch, the schedules of steps, starts without.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinwire.optim.by_name import OPTIMIZERS, named
    from thinwire.optim.cada import CADA
    from thinwire.optim.dense import SGD, Adam, Lamb
    from thinwire.optim.engine.optimizer import FlatOptimizer
    from thinwire.optim.engine.schedule import ZeroOneSchedule
    from thinwire.optim.lamb_math import LambBounds
    from thinwire.optim.local_steps import LocalSteps
    from thinwire.optim.muon import Muon, OneBitMuon
    from thinwire.optim.of_torch import compressed
    from thinwire.optim.onebit_adam import OneBitAdam
    from thinwire.optim.onebit_lamb import OneBitLamb
    from thinwire.optim.onebit_sgd import OneBitSGD
    from thinwire.optim.outer import OuterSGD
    from thinwire.optim.sketched_sgd import SketchedSGD
    from thinwire.optim.sparse_adam import SparseAdam
    from thinwire.optim.zero_one_adam import ZeroOneAdam

__all__ = [
    "CADA",
    "OPTIMIZERS",
    "SGD",
    "Adam",
    "FlatOptimizer",
    "Lamb",
    "LambBounds",
    "LocalSteps",
    "Muon",
    "OneBitAdam",
    "OneBitLamb",
    "OneBitMuon",
    "OneBitSGD",
    "OuterSGD",
    "SketchedSGD",
    "SparseAdam",
    "ZeroOneAdam",
    "ZeroOneSchedule",
    "compressed",
    "named",
]

_MODULES = {
    "by_name": ("OPTIMIZERS", "named"),
    "cada": ("CADA",),
    "dense": (
        "SGD",
        "Adam",
        "Lamb",
    ),
    "engine.optimizer": ("FlatOptimizer",),
    "engine.schedule": ("ZeroOneSchedule",),
    "lamb_math": ("LambBounds",),
    "local_steps": ("LocalSteps",),
    "muon": (
        "Muon",
        "OneBitMuon",
    ),
    "of_torch": ("compressed",),
    "onebit_adam": ("OneBitAdam",),
    "onebit_lamb": ("OneBitLamb",),
    "onebit_sgd": ("OneBitSGD",),
    "outer": ("OuterSGD",),
    "sketched_sgd": ("SketchedSGD",),
    "sparse_adam": ("SparseAdam",),
    "zero_one_adam": ("ZeroOneAdam",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    return found
