"""What a script's loop changes besides what optimizers step: taken back with a lost step, given to newcomers, saved.

Anything with a state_dict() may be registered. A step that was lost is made again, so whatever moved in it has to be as
it was before. To copy all of it at each step would double the cost of an average of the weights. So:

    numbers, texts, lists      copied when the batch is given out
    tensors that move between the batch and optimizer.step(), as the statistics of a batch norm do    copied then too
    all other tensors          copied at the moment of the loss, inside of step(): what follows it in the loop's body
                               has not moved them yet

Which tensors move before the step is seen in the first batch, in which all are copied and compared, and from then on by
their version counters. Where several optimizers step with one batch, before the last of their steps.
"""

from __future__ import annotations

import copy
import json
import logging
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from thinwire.comm.groups.texts import gather_texts
from thinwire.comm.protocol import Group
from thinwire.optim import FlatOptimizer
from thinwire.optim.engine.giving import give
from thinwire.workers.checkpoints.manifest import from_json, to_json
from thinwire.workers.checkpoints.shard import DTYPES

logger = logging.getLogger(__name__)

Optimizers = tuple[FlatOptimizer[Any], ...]

State = tuple[Any, dict[str, Tensor]]
"""Plain values by name, and the tensors that were taken out of them, by their place."""

_TENSOR, _ARRAY, _DTYPE = "thinwire.tensor", "thinwire.array", "dtype"
"""Keys of what stands in a structure where a tensor or an array of numpy was taken out; its type, where no checkpoint
holds that."""

_SPARSE, _PARTS = "thinwire.sparse", "parts"
"""Keys of what stands where a sparse tensor was: its layout, and its indices and values, each as a tensor is; beside
these its size, and whether it is coalesced."""

_COMPRESSED: dict[torch.layout, tuple[str, str]] = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}
"""By layout: the indices that are compressed, and the plain ones."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By the bytes of an element: what holds the bits of one of any other type, as the states of generators have."""


@dataclass(frozen=True, slots=True)
class _Object:
    """How the state of one object is read and written. volatile: a step that is lost takes it back."""

    read: Callable[[], Any]
    write: Callable[[Any], object]
    volatile: bool = True


@dataclass(slots=True)
class _Kept:
    """A tensor as it was when the batch was given out. copied: its values then; None: not copied so far."""

    live: Tensor
    version: int
    copied: Tensor | None

    @property
    def has_moved(self) -> bool:
        return self.live._version != self.version


