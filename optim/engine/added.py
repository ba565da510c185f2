"""What others keep in `optimizer.state` beside what it shows: a wrapper's second weights, a projection, a count.

save        copied into the state_dict under `added`, by the parameter's name
load        put back, in place of what was there
regroup     given to ranks that come: tensors, numbers and texts
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from thinwire.optim.engine.algorithm import Algorithm
from thinwire.optim.engine.checking import Row
from thinwire.optim.engine.state import Shown, entries_of
from thinwire.optim.engine.tensor_states import everything

ADDED = "added"
Described = list[list[Any]]
"""Of each entry: the parameter's name, the key, and dtype and shape of a tensor, or None and the value itself."""


def kept(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """The same of all, by parameter, and what has another key as it is: for put_back()."""
    return {key: entries_of(one) if isinstance(one, dict) else one for key, one in state.items()}


def put_back(state: dict[Any, Any], entries: Mapping[Any, Any]) -> None:
    """Into a state that is shown anew."""
    for key, one in entries.items():
        if isinstance(state.get(key), Shown):
            state[key].update(one)
        elif one or not isinstance(one, dict):
            state[key] = one


def collect(optimizer: Algorithm[Any]) -> dict[str, dict[Any, Any]]:
    """Copies, by the parameter's name. Nothing where there is nothing."""
    found = {tensor.name: optimizer.kept_beside(tensor.param) for tensor in everything(optimizer)}
    return {name: {key: _copied(x) for key, x in one.items()} for name, one in found.items() if one}


def row(optimizer: Algorithm[Any], loaded: Mapping[str, Any]) -> Row:
    """What collect() can have given, as checking.refuse() asks it."""
    given, names = loaded.get(ADDED, {}), {tensor.name for tensor in everything(optimizer)}
    fits = isinstance(given, dict) and given.keys() <= names and all(isinstance(one, dict) for one in given.values())
    return ADDED, given, fits, f"must be a dict with a dict of each of some of {len(names)} parameters"


def replace(optimizer: Algorithm[Any], given: Mapping[str, Mapping[Any, Any]]) -> None:
    """What others have there <- copies of these, on the devices of the parameters."""
    for tensor in everything(optimizer):
        one = {key: _copied(x, tensor.param.device) for key, x in given.get(tensor.name, {}).items()}
        optimizer.keep_beside(tensor.param, one)


def described(optimizer: Algorithm[Any]) -> Described:
    """Of each entry, for a rank that is to be given them. Local."""
    rows: Described = []
    for tensor in everything(optimizer):
        for key, x in optimizer.kept_beside(tensor.param).items():
            if isinstance(x, Tensor) and x.layout == torch.strided:
                rows.append([tensor.name, key, str(x.dtype).removeprefix("torch."), list(x.shape)])
            elif x is None or isinstance(x, bool | int | float | str):
                rows.append([tensor.name, key, None, x])
            else:
                rows.append([tensor.name, key, "", type(x).__name__])
    return rows


def refuse_ungiven(rows: Described) -> None:
    """Raises: ValueError, alike on every rank, for what no message can hold."""
    for name, key, dtype, what in rows:
        if dtype == "" or not isinstance(key, str):
            raise ValueError(
                f"optimizer.state of parameter {name} (group and place in it) has {key!r}, "
                f"{what if dtype == '' else 'whose key is no text'}: a rank that comes is given tensors, numbers and "
                "texts under texts. Keep it elsewhere, or take it out before ranks change"
            )


def rooms(optimizer: Algorithm[Any], rows: Described, *, gives: bool) -> dict[str, dict[str, Any]]:
    """Of each entry the value, by parameter and key: this rank's own where it gives, else room for it. Contiguous."""
    own = {tensor.name: optimizer.kept_beside(tensor.param) for tensor in everything(optimizer)}
    device, found = optimizer.space.p_N.device, dict[str, dict[str, Any]]()
    for name, key, dtype, shape in rows:
        if dtype is None:
            value = shape
        elif gives:
            value = own[name][key].detach().to(device).contiguous()
        else:
            value = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        found.setdefault(name, {})[key] = value
    return found


def _copied(x: Any, device: torch.device | None = None) -> Any:
    if not isinstance(x, Tensor):
        return copy.deepcopy(x)
    # A count of steps, as torch.optim keeps it, stays on the CPU.
    return x.detach().to(x.device if device is None or not x.dim() else device, copy=True)
