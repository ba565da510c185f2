"""The optimizer inside of LocalSteps: what it may be, how it steps, and its state by parameter, whoever made it.

One of torch.optim, or written like one, keeps what it remembers in `state`, by parameter; a dense one of ours in flat
vectors, of which `state` shows parts. Both are saved, loaded and given to ranks that come as entries that are kept
beside a parameter (engine/added.py), so that nothing here knows what an optimizer remembers.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from thinwire.optim.engine.ages import Age
from thinwire.optim.engine.algorithm import Algorithm

INSIDE = "inner "
"""How the names of entries of one of ours begin."""
STEP = "step"
HOOK = "_thinwire_hook"
"""The attribute of an inner optimizer that holds the handle of what refuses a step() of its user's."""
DISTRIBUTED = ("torch.distributed.", "deepspeed.", "horovod.", "bagua.")
"""Packages whose optimizers exchange something themselves."""


def refuse_unfit(inner: object) -> None:
    """Raises: TypeError for what is no optimizer; ValueError for one that cannot take steps alone, and what to do."""
    name = type(inner).__name__
    if not isinstance(inner, Optimizer):
        raise TypeError(
            f"inner = {name}: must be an optimizer, made over the parameters: LocalSteps(torch.optim.AdamW(...), ...)"
        )
    if isinstance(inner, Algorithm):
        if inner.compresses:
            raise ValueError(
                f"inner = {name}: compresses what it sends, and inside of LocalSteps nothing is sent: give the dense "
                "one (Adam, Lamb, Muon, SGD) or one of torch.optim"
            )
        if inner.group.size > 1:
            raise ValueError(
                f"inner = {name} over {inner.group.size} ranks: it communicates by itself in every step. Make it with "
                "group=SoloGroup() (thinwire.comm), and give the ranks to LocalSteps(group=)"
            )
        if inner.num_steps:
            raise ValueError(
                f"inner = {name} after {inner.num_steps} steps: must be given before its first; load a state_dict() of "
                "LocalSteps to go on from one"
            )
        return
    if any(f"{kind.__module__}.".startswith(DISTRIBUTED) for kind in type(inner).__mro__):
        raise ValueError(
            f"inner = {name} of {type(inner).__module__}: it communicates by itself in its steps; give the optimizer "
            "that it is made of"
        )
    closure = inspect.signature(type(inner).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(f"inner = {name}: its step needs a closure, and LocalSteps has none to give: use another one")


class Inner:
    """One of them. optimizer: the optimizer itself; its groups are those of LocalSteps."""

    def __init__(self, optimizer: Optimizer) -> None:
        refuse_unfit(optimizer)
        self.optimizer = optimizer
        self.ours: Algorithm[Any] | None = optimizer if isinstance(optimizer, Algorithm) else None
        self._is_stepping = False
        if (before := vars(optimizer).pop(HOOK, None)) is not None:
            before.remove()  # of a LocalSteps that it was in
        vars(optimizer)[HOOK] = optimizer.register_step_pre_hook(self._refuse_alone)

    def _refuse_alone(self, optimizer: Optimizer, *_: Any) -> None:
        if not self._is_stepping:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() was called, of an optimizer inside of LocalSteps: call step() of "
                "LocalSteps, which takes it and ends rounds; nothing was changed"
            )

    def share(self, param_groups: list[dict[str, Any]], state: dict[Tensor, Any]) -> None:
        """These are its groups from here on, and where it is not one of ours its state, which what it has is put in."""
        self.optimizer.param_groups = param_groups
        if self.ours is None and self.optimizer.state is not state:
            for param, one in self.optimizer.state.items():
                state[param] = {**state.get(param, {}), **one}
            self.optimizer.state = state  # type: ignore[assignment]

    def step(self, state: Mapping[Tensor, Any]) -> None:
        """One step alone, on the gradients that parameters have. state: that of LocalSteps.

        Raises: RuntimeError where its state was replaced.
        """
        if self.ours is None and self.optimizer.state is not state:
            raise RuntimeError(
                f"{type(self.optimizer).__name__}.load_state_dict() was called inside of LocalSteps, whose state it "
                "is: call state_dict() and load_state_dict() of LocalSteps, which has the inner optimizer's in it"
            )
        self._is_stepping = True
        try:
            self.optimizer.step()
        finally:
            self._is_stepping = False

    def entries(self, param: Tensor) -> dict[Any, Any]:
        """What one of ours keeps of a parameter, as views; of another it is in the state of LocalSteps itself."""
        if self.ours is None or not self.ours.num_steps:
            return {}
        shown = dict(self.ours.state.get(param, {})).items()
        return {INSIDE + name: int(x) if name == STEP else x for name, x in shown}

    @torch.no_grad()
    def take(self, param: Tensor, entries: Mapping[Any, Any]) -> None:
        """Hold what entries() gave; where that was nothing, begin anew."""
        if self.ours is None:
            return
        shown = dict(self.ours.state.get(param, {}))
        for name, x in shown.items():
            given = entries.get(INSIDE + name)
            if name == STEP:
                continue
            if given is None:
                x.zero_()
            else:
                x.copy_(given)
        if STEP in shown:
            self._count(self.ours, param, int(entries.get(INSIDE + STEP) or 0))

    def _count(self, ours: Algorithm[Any], param: Tensor, steps: int) -> None:
        """This parameter was in so many steps; that of most says how many there were."""
        if param in ours.frozen_states:
            ours.frozen_states[param].steps = steps
        counts = [age.counts(ours.num_steps, ours.num_updates) for age in ours.ages]
        for i, tensor in enumerate(ours.space.tensors):
            if tensor.param is param:
                counts[i] = steps, None if counts[i][1] is None else steps
        num_steps = max((count for count, _ in counts), default=steps)
        if num_steps != ours.num_steps or [age.missed for age in ours.ages] != [num_steps - one for one, _ in counts]:
            ours.num_steps = num_steps
            ours.ages = [Age.of(one, seen, num_steps, ours.num_updates) for one, seen in counts]
            ours.resumed()


def sorted_out(entries: Iterable[dict[Any, Any]]) -> tuple[list[Tensor], list[Tensor]]:
    """Of the entries of all parameters, in one order: vectors of floats, of which ranks have a mean; other tensors."""
    every = [one[key] for one in entries for key in sorted(one, key=str) if isinstance(one[key], Tensor)]
    moments = [x for x in every if x.dim() and x.dtype.is_floating_point]
    return moments, [x for x in every if not (x.dim() and x.dtype.is_floating_point)]


def plain_of(values: Mapping[Any, Any]) -> dict[str, Any]:
    """What is a number or a text among them, under texts."""
    plain = bool | int | float | str | None
    return {key: x for key, x in values.items() if isinstance(key, str) and isinstance(x, plain)}
