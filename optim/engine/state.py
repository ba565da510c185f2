"""What an optimizer remembers, each vector with its kind: the kind says what a checkpoint and a resize do to it.

A vector is a field of the state, or a property where it is made when asked for. Also the optimizer's `state` as
torch.optim shows it: for each parameter its part of the flat vectors, in its shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Annotated, Any, Self, get_args, get_type_hints

import torch
from torch import Tensor

from thinwire.comm.exchange.memory import ErrorMemory
from thinwire.optim.engine.flat import FlatSpace
from thinwire.optim.engine.momentum import InRows

OURS = "thinwire."
NOT_HELD = "thinwire.comm.groups."
"""Process groups are their user's, and a group of threads knows the other ranks."""


class Kind(StrEnum):
    """REPLICATED: bit-equal on every rank, saved. RESIDUAL: error memory, saved as R. SCRATCH: worth nothing.

    LOCAL: a rank's own since the last sync; saving forces a sync (prepare_to_save), after which it is worth nothing.
    """

    REPLICATED = "replicated"
    LOCAL = "local"
    RESIDUAL = "residual"
    SCRATCH = "scratch"


Replicated = Annotated[Tensor, Kind.REPLICATED]
Local = Annotated[Tensor, Kind.LOCAL]
Residual = Annotated[ErrorMemory, Kind.RESIDUAL]
Scratch = Annotated[Tensor, Kind.SCRATCH]


MASTER = "master"
"""The name of a master among the values of a TensorState."""


@dataclass(slots=True)
class TensorState:
    """What one parameter has. steps: that it was in. seen: updates of its variance; None as in Age.

    values: by name of a replicated vector its elements, or its one number; by name of an error memory its elements of
    R; MASTER: float32, of a parameter in low precision.
    """

    steps: int
    seen: int | None
    values: dict[str, Tensor] = field(default_factory=dict)

    def apart(self, like: Tensor) -> TensorState:
        """The same in memory of its own, in the dtype and on the device of `like`. Copies what shares memory."""

        def alone(x: Tensor) -> Tensor:
            shares = x.untyped_storage().nbytes() > x.nbytes
            return x.detach().to(like, copy=shares)

        return TensorState(self.steps, self.seen, {name: alone(x) for name, x in self.values.items()})


def replicated(state: object) -> dict[str, Tensor]:
    """The replicated vectors of a state, by field name; not copies."""
    return {name: getattr(state, name) for name in _names(state, Kind.REPLICATED)}


def sizes(state: object, numel: int) -> dict[str, int]:
    """Elements of each replicated vector, by name: none is made for it, one that would be has all `numel`."""
    return {
        name: len(getattr(state, name)) if is_field(state, name) else numel for name in _names(state, Kind.REPLICATED)
    }


def part(state: Any, name: str, at: slice) -> Tensor:
    """These elements of a replicated vector, not to be modified; no more than them is made."""
    found: Tensor = getattr(state, name)[at] if is_field(state, name) else state.holder(name).part(at)
    return found


def put(state: Any, name: str, vector: Tensor | InRows) -> None:
    """A replicated vector is this one from here on: it is taken, not copied. In rows: of one that is not a field."""
    if is_field(state, name):
        setattr(state, name, vector)
    else:
        state.holder(name).hold(vector)


def move(state: Any, old: Any, name: str) -> None:
    """A replicated vector of the old state, of the same kind, is this one's from here on; nothing is copied or made."""
    if is_field(state, name):
        setattr(state, name, getattr(old, name))
    else:
        state.holder(name).follow(old.holder(name))


def error_memories(state: object) -> dict[str, ErrorMemory]:
    """The error memory of a state, by field name, where there is any."""
    found = {name: getattr(state, name) for name in _names(state, Kind.RESIDUAL)}
    return {name: memory for name, memory in found.items() if memory is not None}


def is_field(state: object, name: str) -> bool:
    """Is a replicated vector always there? Else it is a property, and made when asked for."""
    return not isinstance(getattr(type(state), name, None), property)


def _names(state: object, kind: Kind) -> list[str]:
    every = {name: found for kind in reversed(type(state).__mro__) for name, found in vars(kind).items()}
    made = {name: found.fget for name, found in every.items() if isinstance(found, property)}
    hints: dict[str, Any] = get_type_hints(type(state), include_extras=True)
    hints |= {name: get_type_hints(get, include_extras=True).get("return") for name, get in made.items() if get}
    return [name for name, hint in hints.items() if any(kind in getattr(one, "__metadata__", ()) for one in _of(hint))]


def _of(hint: Any) -> tuple[Any, ...]:
    """The type itself, and what it is a union of."""
    return hint, *get_args(hint)


