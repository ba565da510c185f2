"""What happens when other parameters are trained than in the step before: some frozen, unfrozen, or added?

    requires_grad_(False), requires_grad_(True), add_param_group      seen at the next step(), on every rank
    all ranks:   refuse the exchange of this step, for a rank that has seen no change waits in it
                 compare what is to be trained; WireMismatch where ranks differ, and nothing has changed
                 R of the error memory, brought together as for a checkpoint
                 new flat vectors and a new exchange, for those that are trained
    each:        those that stay keep their state and their R, those that leave have theirs set aside,
                 those that come back go on from it, those that are new begin at zero

So a frozen parameter is in no exchange, no momentum and no decay, as in torch.optim, where it has no gradient.
"""

from __future__ import annotations

import logging
from typing import Any, Protocol

import torch
from torch import Tensor

from thinwire.comm.errors import CommError
from thinwire.comm.protocol import Group, Reducer
from thinwire.optim.engine import tensor_states
from thinwire.optim.engine.ages import Age
from thinwire.optim.engine.buffers import Buffers
from thinwire.optim.engine.flat import FlatSpace
from thinwire.optim.engine.overlap import Overlap
from thinwire.optim.engine.parameters import is_trained
from thinwire.optim.engine.state import error_memories
from thinwire.optim.engine.tensor_states import TensorState

logger = logging.getLogger(__name__)


class Relaid(tensor_states.Holder, Protocol):
    """What is read of an optimizer, and set anew: see FlatOptimizer."""

    space: FlatSpace
    vectors: Any
    reduce: Reducer
    overlap: Overlap
    buffers: Buffers
    parked: dict[Tensor, TensorState]
    saved: dict[str, Any]
    evidence: dict[str, Any]
    param_groups: list[dict[str, Any]]

    @property
    def group(self) -> Group:
        """The ranks."""

    def prepare_to_save(self) -> None:
        """Collective: rank-local state becomes one that all share."""

    def connect_space(self) -> None:
        """A new exchange and empty vectors for the space. Collective."""

    def relaid(self, residuals: dict[str, Tensor]) -> None:
        """What to do with R of each error memory, which holds it."""

    def grown(self, saved: dict[str, Any]) -> dict[str, Any]:
        """`saved` with values for groups that are new."""

    def resumed(self) -> None:
        """Derive what follows from saved values, ages and vectors."""


def trained_ids(param_groups: list[dict[str, Any]]) -> list[list[int]]:
    """The parameters that are trained now, group by group: compared at each step with those that are laid out."""
    return [[id(param) for param in group["params"] if is_trained(param)] for group in param_groups]


def laid_out_ids(param_groups: list[dict[str, Any]], space: FlatSpace) -> list[list[int]]:
    """The parameters that are laid out, group by group: those of trained_ids() when the space was made."""
    inside = {id(tensor.param) for tensor in space.tensors}
    return [[id(param) for param in group["params"] if id(param) in inside] for group in param_groups]


@torch.no_grad()
def lay_out_anew(optimizer: Relaid) -> None:
    """Vectors and exchange for the parameters that are trained now, with the state that each has. Collective.

    All ranks have agreed on them. Values of those that join are rank 0's.
    Raises: PeerLost, WireMismatch, ValueError; then parameters, state and R are as before the call, but that 0/1 Adam
    has ended its round.
    """
    old = optimizer.space
    old.take_changes()
    laid_out = {tensor.param for tensor in old.tensors}
    joining = [
        (param, f"parameter {i} of group {at}")
        for at, group in enumerate(optimizer.param_groups)
        for i, param in enumerate(group["params"])
        if is_trained(param) and param not in laid_out
    ]
    optimizer.prepare_to_save()
    residuals = {name: memory.residual() for name, memory in error_memories(optimizer.vectors).items()}
    states = {**optimizer.parked, **tensor_states.of(optimizer, residuals)}
    saved, evidence, overlap, buffers = optimizer.saved, optimizer.evidence, optimizer.overlap, optimizer.buffers
    before = dict(vars(optimizer))
    try:
        optimizer.space = FlatSpace(optimizer.param_groups)
        optimizer.ages = [Age()] * len(optimizer.space.tensors)
        space = optimizer.space
        for tensor, view in zip(space.tensors, space.views(space.p_N), strict=True):
            if tensor.param not in laid_out:
                optimizer.group.broadcast_(view)
        optimizer.connect_space()
    except (CommError, ValueError):
        vars(optimizer).update(before)
        old.take_changes()
        old.gather_gradients()
        raise

    # From here on nothing can fail for want of a peer.
    overlap.close()
    optimizer.saved, optimizer.evidence, optimizer.buffers = optimizer.grown(saved), evidence, buffers
    held = tensor_states.put_(optimizer, states)
    space.meet_masters({param: state.master for param, state in states.items() if state.master is not None})
    now = {tensor.param for tensor in space.tensors}
    known = {param for group in optimizer.param_groups for param in group["params"]}
    leaving = [i for i, tensor in enumerate(old.tensors) if tensor.param not in now]
    optimizer.parked = {
        param: state.copied_like(space.p_N) if param in laid_out else state
        for param, state in states.items()
        if param in known and param not in now and state.steps
    }
    for i in leaving:
        old.release(i)
    optimizer.resumed()
    optimizer.relaid(held)
    logger.info(
        "laid_out_anew step=%d frozen=%d joined=%d trained=%d elements=%d",
        optimizer.num_steps + 1,
        len(leaving),
        len(joining),
        len(space.tensors),
        space.layout.num_live,
    )