class Registered:
    """All that one script has registered, by name, beside its optimizers.

    optimizers: in the order in which they were registered, the same on every rank. The first one's phase and rate are
    the run's.
    """

    def __init__(self, *optimizers: FlatOptimizer[Any]) -> None:
        self.optimizers = optimizers
        self._objects: dict[str, _Object] = {}
        self._modules: dict[str, nn.Module] = {}
        self._moves: set[str] = set()
        self._has_seen = self._has_learned = False
        self._plain: dict[str, Any] = {}
        self._kept: dict[str, _Kept] = {}
        self._hypers: list[dict[str, Any]] = []

    @property
    def names(self) -> list[str]:
        """In order of registration."""
        return list(self._objects)

    @property
    def modules(self) -> list[str]:
        """The names under which modules are registered."""
        return list(self._modules)

    def parameter_names(self) -> dict[int, list[str]]:
        """What the modules call each parameter, by its id: see weight_name."""
        found: dict[int, list[str]] = {}
        for module, value in self._modules.items():
            for name, param in value.named_parameters(remove_duplicate=False):
                found.setdefault(id(param), []).append(weight_name(self.modules, module, name))
        return found

    def model_tensors(self) -> dict[str, Tensor]:
        """The live tensors of the modules' state_dicts, by weight_name."""
        found: dict[str, Tensor] = {}
        for module, value in self._modules.items():
            state = {name: x for name, x in value.state_dict(keep_vars=True).items() if isinstance(x, Tensor)}
            found.update({weight_name(self.modules, module, name): x for name, x in state.items()})
        return found

    def add(self, name: str, value: Any, *, volatile: bool = True) -> None:
        """Raises: TypeError where nothing can be read from it or written to it."""
        read, write = _access(name, value, self.optimizers)
        self._objects[name] = _Object(read, write, volatile)
        if isinstance(value, nn.Module):
            self._modules[name] = value
        self._has_seen = False

    def refuse_unwritable(self) -> None:
        """Raises: ValueError naming the object and the place of what no checkpoint and no message can hold, or what
        could not be put back."""
        plain, _ = self.collected()
        for name, value in plain.items():
            to_json(value, f"run.register({name}=...): its state")
        for name, tensor in self.model_tensors().items():
            if _is_expanded(tensor):
                raise ValueError(
                    f"run.register(): {name} of a module is an expanded tensor, whose elements share memory, and could "
                    "not be put back: register its clone() as buffer"
                )

    def collected(self) -> State:
        """The state of all: plain values by name, and the live tensors that were taken out of them."""
        tensors: dict[str, Tensor] = {}
        return {name: take_apart(one.read(), name, tensors) for name, one in self._objects.items()}, tensors

    def refuse_others(self, plain: Any) -> None:
        """Raises: ValueError where what collected() or give() gave was registered by another script."""
        if set(plain) != set(self._objects):
            raise ValueError(
                f"what is to be loaded has {sorted(plain)} registered, and this script {sorted(self._objects)}: "
                "register the same objects under the same names, or begin a new run in another folder"
            )

    def load(self, plain: Any, tensors: Mapping[str, Tensor]) -> None:
        """Write what collected() or give() gave. Raises: ValueError where it was registered by another script."""
        self.refuse_others(plain)
        for name, one in self._objects.items():
            one.write(_as_there(one.read(), put_together(plain[name], tensors)))

    def give(self, group: Group, path: tuple[int, ...], device: torch.device) -> State | None:
        """What the first rank of the path has, for load() on the others of it; None on all other ranks.

        Collective, and nothing is changed. Raises: PeerLost.
        """
        source = path[0]
        plain, tensors = self.collected() if group.rank == source else ({}, {})
        rows = [[name, str(x.dtype).removeprefix("torch."), list(x.shape)] for name, x in tensors.items()]
        sent = json.dumps([to_json(plain), rows]).encode() if group.rank == source else b""
        plain, rows = json.loads(gather_texts(group, sent, device)[source])
        given: dict[str, Tensor] = {}
        for name, dtype, shape in rows:
            empty = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
            passed = tensors[name].to(device).contiguous() if group.rank == source else empty
            if passed.numel():
                give(group, passed.reshape(-1).view(torch.uint8), path)
            given[name] = passed
        return (from_json(plain), given) if group.rank in path[1:] else None

    @torch.no_grad()
    def remember(self) -> None:
        """A batch is given out: what follows may have to be taken back."""
        tensors: dict[str, Tensor] = {}
        volatile = {name: one for name, one in self._objects.items() if one.volatile}
        self._plain = {name: take_apart(one.read(), name, tensors) for name, one in volatile.items()}
        self._has_learned = self._has_seen
        copies = self._moves if self._has_learned else tensors.keys()
        self._kept = {name: _Kept(x, x._version, x.clone() if name in copies else None) for name, x in tensors.items()}
        self._hypers = [
            {key: copy.deepcopy(value) for key, value in g.items() if key != "params"} for g in self._groups()
        ]

    @torch.no_grad()
    def before_step(self) -> None:
        """optimizer.step() begins: see what has moved since the batch was given out."""
        for name, kept in self._kept.items():
            by_value = not self._has_learned and kept.copied is not None and not torch.equal(kept.live, kept.copied)
            if kept.has_moved or by_value:
                self._moves.add(name)
        self._has_seen = True

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @torch.no_grad()
    def keep(self) -> None:
        """The step was lost: copy what is still as it was, before the rest of the loop's body moves it."""
        for name, kept in self._kept.items():
            if kept.copied is None:
                if kept.has_moved:
                    logger.warning(
                        "not_taken_back name=%s reason=it moved before optimizer.step() for the first time, in a step "
                        "that was lost: it keeps what that step did to it, and is copied from now on",
                        name,
                    )
                kept.copied = kept.live.clone()

    def put_back(self) -> None:
        """All is as when the batch was given out, hyperparameters of the optimizers too."""
        self.keep()
        copies = {name: kept.copied for name, kept in self._kept.items() if kept.copied is not None}
        for name, plain in self._plain.items():
            one = self._objects[name]
            one.write(_as_there(one.read(), put_together(plain, copies)))
        for group, hyper in zip(self._groups(), self._hypers, strict=False):
            for key in set(group) - set(hyper) - {"params"}:
                del group[key]
            group.update(hyper)
        self._kept, self._plain = {}, {}


