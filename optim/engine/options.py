"""What every optimizer may be given beside its hyperparameters, by keyword: the ranks, and how gradients get there."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, NoReturn, Self, TypedDict

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from thinwire.comm.default import GivenGroup
from thinwire.comm.groups.nodes import Topology
from thinwire.comm.layout import default_bucket
from thinwire.comm.protocol import FullWire
from thinwire.contract.hyperparameters import MAX_GRAD_NORM
from thinwire.optim.engine.local import local, named_parameters

NonFinite = Literal["raise", "skip"]
"""What a step does about a gradient that is not finite: raise on every rank, or leave the step out on every rank."""


Saves = Literal["together", "rank"]
"""What state_dict() gives: all of the state, so that every rank must call it, or this rank's share of it."""
Gradients = Literal["own", "mean"]
"""What step() leaves in p.grad, where it does not exchange it in full: this rank's own, or the mean of all ranks."""
DDP = ("torch", "DistributedDataParallel")
READERS = {("peft", "AdaLoraModel"), ("peft", "AdamssModel")}
"""Modules that read p.grad after step(), and decide by it what is trained on."""
SHARDING = {("torch", "FullyShardedDataParallel"), ("deepspeed", "DeepSpeedEngine")}
LOCAL = "local"
"""What integrations.ddp.keep_gradients_local writes as `thinwire_gradients`: this wrapper sends no gradient."""


class Options(TypedDict, total=False):
    """The keywords of CheckedOptions, for the constructors that hand them on: `**options: Unpack[Options]`."""

    group: GivenGroup | None
    max_grad_norm: float | None
    non_finite: NonFinite
    overlap: bool
    model: nn.Module | None
    full_exchange: FullWire | None
    topology: Topology


@dataclass(frozen=True, kw_only=True)
class CheckedOptions:
    """The same with their defaults. Raises: ValueError naming the first that cannot be, its value and what is allowed.

    group: the ranks; None: those of torch.distributed's default group, or this process alone. Of a process group of
    torch.distributed, too, what is sent goes over one of the optimizers' own (TorchGroup.apart). Where parameters are
    DTensors those that hold the same shard in other boxes: mesh["replicate"].get_group() (docs/sharded.md).
    max_grad_norm: the gradient is shortened to this 2-norm over all parameters: the mean gradient where it is exchanged
    in full, else each rank its own, which is longer by up to sqrt(ranks), so that the same bound bites harder. With
    overlap the latter is shortened bucket by bucket, by what is known when a bucket goes (clipping.py).
    non_finite: "raise", or "skip": a step with a gradient that is not finite is left out, on every rank alike.
    overlap: gradients are sent while backward runs, wherever the step allows (exchanges.py), and at its end as zero
    where none came. Then every backward but the last before step() belongs inside no_sync(), gradients are not written
    between backward and step(), and a batch is skipped by zero_grad(), on every rank.
    model: the module that is trained, itself and not a wrapper: its buffers become rank 0's, as under DDP, in every
    step that sends something (buffers.py), and a wrapper or another model is refused at once. None: it has no buffers,
    or they may differ between ranks.
    full_exchange: how the mean of a gradient is sent where it is not compressed to one bit: "fp32"; "bf16", rounded;
    "int8", a quarter of fp32's bytes, with error feedback. None: "bf16" where all parameters are bfloat16; "int8" in
    float32 where a compressed optimizer finds the end of its warm-up by itself, with topology "flat"; else "fp32".
    topology: "flat": every rank exchanges with every other. "node_first": exactly inside each box, compressed between
    boxes; a ValueError where boxes of several ranks cannot, as where they have different numbers of ranks. "auto":
    node_first where it can be, else flat. After a regroup(), or made over one rank, "node_first" is "auto".
    """

    group: GivenGroup | None = None
    max_grad_norm: float | None = None
    non_finite: NonFinite = "raise"
    overlap: bool = False
    model: nn.Module | None = None
    full_exchange: FullWire | None = None
    topology: Topology = "flat"

    def __post_init__(self) -> None:
        MAX_GRAD_NORM.check(self.max_grad_norm)
        if self.non_finite not in ("raise", "skip"):
            raise ValueError(f'non_finite = {self.non_finite!r}: must be "raise" or "skip"')
        if self.full_exchange not in (None, "fp32", "bf16", "int8"):
            raise ValueError(f'full_exchange = {self.full_exchange!r}: must be "fp32", "bf16", "int8" or None')
        if self.topology not in ("flat", "node_first", "auto"):
            raise ValueError(f'topology = {self.topology!r}: must be "flat", "node_first" or "auto"')
        if self.model is not None and not isinstance(self.model, nn.Module):
            raise ValueError(
                f"model = {type(self.model).__name__}: must be the torch.nn.Module that is trained; of several, "
                "torch.nn.ModuleList([...])"
            )

    @classmethod
    def of(cls, optimizer: object, given: Mapping[str, Any]) -> Self:
        """What the constructor of `optimizer` was given and has not used itself. Raises: TypeError, ValueError."""
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known:
                raise TypeError(
                    f"{type(optimizer).__name__}() got an unexpected keyword argument {name!r}; beside its own, which "
                    f"its help shows, it takes {', '.join(known)}"
                )
        return cls(**given)


