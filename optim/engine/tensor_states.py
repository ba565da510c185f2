"""The state of an optimizer, tensor by tensor: taken out of one layout, and put into another.

All that moves state is that:

                            taken from                                 put into
    save                    the live vectors                           a state_dict
    load                    a state_dict                               the live vectors
    freeze, unfreeze, add   the live vectors                           live vectors of another layout
    regroup                 a peer's live vectors                      a newcomer's, of the same layout (giving.py)

A frozen parameter lies in no live vector. Its state is an entry like any other, kept in optimizer.frozen_states; one
that was never trained has none. Entries stand in one order: as they are laid out, then frozen ones, end to end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.optim.engine.ages import Age
from thinwire.optim.engine.algorithm import Algorithm
from thinwire.optim.engine.flat import FlatSpace
from thinwire.optim.engine.local import local
from thinwire.optim.engine.parameters import LOW_PRECISION
from thinwire.optim.engine.places import FlatTensor, Places, places
from thinwire.optim.engine.state import MASTER, TensorState, error_memories, put, replicated, sizes


@dataclass(frozen=True, slots=True)
class Order:
    """Where entries stand in a vector of all of them: num_live as they are laid out, then frozen ones, end to end.

    numel_live, numel: elements of the first, and of all.
    """

    tensors: list[FlatTensor]
    num_live: int
    numel_live: int
    numel: int

    @classmethod
    def of(cls, live: Places | FlatSpace, frozen: Iterable[FlatTensor]) -> Order:
        """The entries of what is laid out, and of those that are frozen."""
        found, at = list(live.tensors), live.layout.numel
        for one in frozen:
            found.append(FlatTensor(one.param, at, at + local(one.param).numel(), one.label, one.name))
            at = found[-1].stop
        return cls(found, len(live.tensors), live.layout.numel, at)


Entry = tuple[str, int, int | None]
"""What plain values say of the state of a parameter: its name, the steps that it was in, and as TensorState.seen."""


def everything(optimizer: Algorithm[Any]) -> list[FlatTensor]:
    """All parameters in flat order, frozen ones too."""
    return places(optimizer.param_groups, lambda param: True).tensors


def frozen_names(optimizer: Algorithm[Any]) -> list[str]:
    """The parameters that are not laid out."""
    laid_out = {tensor.name for tensor in optimizer.space.tensors}
    return [tensor.name for tensor in everything(optimizer) if tensor.name not in laid_out]


def order_of(optimizer: Algorithm[Any]) -> Order:
    """Where the entries of now stand."""
    return Order.of(optimizer.space, [one for one in everything(optimizer) if one.param in optimizer.frozen_states])


@torch.no_grad()
def parameters(optimizer: Algorithm[Any]) -> Tensor:
    """Those that have a state, where entries stand: of low precision their masters, where these are still true."""
    found = [optimizer.space.p_N]
    for tensor in order_of(optimizer).tensors[len(optimizer.space.tensors) :]:
        here = local(tensor.param).reshape(-1)
        value = here.to(optimizer.space.p_N)
        if (master := optimizer.frozen_states[tensor.param].values.get(MASTER)) is not None:
            value = torch.where(master.to(here.dtype) == here, master, value)
        found.append(value)
    return torch.cat(found) if len(found) > 1 else found[0]


def frozen_states(optimizer: Algorithm[Any]) -> list[TensorState]:
    """Those of optimizer.frozen_states in the order of entries."""
    frozen = order_of(optimizer).tensors[len(optimizer.space.tensors) :]
    return [optimizer.frozen_states[tensor.param] for tensor in frozen]


def entries(optimizer: Algorithm[Any]) -> list[Entry]:
    """Of each parameter that has a state."""
    counts = [age.counts(optimizer.num_steps, optimizer.num_updates) for age in optimizer.ages]
    counts += [(state.steps, state.seen) for state in frozen_states(optimizer)]
    return [(tensor.name, *count) for tensor, count in zip(order_of(optimizer).tensors, counts, strict=True)]


def joined(x: Tensor, name: str, more: Sequence[TensorState]) -> Tensor:
    """A vector of what is laid out, with that of the entries after it; itself where there are none."""
    return torch.cat([x, *(state.values[name] for state in more)]) if more else x


def taken(
    tensors: Sequence[FlatTensor],
    vectors: Mapping[str, Tensor],
    masters: Mapping[Tensor, Tensor],
    counts: Iterable[tuple[int, int | None]],
) -> dict[Tensor, TensorState]:
    """The states of these tensors, as views. vectors: of all elements, or of a number each. counts: steps and seen."""
    found = {}
    for i, (tensor, (steps, seen)) in enumerate(zip(tensors, counts, strict=True)):
        values = {name: _part(x, i, tensor, len(tensors)) for name, x in vectors.items()}
        if (master := masters.get(tensor.param)) is not None:
            values[MASTER] = master
        found[tensor.param] = TensorState(steps, seen, values)
    return found


def live(optimizer: Algorithm[Any], residuals: Mapping[str, Tensor]) -> dict[Tensor, TensorState]:
    """Every state: of what is laid out as views of the live vectors, and of R of each error memory."""
    counts = [age.counts(optimizer.num_steps, optimizer.num_updates) for age in optimizer.ages]
    vectors = {**replicated(optimizer.vectors), **residuals}
    found = taken(optimizer.space.tensors, vectors, optimizer.space.masters(), counts)
    return {**optimizer.frozen_states, **found}


@torch.no_grad()
def put_(optimizer: Algorithm[Any], states: Mapping[Tensor, TensorState]) -> dict[str, Tensor]:
    """The optimizer has these states, as they belong to what is laid out now. Local. Returns R of each error memory.

    A tensor without a state, or a value that a state has not, begins anew. Masters are not touched.
    """
    space = optimizer.space
    residuals = {name: torch.zeros_like(space.p_N) for name in error_memories(optimizer.vectors)}
    vectors = {**replicated(optimizer.vectors), **residuals}
    for name, vector in vectors.items():
        vector.fill_(optimizer.fresh.get(name, 0.0))
        for i, tensor in enumerate(space.tensors):
            state = states.get(tensor.param)
            if state is not None and name in state.values:
                _part(vector, i, tensor, len(space.tensors)).copy_(state.values[name])
        if name not in residuals and getattr(optimizer.vectors, name) is not vector:
            put(optimizer.vectors, name, vector)  # made for the asking: what holds it has it in another form
    hold(optimizer, states, residuals)
    return residuals


def hold(optimizer: Algorithm[Any], states: Mapping[Tensor, TensorState], residuals: Mapping[str, Tensor]) -> None:
    """All of put_ but the live vectors, which are in place. residuals: what each error memory holds from here on."""
    space, counts, new = optimizer.space, (optimizer.num_steps, optimizer.num_updates), TensorState(0, 0)
    live = [states.get(tensor.param, new) for tensor in space.tensors]
    optimizer.ages = [Age.of(state.steps, state.seen, *counts) for state in live]
    laid_out = {tensor.param for tensor in space.tensors}
    frozen = {param: state for param, state in states.items() if param not in laid_out and state.steps}
    optimizer.frozen_states = {param: state.apart(space.p_N) for param, state in frozen.items()}
    for name, memory in error_memories(optimizer.vectors).items():
        memory.restore(residuals[name])


def bring_together(optimizer: Algorithm[Any], room: Callable[[], Tensor | None] = lambda: None) -> dict[str, Tensor]:
    """R of each error memory, which holds it from here on; kept in handed_over until the next step. Collective.

    room: memory for R, where there is any. Raises: PeerLost, and then nothing has changed.
    """
    errors = error_memories(optimizer.vectors)
    residuals = {name: memory.residual(room()) for name, memory in errors.items()}
    optimizer.handed_over = residuals  # from here on ranks may differ in how R is split, until the last has it
    for name, memory in errors.items():
        memory.restore(residuals[name])
    return residuals


def masters_of(states: Mapping[Tensor, TensorState]) -> dict[Tensor, Tensor]:
    """The masters of those that have one."""
    return {param: state.values[MASTER] for param, state in states.items() if MASTER in state.values}


def of_peer(
    optimizer: Algorithm[Any], theirs: Iterable[Sequence[Any]], held: Mapping[Tensor, TensorState]
) -> dict[Tensor, TensorState]:
    """The states of the entries of another rank with the same layout, in their order.

    Those of what is laid out have no values. held: of frozen parameters those that are here; others have room for them.
    """
    space, wide = optimizer.space, optimizer.space.p_N.numel()
    laid_out = {tensor.name for tensor in space.tensors}
    of = {one.name: one.param for one in everything(optimizer)}
    lengths = {**sizes(optimizer.vectors, wide), **dict.fromkeys(error_memories(optimizer.vectors), wide)}
    found = {}
    for name, steps, seen in theirs:
        if (param := of.get(name)) is None:
            continue  # of another model: the ranks find out when they connect
        numels: dict[str, int] = {}
        if name not in laid_out and param not in held:
            here = local(param).numel()
            numels = {key: here if length == wide else 1 for key, length in lengths.items()}
            numels |= {MASTER: here} if param.dtype in LOW_PRECISION else {}
        room = {key: space.p_N.new_empty(numel) for key, numel in numels.items()}
        found[param] = held.get(param) or TensorState(steps, seen, room)
    return found


def _part(x: Tensor, i: int, tensor: FlatTensor, count: int) -> Tensor:
    """What a vector has of tensor `i`: its elements, or where it has a number for each of `count` tensors that one."""
    return x[i : i + 1] if len(x) == count else x[tensor.start : tensor.stop]
