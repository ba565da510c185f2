"""DistributedDataParallel as a wrapper that sends no gradient, for trainers which insist on it.

Under Thinwire's optimizers gradients stay local until step(). DDP averages them in backward. Both at once is an
exchange too many: DDP has then sent all of it uncompressed. Where DDP can be left out, leave it out (docs/own-loop.md).
Where a library wraps the model itself, a communication hook gives every bucket back as it came.

What DDP still sends: rank 0's parameters and buffers when it is made, rank 0's buffers at each forward that syncs
(unless forward_sync_buffers is off), and with find_unused_parameters a map of 4 bytes a parameter tensor in each
backward. What it still costs: each gradient is copied into DDP's bucket and back.
"""

# No `from __future__ import annotations`: DDP compares the annotations of a hook with the classes themselves.

import torch
import torch.distributed as dist
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from thinwire.optim.engine.options import refuse_join

MARK = "thinwire_gradients"
"""The attribute of a wrapper that says what becomes of its gradients: "local" after keep_gradients_local()."""


def keep_gradients_local(ddp_model: DistributedDataParallel) -> DistributedDataParallel:
    """Leave each rank its own gradient in `param.grad`: DDP's reducer sends none from here on. Returns the same model.

    Local; before the first backward, on every rank alike. Modifies ddp_model: its communication hook, and the mark
    `ddp_model.thinwire_gradients = "local"`. A second call does nothing. A deep copy or a pickle has another reducer
    without the hook, and its mark is not "local": call it on the copy.

    no_sync(), static_graph, gradient_as_bucket_view, find_unused_parameters and autocast work as they did. Raises:
    TypeError for what is no DDP model; ValueError for one that sends gradients past the hook, or has another hook.
    """
    refuse_no_ddp(ddp_model)
    if getattr(ddp_model, MARK, None) == "local":
        return ddp_model
    refuse_unfit(ddp_model)
    register(ddp_model, None, leave_gradients)
    setattr(ddp_model, MARK, OfThisReducer("local"))
    return ddp_model


def leave_gradients(
    state: object,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """The hook: the bucket as it is. DDP divides nothing where there is a hook."""
    left: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    left.set_result(bucket.buffer())
    return left


def refuse_no_ddp(model: Module) -> None:
    """Refuse what is not wrapped, or not by DDP itself. Raises: TypeError saying what it is."""
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(_not_ddp(model))


def refuse_unfit(ddp_model: DistributedDataParallel) -> None:
    """Refuse what would send gradients past a hook. Raises: ValueError saying what to do."""
    if ddp_model.mixed_precision is not None:
        raise ValueError(
            f"DistributedDataParallel(mixed_precision={ddp_model.mixed_precision}) averages gradients by itself, in "
            "low precision: leave it out, and use torch.autocast or parameters in bfloat16"
        )
    if ddp_model._delay_all_reduce_params:
        raise ValueError(
            "DistributedDataParallel(delay_all_reduce_named_params=...) averages "
            f"{len(ddp_model._delay_all_reduce_params)} parameters past any communication hook: leave it out"
        )
    if ddp_model._use_python_reducer:
        raise ValueError(
            'torch._dynamo.config.optimize_ddp = "python_reducer" has no buckets for a communication hook: set it to '
            'True or "ddp_optimizer" before the model is wrapped'
        )
    for name, module in ddp_model.module.named_modules():
        if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse:
            raise ValueError(
                f"{name or 'the model'} makes sparse gradients, which DistributedDataParallel keeps out of its dense "
                "buckets: use sparse=False"
            )
    if any(hasattr(param, "_in_backward_optimizers") for param in ddp_model.parameters()):
        raise ValueError(
            "the parameters have optimizers that step in backward (_apply_optimizer_in_backward), before any rank has "
            "the mean gradient: leave those out, and call step() of one optimizer"
        )


def register(ddp_model: DistributedDataParallel, state: object, hook: object) -> None:
    """Make `hook` the model's communication hook, of which DDP takes one. Raises: ValueError where it has one."""
    # Not _comm_hooks, which a copy has without its hook.
    known = ddp_model._get_ddp_logging_data().get("comm_hook")  # type: ignore[no-untyped-call]
    try:
        if known:
            raise RuntimeError(known)
        ddp_model.register_comm_hook(state, hook)  # type: ignore[arg-type]
    except RuntimeError as error:
        raise ValueError(
            f"this DistributedDataParallel has a communication hook already ({known or error}), and takes no second: "
            "leave out its register_comm_hook, or the trainer's setting that makes it, and wrap the model anew"
        ) from error
    ddp_model.join_hook = refuse_join  # type: ignore[method-assign]


class OfThisReducer(str):
    """A mark that a copy of the model does not keep: DDP makes it a reducer without hooks."""

    __slots__ = ()

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (f"{self} before it was copied",)


def _not_ddp(model: Module) -> str:
    kind = type(model).__name__
    inside = getattr(model, "_orig_mod", None)
    if isinstance(inside, DistributedDataParallel):
        return f"model is a compiled DistributedDataParallel ({kind}): call this before torch.compile"
    if "FullyShardedDataParallel" in kind or "FSDP" in kind:
        return (
            f"model is {kind}: its parameters are shards, which Thinwire's optimizers do not support; use DDP or none"
        )
    return (
        f"model is {kind}: must be torch.nn.parallel.DistributedDataParallel. One that is not wrapped has local "
        "gradients already, and needs nothing"
    )
