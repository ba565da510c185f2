"""torch.distributed.checkpoint: the state of an optimizer by parameter, for other numbers of boxes and of their ranks.

    dcp.save({"model": model.state_dict(), "optimizer": by_parameter(optimizer)}, checkpoint_id=folder)

    state = {"model": model.state_dict(), "optimizer": by_parameter(optimizer)}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    load_by_parameter(optimizer, state["optimizer"])

What state_dict() has is of this rank's shards, end to end. Here each moment of each parameter, and R of it, is a tensor
laid out as the parameter, a DTensor where that is one. So the checkpoint reshards them as it reshards the model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from thinwire.optim.engine import checking, saving
from thinwire.optim.engine.local import as_dtensor, local
from thinwire.optim.engine.optimizer import FlatOptimizer
from thinwire.optim.engine.parameters import names_of
from thinwire.optim.engine.state import MASTER, error_memories, sizes
from thinwire.optim.engine.tensor_states import everything, order_of, taken

PLAIN = "plain"
"""The key of all that is no tensor of a parameter, as JSON."""


def by_parameter(optimizer: FlatOptimizer[Any]) -> dict[str, Any]:
    """The state of an optimizer, and what dcp.load is to fill in. Collective, as state_dict(): every rank calls it.

    "NAME/exp": a tensor or DTensor for each parameter and vector, by the parameter's name in model=, where it was given
    with one, or its place "group.index". PLAIN: the rest. Copies; the run goes on as after state_dict(). Raises: as
    state_dict(); ValueError where parameters of one name are several.
    """
    whole = optimizer.state_dict()
    order, names = order_of(optimizer), _names(optimizer)
    vectors = {**whole["vectors"], **whole["residuals"]}
    masters = checking.masters(whole.get(MASTER), order.tensors)
    counts = [(steps, seen) for _, steps, seen in whole["entries"]]
    states, numbers = taken(order.tensors, vectors, masters, counts), _numbers(optimizer)
    apart = ("vectors", "residuals", MASTER, "state", "shards")
    plain = {key: value for key, value in whole.items() if key not in apart}
    found: dict[str, Any] = {PLAIN: json.dumps({**plain, "shapes": _shapes(optimizer)})}
    for tensor in order.tensors:
        for name, x in states[tensor.param].values.items():
            value = x.clone() if name in numbers else as_dtensor(x.clone().view(tensor.shape), tensor.param)
            found[f"{names[tensor.name]}/{name}"] = value
    return found


def load_by_parameter(optimizer: FlatOptimizer[Any], state: Mapping[str, Any]) -> None:
    """Go on from what dcp.load has filled in of by_parameter(), saved with any number of boxes and ranks. Local.

    Raises: ValueError saying what differs; then nothing has changed.
    """
    plain = _plain(state)
    for group in plain["param_groups"]:
        if "betas" in group:
            group["betas"] = tuple(group["betas"])
    names, order = _names(optimizer), order_of(optimizer)
    expected, given = [tensor.name for tensor in order.tensors], [name for name, *_ in plain["entries"]]
    if plain["shapes"] != _shapes(optimizer):
        raise ValueError(
            f"the checkpoint is of parameters of the shapes {plain['shapes']}, and this optimizer has "
            f"{_shapes(optimizer)}: build the same model"
        )
    if given != expected:
        raise ValueError(
            f"the checkpoint has the state of the parameters {given}, and by_parameter() has asked for that of "
            f"{expected}: freeze and unfreeze them as when it was saved, and load then"
        )

    def vector(name: str) -> Tensor:
        is_number = name in _numbers(optimizer)
        parts = [_tensor(state, f"{names[t.name]}/{name}", None if is_number else t.param) for t in order.tensors]
        if is_number:
            return torch.cat(parts)
        whole_N = parts[0].new_zeros(order.numel)
        for part, tensor in zip(parts, order.tensors, strict=True):
            whole_N[tensor.start : tensor.stop] = part.reshape(-1)
        return whole_N

    masters = [local(x) for t in order.tensors if (x := state.get(f"{names[t.name]}/{MASTER}")) is not None]
    optimizer.load_state_dict(
        {
            **plain,
            **{key: value for key, value in saving.identity(optimizer).items() if key in ("shapes", "shards")},
            "state": {},
            "vectors": {name: vector(name) for name in sizes(optimizer.vectors, 0)},
            "residuals": {name: vector(name) for name in error_memories(optimizer.vectors)},
            **({MASTER: torch.cat([master.reshape(-1) for master in masters])} if masters else {}),
        }
    )


def _plain(state: Mapping[str, Any]) -> dict[str, Any]:
    try:
        plain = json.loads(state[PLAIN])
        groups = plain["param_groups"]
        fits = isinstance(plain["shapes"], list) and all(len(entry) == 3 for entry in plain["entries"])
        fits = fits and isinstance(groups, list) and all(isinstance(group, dict) for group in groups)
    except (KeyError, TypeError, ValueError):
        fits = False
    if not fits:
        found = repr(state.get(PLAIN, "nothing"))
        raise ValueError(
            f"the state has {found[:100]} by the key {PLAIN!r}, which is not what by_parameter() has written there: "
            "save and load all of what it gives"
        )
    return dict(plain)


def _tensor(state: Mapping[str, Any], key: str, param: Tensor | None) -> Tensor:
    """What is here of it. param: that it is laid out as; None: it is one number."""
    x = state.get(key)
    if not isinstance(x, Tensor):
        raise ValueError(
            f"the state has {'nothing' if x is None else type(x).__name__} by the key {key!r}, where a tensor belongs: "
            "give model= as when it was saved, so that parameters have the same names, and load all that "
            "by_parameter() gives"
        )
    here = local(x)
    if param is not None and here.shape != local(param).shape:
        raise ValueError(
            f"the state has {list(here.shape)} by the key {key!r}, and of this parameter {list(local(param).shape)} is "
            "here: let dcp.load fill in what by_parameter() of this optimizer gives, which reshards it"
        )
    return here


def _numbers(optimizer: FlatOptimizer[Any]) -> set[str]:
    """The vectors that have a number for each parameter, by name."""
    wide = optimizer.space.p_N.numel()
    return {name for name, size in sizes(optimizer.vectors, wide).items() if size != wide}


def _shapes(optimizer: FlatOptimizer[Any]) -> list[list[int]]:
    """Of whole parameters, in flat order."""
    return [list(tensor.param.shape) for tensor in everything(optimizer)]


def _names(optimizer: FlatOptimizer[Any]) -> dict[str, str]:
    """What each parameter is called in the checkpoint, by its place."""
    known = iter(names_of(optimizer.param_groups, optimizer.model))
    groups = enumerate(optimizer.param_groups)
    found = {f"{at}.{i}": next(known) or f"{at}.{i}" for at, group in groups for i in range(len(group["params"]))}
    if len(set(found.values())) < len(found):
        raise ValueError(f"parameters of one name are several: {sorted(found.values())}")
    return found
