"""Checks that the parameters are still those that were given, and that something beside the optimizer holds each.

Where nothing does no model can use it: it was replaced, or removed.

A layer or a parameter that is exchanged after the optimizer was made leaves the optimizer with the old one. That never
gets a gradient again, and the new one never takes a step: training goes on, and part of the model stays as it is. A
missing gradient alone says nothing, for there are layers that a batch does not use. But a tensor which nothing else
refers to cannot be in a model, nor come back into one. So of those that got no gradient since the last step references
are counted, and the optimizer's own taken off.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from itertools import islice
from operator import is_
from types import SimpleNamespace
from typing import Any, NoReturn

from torch import Tensor

from thinwire.optim.engine.flat import FlatSpace
from thinwire.optim.engine.places import FlatTensor
from thinwire.optim.engine.state import Shown

_held = SimpleNamespace(param=object())
OF_ONE_ATTRIBUTE = sys.getrefcount(_held.param)
"""What sys.getrefcount(x.param) says of something that nothing else refers to: the attribute, and its own argument."""


def refuse_orphans(tensors: Sequence[FlatTensor], state: Mapping[Tensor, Any]) -> None:
    """tensors: those of the optimizer without a new gradient. state: its own.

    Raises: RuntimeError naming the first that nothing else holds, with what to do.
    """
    for one in tensors:
        # Its own: an attribute of FlatTensor, entries of FlatSpace's list and of a group's, and a key of the state.
        own = OF_ONE_ATTRIBUTE + 2 + (one.param in state)
        if sys.getrefcount(one.param) > own or one.param._use_count() > 1:  # type: ignore[attr-defined]
            continue
        raise RuntimeError(
            f"{one.label}: nothing but this optimizer holds it any more, so no model can use it: it was replaced or "
            "removed after the optimizer was made (by a new layer or nn.Parameter, tying, weight_norm, an adapter, "
            "load_state_dict(assign=True), a copy of the model). What is in its place is not trained: make the "
            "optimizer after such changes, from model.parameters()"
        )


def listed(param_groups: list[dict[str, Any]]) -> list[int]:
    """The ids of all parameters in the groups, in order."""
    return [one for group in param_groups for one in map(id, group["params"])]


def refuse_listed_otherwise(param_groups: list[dict[str, Any]], known: list[int]) -> None:
    """known: as in refuse_edited(). Raises: RuntimeError for groups that list other parameters."""
    now = listed(param_groups)
    if now != known:
        raise RuntimeError(
            f"param_groups was edited by hand: it lists {len(now)} parameters, {len(set(now) - set(known))} of them "
            f"new, {len(set(known) - set(now))} gone, and the flat vectors are of those before. Call add_param_group() "
            "to add parameters and requires_grad_(False) to leave some out, or make the optimizer anew"
        )


def refuse_edited(
    state: Mapping[Tensor, Any], param_groups: list[dict[str, Any]], known: list[int], space: FlatSpace
) -> None:
    """known: listed() of when the groups were laid out; space: of those that were, which `state` shows, in this order.

    Raises: RuntimeError for groups or state edited by hand.
    """
    refuse_listed_otherwise(param_groups, known)
    num = len(space.params)
    alike = len(state) >= num and all(map(is_, state, space.params))
    if alike and {*map(type, islice(state.values(), num))} == {Shown}:
        return  # by far the most steps: without a look at each
    for one in space.tensors:
        if not isinstance(state.get(one.param), Shown):
            raise RuntimeError(
                f"optimizer.state was emptied or replaced, of {one.label} at least: it only shows the flat vectors, "
                "which go on as they were. To begin moments and warm-up anew, make the optimizer anew; what you keep "
                "there of your own is an entry of optimizer.state[p]"
            )


def refuse_copy(optimizer: object) -> NoReturn:
    """What copy and pickle ask for: the copy would step the same parameters. Raises: TypeError."""
    raise TypeError(
        f"{type(optimizer).__name__} cannot be copied or pickled: it holds the model's own parameters and a group of "
        "ranks. Keep state_dict(), and load it into an optimizer made for the other model"
    )
