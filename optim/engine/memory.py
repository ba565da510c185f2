"""How many bytes an optimizer holds for each parameter: its storages are counted as they lie in memory now.

    state      moments, error memory, rows of signs, scratch: what `vectors` and `reduce` reach, and what was set aside
    gradient   the flat gradient
    master     the float32 parameters, where the model's own are in low precision; else they are the model's

A storage counts once, whoever shares it. What only lives within a call is not here: benchmarks/memory.py measures that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:  # it imports this module
    from thinwire.optim.engine.optimizer import FlatOptimizer

OURS = "thinwire."
NOT_HELD = "thinwire.comm.groups."
"""Process groups are their user's, and a group of threads knows the other ranks."""


def bytes_per_parameter(optimizer: FlatOptimizer[Any]) -> dict[str, float]:
    """The three above, over the live elements; master only where there is one. Local; reads no values."""
    space = optimizer.space
    parameters, gradient = _storage(space.p_N), _storage(space.g_N)
    held = dict(
        _storages([optimizer.vectors, optimizer.reduce, optimizer.handed_over, list(optimizer.frozen_states.values())])
    )
    for address, _ in (parameters, gradient):
        held.pop(address, None)
    found = {"state": sum(held.values()), "gradient": gradient[1]}
    if space.has_master:
        found["master"] = parameters[1]
    return {name: round(count / space.layout.num_live, 3) for name, count in found.items()}


def _storages(roots: list[object]) -> Iterator[tuple[int, int]]:
    """Address and bytes of every storage that our objects reach; some more than once."""
    seen: set[int] = set()
    waiting = list(roots)
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            yield _storage(one)
        elif isinstance(one, Mapping):
            waiting.extend(one.values())
        elif isinstance(one, list | tuple | set | frozenset):
            waiting.extend(one)
        elif (home := type(one).__module__).startswith(OURS) and not home.startswith(NOT_HELD):
            slots = [name for kind in type(one).__mro__ for name in getattr(kind, "__slots__", ())]
            waiting.extend(getattr(one, name) for name in slots if hasattr(one, name))
            waiting.extend(getattr(one, "__dict__", {}).values())


def _storage(tensor: Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()
