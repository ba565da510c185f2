"""Who else has hands on these parameters? Wrappers that exchange gradients themselves, and other optimizers.

With model= its wrappers are found at construction. Without it the live objects of the process are looked through once,
at the first step: by then what was only remade or dropped is gone. By the names of classes, so that nothing is imported
for it, and by their types alone: to ask an object of others' for its attributes may run their code.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import SyncBatchNorm, _NormBase


class Kind(Enum):
    """What a class is to us."""

    DDP = "DistributedDataParallel"
    SHARDING = "sharding"
    OPTIMIZER = "optimizer"
    STATISTICS = "running statistics"


_WRAPPERS = {
    ("torch", "DistributedDataParallel"): Kind.DDP,
    ("torch", "FullyShardedDataParallel"): Kind.SHARDING,
    ("torch", "FSDPModule"): Kind.SHARDING,
    ("deepspeed", "DeepSpeedEngine"): Kind.SHARDING,
}
LOCAL = "local"
"""What integrations.ddp.keep_gradients_local writes as `thinwire_gradients`: this wrapper sends no gradient."""


def kind_of(cls: type) -> Kind | None:
    """What its instances are to us; None: nothing."""
    for base in cls.__mro__:
        kind = _WRAPPERS.get((str(base.__module__).split(".")[0], base.__name__))
        if kind is not None:
            return kind
    if issubclass(cls, torch.optim.Optimizer):
        return Kind.OPTIMIZER
    if issubclass(cls, _NormBase) and not issubclass(cls, SyncBatchNorm):
        return Kind.STATISTICS
    return None


def refuse_wrapped(model: nn.Module, param_groups: Sequence[dict[str, Any]]) -> None:
    """Raises: ValueError for a model= with a wrapper that exchanges gradients, or that has none of these parameters."""
    for name, module in model.named_modules():
        kind, cls = kind_of(type(module)), type(module).__name__
        where = f"model = {cls}" if not name else f"model.{name} is a {cls}"
        if kind is Kind.DDP and not _keeps_gradients_local(module):
            raise ValueError(
                f"{where}, whose gradients would be exchanged twice: leave `DistributedDataParallel(model)` out and "
                "pass and train the model itself; where a trainer insists on it, call "
                "thinwire.integrations.ddp.keep_gradients_local(model) first"
            )
        if kind is Kind.SHARDING:
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


def found_around(optimizer: torch.optim.Optimizer, *, alone: bool, knows_model: bool) -> list[str]:
    """What other live objects do to its parameters, a line each, with what to do. Looks through the whole process.

    alone: is there one rank only? knows_model: was model= given, so that its buffers are sent?
    """
    ours = {id(param) for group in optimizer.param_groups for param in group["params"]}
    wrappers, optimizers, statistics = _live((Kind.DDP, Kind.OPTIMIZER, Kind.STATISTICS))
    holding = [ddp for ddp in wrappers if _is_whole(ddp) and any(id(p) in ours for p in ddp.parameters())]
    lines = []
    if not alone and any(not _keeps_gradients_local(ddp) for ddp in holding):
        lines.append(
            "ddp_left_in: DistributedDataParallel wraps this optimizer's model, so gradients cross the wire twice, in "
            "full: leave `DistributedDataParallel(model)` out; in transformers.Trainer and Accelerate say "
            "with_thinwire(...) (docs/integrations.md); where another trainer insists on it, call "
            "thinwire.integrations.ddp.keep_gradients_local(model) before the optimizer is made"
        )
    for name in _others(optimizer, optimizers, ours):
        lines.append(
            f"other_optimizer class={name}: it holds parameters of this {type(optimizer).__name__}, which only one may "
            "step: give each its own parameters, or delete it; a learning rate scheduler must be made with the one "
            "that steps"
        )
    if not alone and not knows_model and not any(getattr(ddp, "broadcast_buffers", False) for ddp in holding):
        norms = [norm for norm in statistics if _is_whole(norm) and norm.training]
        norms = [norm for norm in norms if norm._buffers.get("running_mean") is not None]
        mine = [norm for norm in norms if any(id(p) in ours for p in norm._parameters.values())]
        if mine:
            lines.append(
                f"buffers_differ modules={len(mine)} class={type(mine[0]).__name__}: each rank has running statistics "
                "of its own data, as nothing sends them: pass model=model to the optimizer's constructor, and they are "
                "rank 0's, as under DistributedDataParallel"
            )
    return lines


def _keeps_gradients_local(ddp: nn.Module) -> bool:
    return getattr(ddp, "thinwire_gradients", None) == LOCAL


def _is_whole(module: nn.Module) -> bool:
    """Not one whose constructor has raised or that is only being made."""
    return {"_parameters", "_buffers", "_modules", "training"} <= vars(module).keys()


def _live(kinds: Sequence[Kind]) -> list[list[Any]]:
    """The live objects of each kind."""
    every = gc.get_objects()
    wanted = {cls: kind for cls in set(map(type, every)) if (kind := kind_of(cls)) in kinds}
    found: dict[Kind | None, list[Any]] = {kind: [] for kind in kinds}
    for thing in [thing for thing in every if type(thing) in wanted]:
        found[wanted[type(thing)]].append(thing)
    return [found[kind] for kind in kinds]


def _others(own: torch.optim.Optimizer, optimizers: list[Any], ours: set[int]) -> list[str]:
    """The classes of other optimizers over some of these parameters. Empties `optimizers`.

    Not those that show our groups as theirs, as trainers' wrappers do; nor those that only a cycle keeps.
    """
    mine = {id(own.param_groups), *map(id, own.param_groups)}
    suspects: list[weakref.ref[Any]] = []
    while optimizers:
        other = optimizers.pop()
        groups = getattr(other, "__dict__", {}).get("param_groups")
        if other is own or not isinstance(groups, list) or id(groups) in mine or any(id(g) in mine for g in groups):
            continue
        params: list[Tensor] = [p for group in groups if isinstance(group, dict) for p in list(group.get("params", ()))]
        if any(id(p) in ours for p in params):
            suspects.append(weakref.ref(other))
    other = groups = params = None  # type: ignore[assignment]
    if suspects:
        gc.collect()
    return sorted({_full_name(type(left)) for found in suspects if (left := found()) is not None})


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
