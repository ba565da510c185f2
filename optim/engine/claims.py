"""Does the module given as model= exchange gradients itself, or is it another than the one that is trained?

Wrappers are known by the names of their classes, so that nothing is imported for it. What can only be seen by training
is in first_step.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

DDP = ("torch", "DistributedDataParallel")
SHARDING = {("torch", "FullyShardedDataParallel"), ("torch", "FSDPModule"), ("deepspeed", "DeepSpeedEngine")}
LOCAL = "local"
"""What integrations.ddp.keep_gradients_local writes as `thinwire_gradients`: this wrapper sends no gradient."""


def refuse_wrapped(model: nn.Module, param_groups: Sequence[dict[str, Any]]) -> None:
    """Raises: ValueError for a model= with a wrapper that exchanges gradients, or that has none of these parameters."""
    for name, module in model.named_modules():
        cls = type(module).__name__
        classes = {(str(base.__module__).split(".")[0], base.__name__) for base in type(module).__mro__}
        where = f"model = {cls}" if not name else f"model.{name} is a {cls}"
        if DDP in classes and getattr(module, "thinwire_gradients", None) != LOCAL:
            raise ValueError(
                f"{where}, whose gradients would be exchanged twice: leave `DistributedDataParallel(model)` out and "
                "pass and train the model itself; where a trainer insists on it, call "
                "thinwire.integrations.ddp.keep_gradients_local(model) first"
            )
        if classes & SHARDING:
            raise ValueError(
                f"{where}, which leaves a part of the model on each rank, and the optimizer needs the whole on every "
                "rank: leave it out, and pass and train the model itself"
            )
    ours = {id(param) for group in param_groups for param in group["params"]}
    if not any(id(param) in ours for param in model.parameters()):
        raise ValueError(
            f"model = {type(model).__name__} has none of the parameters that were given: pass the module that is "
            "trained, not a copy of it, OneBitAdam(model.parameters(), model=model)"
        )
