"""Are the parameters still those that were given? Does anything but the optimizer still hold one?

If nothing does, no model can use it: it was replaced, or removed.

A layer or a parameter that is exchanged after the optimizer was made leaves the optimizer with the old one. That never
gets a gradient again, and the new one never takes a step: training goes on, and part of the model stays as it is. A
missing gradient alone says nothing, for there are layers that a batch does not use. But a tensor which nothing else
refers to cannot be in a model, nor come back into one.

Only tensors that got no gradient since the last step are looked at: their references are counted, and who holds them
is asked (a search through all objects) only where the count is another than when that was asked before.
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
        self._asked: dict[int, int] = {}

    def refuse_orphans(self, tensors: Sequence[FlatTensor], optimizer: Optimizer) -> None:
        """tensors: those of the optimizer without a new gradient.

        Raises: RuntimeError naming the first orphan, with what to do.
        """
        counts = {index: _references(tensor.param) for index, tensor in enumerate(tensors)}
        doubtful = [i for i, count in counts.items() if self._asked.get(id(tensors[i].param)) != count]
        doubtful = [i for i in doubtful if tensors[i].param._use_count() == 1]  # type: ignore[attr-defined]
        if not doubtful:
            return
        ours = {id(optimizer.state), *(id(group["params"]) for group in optimizer.param_groups)}
        for i in doubtful:
            label = tensors[i].label
            if _is_orphan(tensors[i].param, ours):
                raise RuntimeError(
                    f"{label}: nothing but this optimizer holds it any more, so no model can use it: it was replaced "
                    "or removed after the optimizer was made (by a new layer or nn.Parameter, tying, weight_norm, an "
                    "adapter, load_state_dict(assign=True), a copy of the model). What is in its place is not trained: "
                    "make the optimizer after such changes, from model.parameters()"
                )
            self._asked[id(tensors[i].param)] = counts[i]


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


def _is_orphan(param: Tensor, ours: set[int]) -> bool:
    """Are all references to it those of a FlatTensor and of these containers?"""
    count, holders = _references(param), gc.get_referrers(param)
    own = [one for one in holders if id(one) in ours or isinstance(one, FlatTensor)]
    others = [one for one in holders if id(one) not in ours and not isinstance(one, FlatTensor | FrameType)]
    return not others and count <= len(own) + _references_of_one_variable()


def _references(thing: Any) -> int:
    return sys.getrefcount(thing)


def _references_of_one_variable() -> int:
    """What _references counts for an object that one local variable has, as the callers' have theirs."""
    one = object()
    return _references(one)