class Shown(dict[str, Any]):
    """One parameter's state. Views of the flat vectors as they are when a value is asked for: nothing holds them here.

    made: what gives a value, by name. Others may add entries of their own, which stay theirs (added.py). Those that are
    shown cannot be set or removed: RuntimeError.
    """

    def __init__(self, values: Mapping[str, Any], made: Mapping[str, Callable[[], Tensor]]) -> None:
        super().__init__({**values, **dict.fromkeys(made)})
        self._made, self._ours = made, frozenset(super().keys())

    def added(self) -> dict[str, Any]:
        """What others have put here."""
        return {name: self[name] for name in self if name not in self._ours}  # what is shown is not made for it

    def _refuse(self, name: str, what: str) -> None:
        if name in self._ours:
            raise RuntimeError(
                f"optimizer.state[p][{name!r}] was {what}: it only shows a part of the flat vectors, which would go on "
                "as they are. Write into it in place, in the warm-up (optimizer.state[p]['exp_avg'].copy_(...)); to "
                "begin moments and warm-up anew, make the optimizer anew; entries of your own have other names"
            )

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in self._ours:
            super().__setitem__(name, value)
        elif not _is_same(value, self[name]):  # as where all tensors are moved to the device that they are on
            self._refuse(name, "set")

    def __delitem__(self, name: str) -> None:
        self._refuse(name, "removed")
        super().__delitem__(name)

    def pop(self, name: str, *default: Any) -> Any:
        """Remove an entry of one's own."""
        self._refuse(name, "removed")
        return super().pop(name, *default)

    def popitem(self) -> tuple[str, Any]:
        """As pop()."""
        name = next(reversed(self))
        return name, self.pop(name)

    def clear(self) -> None:
        """As pop(), of all."""
        for name in list(self):
            del self[name]

    def update(self, *given: Any, **named: Any) -> None:
        """As setting each."""
        for name, value in dict(*given, **named).items():
            self[name] = value

    def __ior__(self, given: Any) -> Self:  # type: ignore[override,misc]
        self.update(given)
        return self

    def setdefault(self, name: str, default: Any = None) -> Any:
        """The value of that name; this one, where there was none."""
        if name not in self:
            self[name] = default
        return self[name]

    def __iter__(self) -> Iterator[str]:
        # Without it dict(), update() and the like would copy what is stored, past the methods below.
        return super().__iter__()

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        return self._made[name]() if value is None and name in self._made else value

    def get(self, name: str, default: Any = None) -> Any:
        """The value of that name."""
        try:
            return self[name]
        except KeyError:
            return default

    def values(self) -> Any:
        """All values."""
        return dict(self).values()

    def items(self) -> Any:
        """All names and values."""
        return dict(self).items()

    def copy(self) -> dict[str, Any]:
        """A dict with these values."""
        return dict(self)

    def __repr__(self) -> str:
        return repr(dict(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (list(self.items()),)


def entries_of(one: object) -> dict[Any, Any]:
    """What others have put into the state of one parameter."""
    if isinstance(one, Shown):
        return one.added()
    return dict(one) if isinstance(one, dict) else {}


def count(steps: int) -> Tensor:
    """A step count as torch.optim keeps it: 0-dim, exact up to 2^24."""
    return torch.tensor(float(steps), dtype=torch.float32, device="cpu")


def _is_same(value: object, shown: Any) -> bool:
    """Is it what is shown?"""
    if value is shown or not isinstance(value, Tensor):
        return value is shown
    return (value.data_ptr(), value.shape, value.dtype) == (shown.data_ptr(), shown.shape, shown.dtype)


def show_state(
    state: dict[Tensor, Any], space: FlatSpace, vectors: object, names: Mapping[str, str], steps: Sequence[Tensor]
) -> None:
    """state[p] <- {"step": its step count, and for each name of a field of `vectors` its part}. Views: no copy.

    names: what torch.optim calls a field; where there are none nothing is shown, the step count neither. steps: of each
    tensor. state: emptied first. A view is true until the next step, at least.
    """
    state.clear()

    def part(field: str, index: int) -> Tensor:
        tensor, vector_N = space.tensors[index], getattr(vectors, field)
        shown: Tensor = vector_N[tensor.start : tensor.stop].view(tensor.shape)
        return shown

    for index, tensor in enumerate(space.tensors):
        made = {name: partial(part, field, index) for field, name in names.items()}
        state[tensor.param] = Shown({"step": steps[index]} if names else {}, made)


def bytes_per_parameter(space: FlatSpace, reached: Sequence[object]) -> dict[str, float]:
    """How many bytes an optimizer holds for each live element: storages are counted as they lie in memory now.

    state      moments, error memory, rows of signs, scratch: what is reached by way of our objects from these
    gradient   the flat gradient
    master     the float32 parameters, where the model's own are in low precision or FSDP keeps them; else they are the
               model's

    A storage counts once, however many share it. What only lives within a call is not here: benchmarks/memory.py
    measures that. Local; reads no values.
    """
    parameters, gradient = _storage(space.p_N), _storage(space.g_N)
    held = dict(_storages(reached))
    for address, _ in (parameters, gradient):
        held.pop(address, None)
    found = {"state": sum(held.values()), "gradient": gradient[1]}
    if space.master_bytes:
        found["master"] = space.master_bytes
    return {name: round(count / max(space.layout.num_live, 1), 3) for name, count in found.items()}


def _storages(roots: Sequence[object]) -> Iterator[tuple[int, int]]:
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
            slots = {name for kind in type(one).__mro__ for name in getattr(kind, "__slots__", ())}
            # In Python 3.11.2 that slot of a dataclass cannot be read; it never holds a storage.
            slots.discard("__weakref__")
            waiting.extend(getattr(one, name) for name in slots if hasattr(one, name))
            waiting.extend(getattr(one, "__dict__", {}).values())


def _storage(tensor: Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()