def weight_name(modules: list[str], module: str, name: str) -> str:
    """A weight's name among those of all modules: its own where there is one, else the module's before it."""
    return name if modules == [module] else f"{module}.{name}"


def _access(name: str, value: Any, optimizers: Optimizers) -> tuple[Callable[[], Any], Callable[[Any], object]]:
    """How to read and to write it."""
    if isinstance(value, nn.Module):
        return lambda: _module_state(value, optimizers), lambda state: _load_module(name, value, state, optimizers)
    if isinstance(value, dict):
        return lambda: value, lambda state: _refill(value, state)
    if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        return value.state_dict, value.load_state_dict
    if isinstance(value, random.Random) or value is random:
        return value.getstate, value.setstate
    if isinstance(value, np.random.Generator):
        return lambda: value.bit_generator.state, lambda state: setattr(value.bit_generator, "state", state)
    if hasattr(value, "get_state") and hasattr(value, "set_state"):  # torch.Generator, RandomState, numpy.random
        return value.get_state, lambda state: value.set_state(state.cpu() if isinstance(state, Tensor) else state)
    raise TypeError(
        f"run.register({name}=...): a {type(value).__name__} has no state_dict() and load_state_dict(); give it both, "
        "or register a dict, a module or a random number generator"
    )


def _refill(mine: Any, state: Any) -> Any:
    """`state`, in the containers and tensors that are there: the script holds these by names of its own."""
    if isinstance(mine, dict) and isinstance(state, dict):
        filled = {key: _refill(mine.get(key), value) for key, value in state.items()}
        mine.clear()
        mine.update(filled)
        return mine
    if isinstance(mine, list) and isinstance(state, list):
        mine[:] = [_refill(mine[at] if at < len(mine) else None, value) for at, value in enumerate(state)]
        return mine
    if (
        isinstance(mine, Tensor)
        and isinstance(state, Tensor)
        and (mine.shape, mine.dtype, mine.layout) == (state.shape, state.dtype, state.layout)
        and mine.layout not in _COMPRESSED  # these take only what has as many values
        and not _is_expanded(mine)
    ):
        with torch.no_grad():
            return mine.copy_(state)
    if (
        isinstance(mine, np.ndarray)
        and isinstance(state, np.ndarray)
        and mine.flags.writeable
        and (mine.shape, mine.dtype) == (state.shape, state.dtype)
    ):
        mine[...] = state
        return mine
    return _as_there(mine, state)


