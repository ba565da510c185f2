"""The state of an optimizer, tensor by tensor: what goes with a parameter when the flat vectors are laid out otherwise.

    flat vectors of one layout  --taken-->  a TensorState for each parameter  --put_-->  flat vectors of another layout

A parameter that is frozen keeps its TensorState aside until it is trained again; one that was never trained has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from thinwire.optim.engine.ages import Age
from thinwire.optim.engine.flat import FlatSpace
from thinwire.optim.engine.places import Places
from thinwire.optim.engine.state import error_memories, replicated


@dataclass(slots=True)
class TensorState:
    """What one parameter has. steps: that it was in. seen: updates of its variance; None as in Age.

    vectors: of each replicated vector its elements, or its one number. residuals: its elements of R of each error
    memory. master: float32, of a parameter in low precision.
    """

    steps: int
    seen: int | None
    vectors: dict[str, Tensor] = field(default_factory=dict)
    residuals: dict[str, Tensor] = field(default_factory=dict)
    master: Tensor | None = None

    def copied_like(self, p_N: Tensor) -> TensorState:
        """The same in memory of its own, in the dtype and on the device of p."""

        def copied(part: Tensor) -> Tensor:
            return part.detach().to(p_N, copy=True)

        return TensorState(
            self.steps,
            self.seen,
            {name: copied(part) for name, part in self.vectors.items()},
            {name: copied(part) for name, part in self.residuals.items()},
            None if self.master is None else copied(self.master),
        )


class Holder(Protocol):
    """What is read of an optimizer, and written: see FlatOptimizer."""

    ages: list[Age]
    num_steps: int

    @property
    def space(self) -> FlatSpace:
        """Parameters and gradients."""

    @property
    def vectors(self) -> Any:
        """A dataclass whose fields declare their Kind."""

    @property
    def num_updates(self) -> int:
        """What Age.unseen is counted in."""

    @property
    def fresh(self) -> Mapping[str, float]:
        """What a tensor begins with, by vector, where that is not 0."""


def taken(
    placed: Places | FlatSpace,
    vectors: Mapping[str, Tensor],
    residuals: Mapping[str, Tensor],
    masters: Mapping[Tensor, Tensor],
    counts: list[tuple[int, int | None]],
) -> dict[Tensor, TensorState]:
    """The state of each tensor of a layout, as views. counts: (steps, seen) of each."""
    numel, found = placed.layout.numel, {}
    for i, (tensor, (steps, seen)) in enumerate(zip(placed.tensors, counts, strict=True)):
        at = slice(tensor.start, tensor.stop)
        found[tensor.param] = TensorState(
            steps,
            seen,
            {name: x[at] if len(x) == numel else x[i : i + 1] for name, x in vectors.items()},
            {name: r_N[at] for name, r_N in residuals.items()},
            masters.get(tensor.param),
        )
    return found


def of(optimizer: Holder, residuals: Mapping[str, Tensor]) -> dict[Tensor, TensorState]:
    """The state of each tensor that is laid out, as views of the live vectors. residuals: R of each error memory."""
    counts = [
        (optimizer.num_steps - age.missed, None if age.unseen is None else optimizer.num_updates - age.unseen)
        for age in optimizer.ages
    ]
    return taken(optimizer.space, replicated(optimizer.vectors), residuals, optimizer.space.masters(), counts)


@torch.no_grad()
def put_(optimizer: Holder, states: Mapping[Tensor, TensorState]) -> dict[str, Tensor]:
    """Write the states of the tensors that are laid out into the live vectors. Local. Returns R of each error memory.

    A tensor without a state begins anew. ages: set. What each error memory holds is R then, masters are not touched.
    """
    space = optimizer.space
    vectors, errors = replicated(optimizer.vectors), error_memories(optimizer.vectors)
    residuals = {name: torch.zeros_like(space.p_N) for name in errors}
    for name, vector in vectors.items():
        vector.fill_(optimizer.fresh.get(name, 0.0))
    ages = []
    for i, tensor in enumerate(space.tensors):
        state = states.get(tensor.param)
        if state is None:
            ages.append(Age(optimizer.num_steps, optimizer.num_updates))
            continue
        unseen = None if state.seen is None else optimizer.num_updates - state.seen
        ages.append(Age(optimizer.num_steps - state.steps, unseen))
        at = slice(tensor.start, tensor.stop)
        for name, vector in vectors.items():
            (vector[at] if len(vector) == space.layout.numel else vector[i : i + 1]).copy_(state.vectors[name])
        for name, r_N in residuals.items():
            if name in state.residuals:  # not in a share of one rank
                r_N[at].copy_(state.residuals[name])
    for name, memory in errors.items():
        memory.restore(residuals[name])
    optimizer.ages = ages
    return residuals
