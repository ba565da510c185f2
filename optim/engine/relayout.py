"""Other parameters are trained than in the step before: some frozen, unfrozen, or added.

    requires_grad_(False), requires_grad_(True), add_param_group      seen at the next step(), on every rank
    all ranks:   refuse the exchange of this step, for a rank that has seen no change waits in it
                 compare what is to be trained; WireMismatch where ranks differ, and nothing has changed
                 R of the error memory, brought together as for a checkpoint
                 new flat vectors and a new exchange, for those that are trained
    each:        all states are taken out of the old vectors and put into the new (tensor_states.py)

So a frozen parameter is in no exchange, no momentum and no decay, as in torch.optim, where it has no gradient.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from thinwire.comm.errors import CommError
from thinwire.optim.engine import tensor_states
from thinwire.optim.engine.ages import Age
from thinwire.optim.engine.flat import FlatSpace
from thinwire.optim.engine.parameters import is_trained
from thinwire.optim.engine.protocol import OptimizerLike
from thinwire.optim.engine.state import error_memories

logger = logging.getLogger(__name__)


def trained_ids(param_groups: list[dict[str, Any]]) -> list[list[int]]:
    """The parameters that are trained now, group by group: compared at each step with those that are laid out."""
    return [[id(param) for param in group["params"] if is_trained(param)] for group in param_groups]


def laid_out_ids(param_groups: list[dict[str, Any]], space: FlatSpace) -> list[list[int]]:
    """The parameters that are laid out, group by group: those of trained_ids() when the space was made."""
    inside = {id(tensor.param) for tensor in space.tensors}
    return [[id(param) for param in group["params"] if id(param) in inside] for group in param_groups]


@torch.no_grad()
def lay_out_anew(optimizer: OptimizerLike) -> None:
    """Vectors and exchange for the parameters that are trained now, with the state that each has. Collective.

    All ranks have agreed on them. Values of those that join are rank 0's.
    Raises: PeerLost, WireMismatch, ValueError; then parameters, state and R are as before the call, but that 0/1 Adam
    has ended its round.
    """
    old = optimizer.space
    old.take_changes()
    laid_out = {tensor.param for tensor in old.tensors}
    trained = [param for group in optimizer.param_groups for param in group["params"] if is_trained(param)]
    joining = [param for param in trained if param not in laid_out]
    optimizer.prepare_to_save()
    found = tensor_states.live(optimizer, {name: m.residual() for name, m in error_memories(optimizer.vectors).items()})
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
    residuals = tensor_states.put_(optimizer, found)
    space.meet_masters(tensor_states.masters_of(found))
    now = {tensor.param for tensor in space.tensors}
    leaving = [i for i, tensor in enumerate(old.tensors) if tensor.param not in now]
    for i in leaving:
        old.release(i)
    optimizer.resumed()
    optimizer.relaid(residuals)
    logger.info(
        "laid_out_anew step=%d frozen=%d joined=%d trained=%d elements=%d",
        optimizer.num_steps + 1,
        len(leaving),
        len(joining),
        len(space.tensors),
        space.layout.num_live,
    )
