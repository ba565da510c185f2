"""State transfer to a joining rank, or one that is behind, and where it lies until nothing can fail any more.

    parameters          into the gradient of a rank that has no state, else into new memory
    v and the like      into its own vectors where it has no state and they are of the same type, else into new memory
    a momentum          as the rows that were received last where it is in rows, 1/32 of its bytes; else as floats
    R of error memory   into the gradient of a rank that holds errors, for as long as those are there too

A rank that has a state keeps all of it until the last collective has succeeded; of one that has none, only the
parameters that it trains stay as they were.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from thinwire.comm.protocol import Group, Relaying
from thinwire.optim.engine.momentum import InRows, tensors_of
from thinwire.optim.engine.optimizer import FlatOptimizer
from thinwire.optim.engine.state import TensorState, is_field, move, part, put, sizes

PARAMETERS = "parameters_N"
PIECE = 1 << 18
"""Elements of a momentum in rows that are decoded and given at a time, where it cannot be given in rows."""

Described = Mapping[str, dict[str, Any]]
"""By name of a vector that the source has in received rows what these are (Momentum.described)."""


class GradientAsRoom:
    """The memory of the gradient, which is worth nothing in a change of ranks: room for one vector, inside of a `with`.

    At its end what was handed over in it gets memory of its own, and the gradient is zero.
    """

    def __init__(self, optimizer: FlatOptimizer[Any]) -> None:
        self._optimizer, self._is_taken = optimizer, False

    def take(self) -> Tensor | None:
        """It, once; None where it is taken, or part of a step that this rank has lost and another may have made."""
        if self._is_taken or self._optimizer.reduce.needs_lost_input:
            return None
        self._is_taken = True
        return self._optimizer.space.g_N

    def __enter__(self) -> GradientAsRoom:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_taken:
            g_N, held = self._optimizer.space.g_N, self._optimizer.handed_over or {}
            for name, residual_N in held.items():
                held[name] = residual_N.clone() if residual_N is g_N else residual_N
            g_N.zero_()


def described_rows(optimizer: FlatOptimizer[Any]) -> dict[str, dict[str, Any]]:
    """Of each replicated vector that is in received rows what another rank needs to know to hold them. Plain values."""
    state = optimizer.vectors
    found = {name: state.holder(name).described() for name in sizes(state, 0) if not is_field(state, name)}
    return {name: one for name, one in found.items() if one is not None}


class Room:
    """Where this rank keeps what it is given, by name; for a rank that is given nothing, what is settled otherwise.

    vectors: float[N], or as many as that field has. rows: in place of those that are given in rows.
    """

    def __init__(self, vectors: dict[str, Tensor], rows: dict[str, InRows] | None = None) -> None:
        self.vectors, self.rows = vectors, rows or {}

    @classmethod
    def made(cls, optimizer: FlatOptimizer[Any], has_state: bool, frozen_at: int | None, in_rows: Described) -> Room:
        """For what another rank has. frozen_at: of that rank, for what is of another type then.

        Where this rank has no state, vectors of its own that are no room are let go of: begin_anew() makes them again.
        """
        space, state = optimizer.space, optimizer.vectors
        vectors, rows = {PARAMETERS: torch.empty_like(space.p_N) if has_state else space.g_N}, {}
        for name, size in sizes(state, space.p_N.numel()).items():
            dtype = optimizer.dtype_of(name, frozen_at)
            if not has_state and name not in in_rows and getattr(state, name).dtype == dtype:
                vectors[name] = getattr(state, name)
                continue
            if not has_state:
                put(state, name, space.p_N.new_zeros(1).expand(size))
            if name in in_rows:
                rows[name] = state.holder(name).room(in_rows[name])
            else:
                vectors[name] = space.p_N.new_empty(size, dtype=dtype)
        return cls(vectors, rows)

    def holds(self, vector: Tensor) -> bool:
        """Is this vector itself part of the room?"""
        return any(one is vector for one in self.vectors.values())


def begin_anew(optimizer: FlatOptimizer[Any]) -> None:
    """A rank that has no state has none again, after Room.made()."""
    space = optimizer.space
    space.g_N.zero_()
    for name, size in sizes(optimizer.vectors, space.p_N.numel()).items():
        dtype, fresh = optimizer.dtype_of(name, optimizer.frozen_at), optimizer.fresh.get(name, 0.0)
        put(optimizer.vectors, name, torch.full((size,), fresh, dtype=dtype, device=space.p_N.device))


def give(group: Group, x: Tensor, path: tuple[int, ...]) -> None:
    """x of the ranks on the path <- x of its first. Others may be given it too, where nothing else is quicker."""
    if isinstance(group, Relaying):
        group.relay_(x, path)
        return
    mine = x if group.rank in path else torch.empty_like(x)
    group.broadcast_(mine, path[0])


def give_vectors(
    optimizer: FlatOptimizer[Any], room: Room, group: Group, path: tuple[int, ...], in_rows: Described
) -> None:
    """Parameters and replicated vectors of its first to all on the path. Collective. Raises: PeerLost.

    room: of who is given them; of who gives, what differs from its state.
    """
    space, state = optimizer.space, optimizer.vectors
    for name, size in {PARAMETERS: space.p_N.numel(), **sizes(state, space.p_N.numel())}.items():
        if name in in_rows:
            for rows in _rows(optimizer, room, name, in_rows[name], gives=group.rank == path[0]):
                give(group, rows, path)
            continue
        step = max(size, 1) if name == PARAMETERS or is_field(state, name) else PIECE
        for start in range(0, size, step):
            at = slice(start, min(start + step, size))
            if name in room.vectors:
                piece = room.vectors[name][at]
            else:
                piece = space.p_N[at] if name == PARAMETERS else part(state, name, at)
            give(group, piece, path)


def _rows(
    optimizer: FlatOptimizer[Any], room: Room, name: str, described: dict[str, Any], *, gives: bool
) -> list[Tensor]:
    """The tensors of one vector in rows: this rank's own where it gives, else its room for them, or what is no use."""
    if gives:
        return tensors_of(optimizer.vectors.holder(name).rows())
    if name in room.rows:
        return tensors_of(room.rows[name])
    p_N, factors = optimizer.space.p_N, described["factors"]
    others = [] if factors is None else [p_N.new_empty(factors)]
    return [p_N.new_empty(described["bytes"], dtype=torch.uint8), *others]


def give_values(states: Iterable[TensorState], group: Group, path: tuple[int, ...]) -> None:
    """The values that these states have, those of its first to all on the path. Collective. Raises: PeerLost."""
    values = [x for state in states for _, x in sorted(state.values.items())]
    if not values:
        return
    given = torch.cat(values)
    give(group, given, path)
    if group.rank in path[1:]:
        for x, part in zip(values, torch.split(given, [x.numel() for x in values]), strict=True):
            x.copy_(part)


def take(optimizer: FlatOptimizer[Any], before: object, room: Room) -> None:
    """The new vectors are those of before, or those in the room. Not copied, but for the parameters. Local."""
    space = optimizer.space
    space.take_changes()
    if (p_N := room.vectors.get(PARAMETERS)) is not None:
        space.p_N.copy_(p_N)
        if p_N is space.g_N:
            space.g_N.zero_()
    for name in sizes(optimizer.vectors, space.p_N.numel()):
        if name in room.rows:
            put(optimizer.vectors, name, room.rows[name])
        elif name in room.vectors:
            put(optimizer.vectors, name, room.vectors[name])
        else:
            move(optimizer.vectors, before, name)
