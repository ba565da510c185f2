"""Which parameters and gradients can live in flat vectors, how messages name those that cannot, and whether all ranks
have the same: asked before a parameter is touched, so that a mismatch changes nothing.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from itertools import pairwise, zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from thinwire.comm.calls import refuse_other_calls
from thinwire.comm.errors import WireMismatch
from thinwire.comm.groups.texts import texts_if_they_differ
from thinwire.comm.protocol import Group
from thinwire.optim.engine.local import is_dtensor, local, named_parameters

LOW_PRECISION = (torch.bfloat16, torch.float16)
"""Dtypes of parameters that get a master in float32."""
FROZEN = ", frozen"
"""How the line of a frozen parameter ends."""
WRAPPED = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""What torch.compile and activation checkpointing put into names: who does so has the same ones as who does not."""
SHARD = "; shard "
"""How the line of a DTensor goes on."""
HELD_BACK = "held back by FSDP"
REDUCED = "call model.set_requires_gradient_sync(True) before the last backward of a step"
SAME_SHARDS = (
    "The ranks of group= must hold the same shard, each in a box of its own: shard the model alike in each box, as "
    'fully_shard(model, mesh=mesh["shard"]) with boxes of as many ranks, and give group=mesh["replicate"].get_group()'
)
SAME_ORDER = "Give them in the same order on every rank: model.parameters() as it comes, or sorted by name, not a set"
SUPPORTED = (torch.float32, torch.float64, *LOW_PRECISION)


def labels(param_groups: list[dict[str, Any]]) -> list[list[str]]:
    """What messages call each parameter of each group: its place, its name where it was given with one, its shape."""
    found = []
    for group_index, group in enumerate(param_groups):
        if any(isinstance(param, UninitializedParameter) for param in group["params"]):
            raise ValueError(
                f"group {group_index} has a lazy parameter without a shape: run one batch through the model"
            )
        names = group.get("param_names") or [None] * len(group["params"])
        found.append(
            [
                f"parameter {index} of group {group_index}{'' if name is None else f' {name!r}'}, {tuple(param.shape)}"
                for index, (param, name) in enumerate(zip(group["params"], names, strict=True))
            ]
        )
    return found


def is_trained(param: Tensor) -> bool:
    """Does the optimizer move it? One that requires no gradient is frozen: it is left out of every step, wholly."""
    return param.requires_grad


def compute_dtype(param_groups: list[dict[str, Any]]) -> torch.dtype:
    """float64 where the parameters that are trained are, else float32.

    Raises: ValueError, naming the first parameter that cannot live in one flat vector with those before it. Of one that
    is frozen only that it was not given twice.
    """
    if torch.is_inference_mode_enabled():
        raise ValueError(
            "vectors of an optimizer that are made under torch.inference_mode() cannot be written in training: make "
            "the optimizer, add to it and step it outside, or under torch.no_grad()"
        )
    seen: dict[Tensor, str] = {}
    memory: dict[int, str] = {}
    trained: list[tuple[Tensor, str]] = []
    for group, group_labels in zip(param_groups, labels(param_groups), strict=True):
        if not group["params"]:
            raise ValueError(f"parameter group {param_groups.index(group)} is empty: leave it out")
        for param, label in zip(group["params"], group_labels, strict=True):
            if param in seen:
                raise ValueError(f"{label}: is also {seen[param]}; pass a shared parameter once")
            seen[param] = label
            if not is_trained(param):
                continue
            _refuse_unfit(param, label)
            here = local(param)
            if here.numel() and here.data_ptr() in memory:
                raise ValueError(
                    f"{label}: has the same memory as {memory[here.data_ptr()]}, which a flat vector would separate; "
                    "share one torch.nn.Parameter instead, and pass it once"
                )
            memory[here.data_ptr()] = label
            trained.append((param, label))
            first, first_label = trained[0]
            if is_dtensor(param) != is_dtensor(first):
                plain = label if is_dtensor(first) else first_label
                raise ValueError(
                    f"{plain}: is a plain tensor beside DTensors such as {first_label if plain is label else label}: "
                    "nothing averages its gradient over the ranks that hold their shards. Shard the whole model, "
                    'fully_shard(model, mesh=mesh["shard"]) after its layers; or, where these ranks compute the same '
                    "gradient of it, as beside tensor parallelism, give it to an optimizer of its own"
                )
            if param.device != first.device:
                raise ValueError(
                    f"{label}: is on {param.device}, but {first_label} is on {first.device}; move it there"
                )
            if (param.dtype == torch.float64) != (first.dtype == torch.float64):
                raise ValueError(
                    f"{label}: is {param.dtype}, but {first_label} is {first.dtype}; float64 mixes with no other dtype"
                )
    shown = [(local(param), label) for param, label in trained]
    places = [(p.data_ptr(), p.data_ptr() + p.nbytes, label) for p, label in shown if p.is_contiguous()]
    for (_, stop, one), (start, _, other) in pairwise(sorted(places)):
        if start < stop:
            raise ValueError(
                f"{other}: overlaps in memory with {one}, which a flat vector would separate: give each memory of its "
                "own (.clone()), or make one torch.nn.Parameter of it whose views the model uses"
            )
    if not seen:
        raise ValueError("no parameters: pass model.parameters()")
    if not trained:
        raise ValueError(
            f"all {len(seen)} parameters are frozen: requires_grad is False, and there is nothing to train. Call "
            "requires_grad_(True) on those that are to be trained before the optimizer is made and before step()"
        )
    return torch.float64 if trained[0][0].dtype == torch.float64 else torch.float32


