"""The optimizer's `state`, as torch.optim shows it: for each parameter its part of the flat vectors, in its shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from thinwire.optim.engine.flat import FlatSpace

if TYPE_CHECKING:
    from _collections_abc import dict_items, dict_values


class Shown(dict[str, Any]):
    """One parameter's state. Views of the flat vectors, which are brought up to date whenever a value is asked for."""

    def __init__(self, values: Mapping[str, Any], update: Callable[[], None]) -> None:
        super().__init__(values)
        self._update = update

    def __getitem__(self, name: str) -> Any:
        self._update()
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """The value of that name."""
        self._update()
        return super().get(name, default)

    def values(self) -> dict_values[str, Any]:
        """All values."""
        self._update()
        return super().values()

    def items(self) -> dict_items[str, Any]:
        """All names and values."""
        self._update()
        return super().items()

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (list(self.items()),)


def show_state(
    state: dict[Tensor, Any], space: FlatSpace, vectors: object, names: Mapping[str, str], step: Tensor
) -> None:
    """state[p] <- {"step": the common step count, and for each name of a field of `vectors` its part}. Views: no copy.

    names: what torch.optim calls a field. state: emptied first. A view is true until the next step, at least.
    """
    state.clear()
    shown = {name: space.views(getattr(vectors, field)) for field, name in names.items()}
    update = partial(_read, vectors, tuple(names))
    for index, tensor in enumerate(space.tensors):
        state[tensor.param] = Shown({"step": step, **{name: views[index] for name, views in shown.items()}}, update)


def _read(vectors: object, fields: tuple[str, ...]) -> None:
    for field in fields:
        getattr(vectors, field)