def checked_narrow(given: Collection[str], allowed: tuple[str, ...]) -> tuple[str, ...]:
    """The argument narrow=, in the order of what is allowed. Raises: ValueError."""
    listed = isinstance(given, Collection) and not isinstance(given, str)
    if not listed or any(name not in allowed for name in given):
        raise ValueError(f"narrow = {given!r}: must be some of {allowed}, as in a list")
    return tuple(name for name in allowed if name in given)


def bucket_of(params: Iterable[Tensor]) -> int:
    """Elements of a bucket for these parameters, where none were asked for."""
    known = [param for param in params if not is_lazy(param)]  # those are refused where vectors are laid out
    numel = sum(local(param).numel() for param in known)
    return default_bucket(numel, any(param.device.type == "cuda" for param in known))


def refuse_wrapped(model: nn.Module, param_groups: Sequence[dict[str, Any]]) -> None:
    """Raises: ValueError for a model= with a wrapper that exchanges gradients, or that has none of these parameters.

    Wrappers are known by the names of their classes, so that nothing is imported for it. What can only be seen by
    training is in first_step.py.
    """
    for name, module in model.named_modules():
        cls, classes = type(module).__name__, _classes(module)
        where = f"model = {cls}" if not name else f"model.{name} is a {cls}"
        if DDP in classes and getattr(module, "thinwire_gradients", None) != LOCAL:
            raise ValueError(
                f"{where}, whose gradients would be exchanged twice: leave `DistributedDataParallel(model)` out and "
                "pass and train the model itself; where a trainer insists on it, call "
                "thinwire.integrations.ddp.keep_gradients_local(model) first"
            )
        if classes & SHARDING:
            raise ValueError(
                f"{where}, which leaves a part of the model on each rank, and nothing says of what: leave it out, and "
                "pass and train the model itself, or shard it inside of a box by "
                'fully_shard(model, mesh=mesh["shard"]) (docs/sharded.md)'
            )
    ours = {id(param) for group in param_groups for param in group["params"]}
    before = {id(param): name for name, param in model.named_parameters() if id(param) in ours}
    after = {id(param) for param in named_parameters(model).values()}
    if gathered := [name for at, name in before.items() if at not in after]:
        raise ValueError(
            f"{gathered[0]}: is whole, as FSDP has gathered it for a forward, and will not be trained: take "
            "model.parameters() before the first forward, or call reshard() first on each module that was given to "
            "fully_shard"
        )
    if not before:
        raise ValueError(
            f"model = {type(model).__name__} has none of the parameters that were given: pass the module that is "
            "trained, not a copy of it, OneBitAdam(model.parameters(), model=model)"
        )


def reader_of_gradients(model: nn.Module) -> str | None:
    """The class of a module that reads gradients after step(), where there is one."""
    for module in model.modules():
        if _classes(module) & READERS:
            configs = getattr(module, "peft_config", {}).values()
            if all(getattr(config, "use_asa", True) for config in configs):  # Adamss reads them for that alone
                return type(module).__name__
    return None


def refuse_reader(reader: str, *, compresses: bool) -> None:
    """Raises: RuntimeError for a reader of p.grad, where that is this rank's own in some step."""
    if compresses:
        raise RuntimeError(
            f"model= has a {reader}, which reads p.grad after step() and decides by it what is trained. That is this "
            "rank's own in a compressed step, and of low-precision parameters in every one, so that ranks would decide "
            'differently: set optimizer.gradients = "mean" (for Trainer with_thinwire(..., gradients="mean")). It '
            "exchanges the mean of what is trained in full, 4 bytes a parameter, in each step that sends none"
        )


def refuse_join(**settings: object) -> NoReturn:
    """Raises: RuntimeError where a rank is to be left out of steps, as torch.distributed.algorithms.Join does."""
    raise RuntimeError(
        "join() cannot train on uneven inputs here: a rank that has no more batches would not call the optimizer's "
        "step(), for which the others wait. Give every rank as many batches (DistributedSampler does), or stop all "
        "ranks when the first has none"
    )


def _classes(module: nn.Module) -> set[tuple[str, str]]:
    """By package and name."""
    return {(str(base.__module__).split(".")[0], base.__name__) for base in type(module).__mro__}