def refuse_unfit_gradient(grad: Tensor, param: Tensor, label: str) -> None:
    """Raises: ValueError for a gradient that cannot be copied to where the parameter's is. Looks at no value."""
    if grad.shape != param.shape or grad.device != param.device or not grad.dtype.is_floating_point:
        raise ValueError(
            f"{label}: its gradient is {grad.dtype} {tuple(grad.shape)} on {grad.device}, the parameter is "
            f"{param.dtype} {tuple(param.shape)} on {param.device}; set p.grad to None and let backward make it"
        )


def without_gradient(step: int, where: str) -> str:
    """What to say of a step before which no parameter got a gradient."""
    return (
        f"step {step}: no parameter of the optimizer has got a gradient on {where}, so there is nothing to learn from. "
        "Does loss.backward() come before step()? Were parameters replaced after the optimizer was made (a new layer, "
        "peft, weight_norm, load_state_dict(assign=True))? Then make the optimizer after that, from model.parameters()"
    )


def is_cut(param: Tensor) -> bool:
    """Is it a part that nothing says what of, as FSDP's first version and ZeRO leave on a rank?"""
    by_deepspeed = hasattr(param, "ds_id")  # ZeRO's stage 3 leaves it empty
    return bool(getattr(param, "_fsdp_flattened", False)) or by_deepspeed


def _refuse_unfit(param: Tensor, label: str) -> None:
    if is_cut(param):
        raise ValueError(
            f"{label}: is a part that FullyShardedDataParallel or ZeRO has cut, and of which nobody can say what it "
            'is a part of. Shard inside of a box by fully_shard(model, mesh=mesh["shard"]) in its place, and give '
            'group=mesh["replicate"].get_group() (docs/sharded.md); or leave out FullyShardedDataParallel and '
            "deepspeed.zero.Init()"
        )
    whole, param = param, local(param)
    if type(param).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise ValueError(
            f"{label}: is a {_kind(param)}, which has no values of its own but makes them of other tensors, such as "
            "quantised ones, so that no step could reach what it holds: train the plain tensors (quantise after "
            "training, or train adapters beside it), and freeze this one with requires_grad_(False)"
        )
    if param.dtype not in SUPPORTED:
        what_to_do = ": train torch.view_as_real(x) in its place" if param.is_complex() else ""
        raise ValueError(f"{label}: dtype {param.dtype}; supported are {', '.join(map(str, SUPPORTED))}{what_to_do}")
    if param.is_inference():
        raise ValueError(
            f"{label}: was made under torch.inference_mode(), so that no gradient can be taken of it: make or load the "
            "model outside of it, or under torch.no_grad()"
        )
    if param.layout != torch.strided or param.is_meta:
        raise ValueError(
            f"{label}: is {param.layout} on {param.device}; it must be dense, and hold values: give it a device and "
            "values first (model.to_empty(device=...), then reset_parameters() or a checkpoint)"
        )
    if whole.numel() == 0:
        raise ValueError(f"{label}: has no elements; leave it out")


def named_as_trained(name: str) -> str:
    """The name of a tensor where nothing is compiled, and nothing checkpointed."""
    for part in WRAPPED:
        name = name.replace(part, "")
    return name


def names_of(param_groups: Sequence[dict[str, Any]], model: nn.Module | None) -> list[str | None]:
    """Of each parameter, in order, what it is called on every rank: in model=, else where it was given with a name."""
    of_model = {} if model is None else {id(param): name for name, param in named_parameters(model).items()}
    found = []
    for group in param_groups:
        given = group.get("param_names") or [None] * len(group["params"])
        for param, name in zip(group["params"], given, strict=True):
            known = of_model.get(id(param), name)
            found.append(None if known is None else named_as_trained(known))
    return found


def shard_of(param: Tensor) -> str:
    """Which shard of a DTensor is here, in words: how it is cut, and which of the parts. Of another tensor nothing."""
    if not is_dtensor(param):
        return ""
    mesh, found = param.device_mesh, []  # type: ignore[attr-defined]
    for at, size, placement in zip(mesh.get_coordinate(), mesh.shape, param.placements, strict=True):  # type: ignore[attr-defined]
        found.append(f"{placement} {at} of {size}" if not placement.is_replicate() else str(placement))
    return ", ".join(found)


