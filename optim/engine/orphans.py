"""Are the parameters still those that were given? Does anything but the optimizer still hold one?

If nothing does, no model can use it: it was replaced, or removed.

A layer or a parameter that is exchanged after the optimizer was made leaves the optimizer with the old one. That never
gets a gradient again, and the new one never takes a step: training goes on, and part of the model stays as it is. A
missing gradient alone says nothing, for there are layers that a batch does not use. But a tensor which nothing else
refers to cannot be in a model, nor come back into one.

Only tensors that got no gradient since the last step are looked at, and of these only those that have fewer references
than when that was last known: at first when the optimizer was made. Who holds them is then searched for among all
objects, once for all of them, because the search takes some tenths of a second in a large process.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from thinwire.optim.engine.places import FlatTensor


class Holders:
    """Who holds the parameters of one optimizer."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}

    def note(self, tensors: Sequence[FlatTensor]) -> None:
        """These are held by more than the optimizer now: they were just given."""
        self._known |= _references(tensors)

    def refuse_orphans(self, tensors: Sequence[FlatTensor], optimizer: Optimizer) -> None:
        """tensors: those of the optimizer without a new gradient.

        Raises: RuntimeError naming the first orphan, with what to do.
        """
        counts = _references(tensors)
        fewer = [one for one in tensors if counts[id(one.param)] < self._known.get(id(one.param), sys.maxsize)]
        self._known |= counts
        doubtful = [one for one in fewer if one.param._use_count() == 1]  # type: ignore[attr-defined]
        if not doubtful:
            return
        containers = {id(optimizer.state), *(id(group["params"]) for group in optimizer.param_groups)}
        held = _held_by_others([one.param for one in doubtful], containers)
        for one in doubtful:
            if id(one.param) not in held:
                del self._known[id(one.param)]  # asked again if step() is called again
                raise RuntimeError(
                    f"{one.label}: nothing but this optimizer holds it any more, so no model can use it: it was "
                    "replaced or removed after the optimizer was made (by a new layer or nn.Parameter, tying, "
                    "weight_norm, an adapter, load_state_dict(assign=True), a copy of the model). What is in its place "
                    "is not trained: make the optimizer after such changes, from model.parameters()"
                )


def listed(param_groups: list[dict[str, Any]]) -> list[int]:
    """The ids of all parameters in the groups, in order."""
    return [id(param) for group in param_groups for param in group["params"]]


def refuse_edited(state: Mapping[Tensor, Any], param_groups: list[dict[str, Any]], known: list[int]) -> None:
    """known: listed() of when the groups were laid out. Raises: RuntimeError for groups or state edited by hand."""
    now = listed(param_groups)
    if now != known:
        raise RuntimeError(
            f"param_groups was edited by hand: it lists {len(now)} parameters, {len(set(now) - set(known))} of them "
            f"new, {len(set(known) - set(now))} gone, and the flat vectors are of those before. Call add_param_group() "
            "to add parameters and requires_grad_(False) to leave some out, or make the optimizer anew"
        )
    if not state:
        raise RuntimeError(
            "optimizer.state was emptied: it only shows the flat vectors, which go on as they were. To begin moments "
            "and warm-up anew, make the optimizer anew"
        )


def _references(tensors: Sequence[FlatTensor]) -> dict[int, int]:
    """By id of the parameter: how many references it has, counted alike each time."""
    return {id(one.param): sys.getrefcount(one.param) for one in tensors}


def _held_by_others(params: list[Tensor], containers: set[int]) -> set[int]:
    """Ids of those that something refers to beside FlatTensors, these containers and what runs now.

    A reference that the collector does not know of, such as a local variable of a frame that runs, is found by count.
    """
    ids, ours = {id(param) for param in params}, dict.fromkeys(map(id, params), 0)
    containers = containers | {id(params)}
    held: set[int] = set()
    for holder in gc.get_referrers(*params):
        named = [id(one) for one in gc.get_referents(holder) if id(one) in ids]
        if id(holder) in containers or isinstance(holder, FlatTensor):
            for one in named:
                ours[one] += 1
        elif not isinstance(holder, FrameType):
            held.update(named)
    for index in range(len(params)):
        if sys.getrefcount(params[index]) > ours[id(params[index])] + _REFERENCES_OF_A_CALL:
            held.add(id(params[index]))
    return held


_REFERENCES_OF_A_CALL = 1
"""sys.getrefcount counts its own argument."""
