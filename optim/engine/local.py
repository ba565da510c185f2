"""The part of a tensor that is on this rank: all of it, or of a DTensor its local shard.

`fully_shard(model, mesh=mesh["shard"])` and tensor parallelism leave a DTensor of this box in place of a parameter. The
optimizer trains the shard that is here, as any tensor, with the ranks that hold the same shard in other boxes. FSDP
gathers from the shard's memory by a tensor of its own, which is given other memory with it (lay_in).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.optim.engine.lying import holders

_are_dtensors: dict[type, bool] = {Tensor: False, nn.Parameter: False}
"""By type of tensor. It is asked of every parameter and gradient, several times a step."""


def is_dtensor(x: object) -> bool:
    """Is it a DTensor? Nothing is imported for it: where nobody has imported DTensor there is none."""
    kind = type(x)
    found = _are_dtensors.get(kind)
    if found is None:
        dtensor = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
        found = _are_dtensors[kind] = dtensor is not None and issubclass(kind, dtensor)
    return found


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """By name. Those that FSDP has gathered for a forward are given back first, and are shards again.

    After a forward without a backward, as in evaluation, the root's stand whole in the model in place of the shards.
    Local; the next forward gathers them again.
    """
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    for module in model.modules():
        if kind is not None and isinstance(module, kind):
            module.reshard()  # of this module alone
    return dict(model.named_parameters())


def sharders(params: Sequence[Any]) -> list[Any]:
    """What of FSDP reduces the gradients of these parameters: its FSDPParamGroups, which a parameter does not know."""
    ours, found = set(map(id, params)), []
    states = getattr(sys.modules.get("torch.distributed._composable_state"), "_module_state_mapping", {})
    for state in [reference() for reference in states.values()]:
        several = getattr(state, "_fsdp_param_groups", None)  # torch 2.11 may have one alone
        for one in several if several is not None else [getattr(state, "_fsdp_param_group", None)]:
            if one is not None and any(id(each.sharded_param) in ours for each in one.fsdp_params):
                found.append(one)
    return found


def local(x: Tensor) -> Tensor:
    """What of it is here, in its own memory; of a plain tensor all."""
    # to_local() makes a new parameter of a parameter, some microseconds, and a step asks several times for each.
    return x._local_tensor if is_dtensor(x) else x  # type: ignore[attr-defined]


def local_gradient(grad: Tensor, param: Tensor) -> Tensor:
    """What of a gradient belongs to what is here of its parameter.

    Collective in the parameter's mesh where backward has left it in other pieces than the parameter, as a sum that is
    still to be made (Partial); all of these ranks have it so.
    """
    if is_dtensor(grad) and grad.placements != param.placements:  # type: ignore[attr-defined]
        grad = grad.redistribute(param.device_mesh, param.placements)  # type: ignore[attr-defined]
    return local(grad)


def as_dtensor(here: Tensor, param: Any) -> Tensor:
    """What is here of a gradient, or of another value of a parameter, laid out as that is: in the same memory.

    A DTensor where the parameter is one, else itself.
    """
    if not is_dtensor(param):
        return here
    kind = type(param.data)  # not nn.Parameter
    made: Tensor = kind.from_local(
        here, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )
    return made


def whole(here: Tensor, param: Any) -> Tensor:
    """All of a value of which this is here, laid out as the parameter: gathered over its mesh, collective there."""
    return as_dtensor(here, param).full_tensor() if is_dtensor(param) else here  # type: ignore[attr-defined]


def part_of(whole: Tensor, param: Any) -> Tensor:
    """What is here of a value that this rank has all of, cut as the parameter is. Local."""
    if not is_dtensor(param):
        return whole
    mesh, tensors = param.device_mesh, sys.modules["torch.distributed.tensor"]
    copies = [tensors.Replicate()] * mesh.ndim
    cut: Tensor = tensors.DTensor.from_local(whole, mesh, copies, run_check=False).redistribute(mesh, param.placements)
    return local(cut)


def mark(x: Tensor) -> tuple[int, int]:
    """Changes when its memory is replaced, or written by anything but `.data`."""
    if not is_dtensor(x):
        return x.data_ptr(), x._version
    here = local(x)
    return here.data_ptr(), here._version + x._version


def lay_in(here: Tensor, param: Any, gatherer: Any) -> bool:
    """Have the shard of a DTensor lie in this memory, contiguous, which has its values. Modifies param and gatherer.

    gatherer: FSDP's FSDPParam of it; None: nothing gathers it. False, and nothing is modified, where FSDP keeps the
    shard longer than it is, as of rows that the ranks do not divide, or pinned, and where anything else lies in its
    memory: who looks at that is to see every step.
    """
    now = local(param)
    known = [now]
    if gatherer is not None:
        kept = getattr(gatherer, "_sharded_param_data", None)
        if type(kept) is not Tensor or gatherer.sharded_param is not param or getattr(gatherer, "pin_memory", True):
            return False
        if (kept.data_ptr(), kept.numel()) != (now.data_ptr(), now.numel()):
            return False
        known.append(kept)
    ours = len(known) + sum(count <= _references_of_a_lone_base() for count in _references_of_bases(known))
    if type(now) is not Tensor or holders(now.untyped_storage()) > ours:
        return False
    if now.device.type == "cpu" and now.is_shared():  # type: ignore[no-untyped-call]
        return False
    param._local_tensor = here
    if gatherer is not None:
        gatherer._sharded_param_data = here.view(-1)
    return True


def _references_of_bases(views: Sequence[Tensor]) -> list[int]:
    """How often Python and torch refer to each tensor that these are views of."""
    bases = {id(view._base): view._base for view in views if view._base is not None}
    return [sys.getrefcount(base) for base in bases.values()]


@functools.cache
def _references_of_a_lone_base() -> int:
    """Of one that nothing but its views holds, as FSDP's padded shard: another number in other versions of torch."""
    (found,) = _references_of_bases([torch.zeros(1, dtype=torch.float32, device="cpu").view(1)])
    return found
