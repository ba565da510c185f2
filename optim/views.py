"""The optimizer's `state`, as torch.optim shows it: for each parameter its part of the flat vectors, in its shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from thinwire.optim.flat import FlatSpace


def show_state(
    state: dict[Tensor, Any], space: FlatSpace, vectors: object, names: Mapping[str, str], step: Tensor
) -> None:
    """state[p] <- {"step": the common step count, and for each name of a field of `vectors` its part}. Views: no copy.

    names: what torch.optim calls a field. state: emptied first. The views stay true as long as the flat vectors do.
    """
    state.clear()
    shown = {name: space.views(getattr(vectors, field)) for field, name in names.items()}
    for index, tensor in enumerate(space.tensors):
        state[tensor.param] = {"step": step, **{name: views[index] for name, views in shown.items()}}