def _is_expanded(tensor: Tensor) -> bool:
    """Do elements of it share memory, so that it cannot be written?"""
    if tensor.layout != torch.strided:
        return False
    return any(not stride and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def _as_there(mine: Any, state: Any) -> Any:
    """`state`, in containers of the kinds that are there: messages and checkpoints know only dicts, lists and tuples.

    A Counter that has become a dict would raise at the next new key, and only where a worker was lost.
    """
    if isinstance(mine, dict) and isinstance(state, dict):
        found = {key: _as_there(mine.get(key), value) for key, value in state.items()}
        if type(mine) is dict:
            return found
        made = copy.copy(mine)  # with what it is made with, such as the factory of a defaultdict
        made.clear()
        made.update(found)
        return made
    if isinstance(mine, list | tuple) and isinstance(state, list | tuple) and len(mine) == len(state):
        items = [_as_there(*pair) for pair in zip(mine, state, strict=True)]
        if isinstance(mine, list):
            return items
        return type(mine)._make(items) if hasattr(mine, "_make") else tuple(items)  # a named tuple
    return state


def _module_state(module: nn.Module, optimizers: Optimizers) -> dict[str, Any]:
    """All of its state_dict but what an optimizer steps."""
    stepped = {id(param) for one in optimizers for group in one.param_groups for param in group["params"]}
    return {name: value for name, value in module.state_dict(keep_vars=True).items() if id(value) not in stepped}


@torch.no_grad()
def _load_module(name: str, module: nn.Module, state: dict[str, Any], optimizers: Optimizers) -> None:
    mine = _module_state(module, optimizers)
    if mine.keys() != state.keys():
        raise ValueError(
            f"the module registered as {name!r} has {sorted(mine.keys() - state.keys())}, which what is loaded lacks, "
            f"and lacks {sorted(state.keys() - mine.keys())}: make the same module"
        )
    module.load_state_dict(state, strict=False)


def take_apart(value: Any, where: str, tensors: dict[str, Tensor]) -> Any:
    """A copy of a structure whose tensors are put into `tensors` instead, by their place."""
    while where in tensors:  # of keys 1 and "1"
        where += "'"
    if isinstance(value, Tensor):
        return _without_tensor(value.detach(), where, tensors)
    if type(value).__module__ == "numpy":
        if getattr(value, "shape", ()) == ():
            return value.item()
        try:
            taken = torch.from_numpy(value.copy())
        except TypeError as error:
            raise TypeError(f"run.register(): {where} is an array of {value.dtype}, which torch has not") from error
        return {_ARRAY: where, **_take_out(taken, where, tensors)}
    if isinstance(value, dict):
        return {key: take_apart(item, f"{where}.{key}", tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [take_apart(item, f"{where}.{index}", tensors) for index, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    return value


def _without_tensor(tensor: Tensor, where: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """What stands in the structure in its place. Raises: TypeError for what is neither strided nor sparse."""
    if tensor.layout == torch.strided and not tensor.is_quantized:
        return {_TENSOR: where, **_take_out(tensor, where, tensors)}
    copied = tensor.clone()  # what changes it gives it other parts, with version counters of their own
    found: dict[str, Any] = {_SPARSE: str(tensor.layout).removeprefix("torch."), "size": list(tensor.shape)}
    if tensor.layout == torch.sparse_coo:
        found["coalesced"] = tensor.is_coalesced()
        parts = [copied._indices(), copied._values()]
    elif tensor.layout in _COMPRESSED:
        compressed, plain = _COMPRESSED[tensor.layout]
        parts = [getattr(copied, compressed)(), getattr(copied, plain)(), copied.values()]
    else:
        what = "quantized" if tensor.is_quantized else f"of layout {tensor.layout}"
        raise TypeError(f"run.register(): {where} is a tensor {what}, which no checkpoint holds: register its parts")
    return {**found, _PARTS: [_without_tensor(x, f"{where}.{at}", tensors) for at, x in enumerate(parts)]}


def _sparse(form: Mapping[str, Any], parts: list[Tensor]) -> Tensor:
    """What `_without_tensor` was given, of its parts."""
    layout: torch.layout = getattr(torch, form[_SPARSE])
    if layout == torch.sparse_coo:
        indices, values = parts
        made = torch.sparse_coo_tensor(indices, values, form["size"], check_invariants=False, device="cpu")
        return made._coalesced_(form["coalesced"])
    compressed, plain, values = parts
    return torch.sparse_compressed_tensor(
        compressed, plain, values, form["size"], layout=layout, check_invariants=False
    )


def _take_out(tensor: Tensor, where: str, tensors: dict[str, Tensor]) -> dict[str, str]:
    """Put it into `tensors`, as one of the same memory that a checkpoint can hold. Returns what tells its own type."""
    if tensor.dtype in DTYPES:
        tensors[where] = tensor
        return {}
    plain = (
        torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor.view(_BITS[tensor.element_size()])
    )
    tensors[where] = plain
    return {_DTYPE: str(tensor.dtype).removeprefix("torch.")}


def _put_in(tensor: Tensor, dtype: str | None) -> Tensor:
    """What `_take_out` was given."""
    if dtype is None:
        return tensor
    own: torch.dtype = getattr(torch, dtype)
    return torch.view_as_complex(tensor) if own.is_complex else tensor.view(own)


def put_together(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The structure again, with these tensors. Shares memory with them."""
    if isinstance(value, dict):
        if value.keys() - {_DTYPE} == {_TENSOR}:
            return _put_in(tensors[value[_TENSOR]], value.get(_DTYPE))
        if value.keys() - {_DTYPE} == {_ARRAY}:
            return _put_in(tensors[value[_ARRAY]], value.get(_DTYPE)).cpu().numpy()
        if _SPARSE in value and _PARTS in value:
            return _sparse(value, [put_together(part, tensors) for part in value[_PARTS]])
        return {key: put_together(item, tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [put_together(item, tensors) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value