def describe(param_groups: list[dict[str, Any]], model: nn.Module | None) -> list[str]:
    """A line for each parameter: its place, name, dtype, shape and whether it is frozen; not its device, in which ranks
    may differ.
    """
    places = [
        (at, index, param) for at, group in enumerate(param_groups) for index, param in enumerate(group["params"])
    ]
    return [
        f"parameter {index} of group {at}{'' if name is None else f' {name!r}'}: {param.dtype} {tuple(param.shape)}"
        f"{SHARD + shard_of(param) if is_dtensor(param) else ''}{'' if is_trained(param) else FROZEN}"
        for (at, index, param), name in zip(places, names_of(param_groups, model), strict=True)
    ]


def refuse_other_order(group: Group, param_groups: Sequence[dict[str, Any]], device: torch.device) -> None:
    """Compare the values that parameters have before rank 0's are sent: the order of those without names. Collective.

    Where all ranks hold the same tensors at other places they differ in the order alone. It cannot be seen where each
    rank has drawn values of its own. 20 bytes a rank. Raises: WireMismatch, alike on every rank; PeerLost.
    """
    params = [param for one in param_groups for param in one["params"]]
    own = [f"{tuple(param.shape)} {digest(param)}" for param in params if is_trained(param)]
    known = [f"{zlib.crc32(chr(10).join(lines).encode()):08x}" for lines in (sorted(own), own)]
    texts = texts_if_they_differ(group, " ".join(known), device)
    if texts is None or len({text.split(" ")[0] for text in texts}) > 1:
        return
    other = next(rank for rank, theirs in enumerate(texts) if theirs != texts[0])
    raise WireMismatch(
        f"ranks 0 and {other} have parameters of the same values in another order: a layer of one would be trained as "
        f"another layer of the other. {SAME_ORDER}; nothing was changed"
    )


def digest(x: Tensor) -> list[int]:
    """Two sums of its bits, of every element and of every second: equal vectors have equal ones. Read on its device.

    Of a DTensor of those that are here.
    """
    x = local(x).detach().contiguous().view(-1)
    bits = x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])
    # In pieces: a sum in more bits than the values have makes a copy of them on CPUs.
    sums = [(piece.sum(dtype=torch.int64), piece[::2].sum(dtype=torch.int64)) for piece in torch.split(bits, 1 << 20)]
    return torch.stack([torch.stack(pair) for pair in sums]).sum(0).tolist()


def _kind(param: Tensor) -> str:
    """What it is beside an nn.Parameter, under the name that its user knows: not that of a base."""
    cls = next(kind for kind in type(param).__mro__ if kind is not torch.nn.Parameter)
    return f"{cls.__module__}.{cls.__qualname__}"


def parts_of(tensor: Tensor) -> list[Tensor]:
    """The tensors that hold its values: itself, or what a wrapper makes them of. None that is cut, or has none."""
    if is_cut(tensor):
        return []
    tensor = local(tensor)
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        return [part for name in names for part in parts_of(getattr(tensor, name))]
    data = tensor.data
    has_values = type(data) is Tensor and data.layout == torch.strided and not (data.is_meta or data.is_quantized)
    return [data] if has_values and data.numel() else []


@torch.no_grad()
def send_values_(group: Group, tensor: Tensor, device: torch.device) -> None:
    """A tensor <- rank 0's, of any dtype, wherever it lies, as bytes. Collective. device: of the group's tensors.

    What parts_of() has no part of is left.
    """
    for data in parts_of(tensor):
        passed = data.to(device).contiguous()  # a copy only where it was not
        group.broadcast_(passed.view(-1).view(torch.uint8))
        if passed.data_ptr() != data.data_ptr():
            data.copy_(passed)


def refuse_other_models(group: Group, call: str, lines: list[str], device: torch.device) -> None:
    """Compare descriptions over all ranks: 16 bytes a rank, and the texts where they differ. Collective.

    call: the one that this rank is in. Raises: WireMismatch naming the first line that differs and both sides, alike on
    every rank; CallMismatch where other ranks are in another call; PeerLost.
    """
    texts = refuse_other_calls(group, call, device, more="\n".join(lines))
    if texts is None:
        return
    other = next(rank for rank, theirs in enumerate(texts) if theirs != texts[0])
    sides = [texts[rank].split("\n") for rank in (0, other)]
    for first, theirs in zip_longest(*sides, fillvalue="no such parameter"):
        if first != theirs:
            frozen = first.removesuffix(FROZEN) == theirs.removesuffix(FROZEN)
            way = "freeze and unfreeze the same parameters at the same step" if frozen else "build the same model"
            todo = f"All ranks must {way}, with the same parameter groups and settings"
            todo = SAME_SHARDS if SHARD in first + theirs else todo
            todo = f"On every rank {REDUCED}" if HELD_BACK in first else todo
            names = [[line.partition(" '")[2] for line in side] for side in sides]
            if names[0] != names[1] and sorted(names[0]) == sorted(names[1]):
                todo = f"These are the same ones in another order. {SAME_ORDER}"
            raise WireMismatch(f"rank 0 has {first}; rank {other} has {theirs}. {todo}; nothing was changed")
