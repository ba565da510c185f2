"""One step of any optimizer, from the gradients that backward left to a state that all ranks share.

    changes followed    parameters frozen, unfrozen or added since the last step (changing.py)
    gradients gathered  into g_N, unscaled, and clipped where each rank's own is used
    beside              buffers and comparisons, in the same order on every rank
    update              the algorithm's: exchange, then modify; or nothing has changed

Hooks of backward may have begun to send what this step exchanges (overlap.py).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from thinwire.comm.default import refuse_late_process_group
from thinwire.comm.errors import NonFiniteInput, PeerLost, Refused
from thinwire.optim.engine import changing, state_dicts
from thinwire.optim.engine.exchanges import Exchange, refusal
from thinwire.optim.engine.loss_scaling import is_scaled, tell_scaler, unscale_
from thinwire.optim.engine.orphans import refuse_edited, refuse_orphans
from thinwire.optim.engine.parameters import without_gradient
from thinwire.optim.engine.protocol import OptimizerLike
from thinwire.optim.engine.schedule import StepPlan, Wire
from thinwire.optim.engine.state import error_memories

logger = logging.getLogger(__name__)


def step(optimizer: OptimizerLike) -> None:
    """Collective. Raises: as FlatOptimizer.step, and then parameters, state and step count are as before the call."""
    _step(optimizer)
    optimizer.after_step()


def _step(optimizer: OptimizerLike) -> None:
    group, overlap, space = optimizer.group, optimizer.overlap, optimizer.space
    refuse_late_process_group(group)
    refuse_edited(optimizer.state, optimizer.param_groups, optimizer.listed)
    state_dicts.agree_on_load(optimizer)
    follow_changes(optimizer)
    overlap, space = optimizer.overlap, optimizer.space
    try:
        _gather_gradients(optimizer)
        plan = optimizer.plan(optimizer.num_steps + 1)
        optimizer.reduce.draw = optimizer.num_steps
        _begin_beside(optimizer, plan)
        optimizer.first.look(plan, space.g_N, optimizer.mean_wire, has_sent=overlap.has_launched)
        if plan.gradient is Wire.LOCAL:
            space.shorten_gradient(optimizer.max_grad_norm)
        optimizer.update(plan, optimizer.hypers(optimizer.num_steps + 1))
    except NonFiniteInput as error:
        overlap.abandon()
        space.clear_dead()
        if isinstance(error, Refused):
            changing.refuse_mismatch(optimizer, "step()")  # raises, for they have changed there and not here
        if not optimizer.skips_non_finite:
            raise
        optimizer.steps_skipped += 1
        logger.warning("step_skipped step=%d ranks=%s", optimizer.num_steps + 1, list(error.ranks))
        _tell_scaler(optimizer, left_out=True)
        return
    except BaseException as error:
        overlap.undo(error, optimizer.reduce, group)
        raise
    overlap.abandon()  # of a local step: nothing of it was sent
    optimizer.num_steps += 1
    if optimizer.at_sync:
        optimizer.handed_over = None
    space.write_back()
    _tell_scaler(optimizer, left_out=False)


def _tell_scaler(optimizer: OptimizerLike, *, left_out: bool) -> None:
    """With what it is owed: between two steps all have found a gradient not to be finite, and no scaler knows."""
    if is_scaled(optimizer):
        left_out, optimizer.owes_scaler = left_out or optimizer.owes_scaler, False
        tell_scaler(optimizer, left_out=left_out)


def _gather_gradients(optimizer: OptimizerLike) -> None:
    """Bring together what step() is given. Raises: ValueError, RuntimeError."""
    optimizer.before_gradients()
    space, overlap = optimizer.space, optimizer.overlap
    space.take_changes()
    optimizer.scaled = scaled = is_scaled(optimizer)
    if scaled and overlap.exchange is not None:
        raise RuntimeError(
            "a GradScaler calls step() for the first time after gradients have been sent as they were, scaled: "
            "this step is left out; call zero_grad() and go on, they will be sent in step() from here on"
        )
    if not scaled:
        overlap.refuse_written()
    optimizer.steps_without_gradient = optimizer.steps_without_gradient + 1 if space.is_untouched else 0
    if optimizer.steps_without_gradient in (1, 10, 100):
        rank = optimizer.group.rank
        logger.warning("no_gradient %s", without_gradient(optimizer.num_steps + 1, f"rank {rank}"))
    space.gather_gradients(overlap.taken)
    refuse_orphans([space.tensors[i] for i in space.quiet], optimizer.state)
    unscale_(space.g_N, optimizer)


@contextmanager
def heeded(optimizer: OptimizerLike) -> Iterator[None]:
    """A step that is undone inside, for want of a peer or of a finite gradient, is told to optimizer.undone.

    So a loop that outlives its peers (workers/session) has its body run to the end also where a step in it was lost.
    Raises: what is raised inside, where nobody is to be told, and all other errors.
    """
    try:
        yield
    except (PeerLost, NonFiniteInput) as error:
        if optimizer.undone is None:
            raise
        optimizer.undone(error)


def clear_gradients(optimizer: OptimizerLike, set_to_none: bool) -> None:
    """As FlatOptimizer.zero_grad: what a backward has sent that no step() followed is undone first. Collective then."""
    if optimizer.overlap.exchange is not None:
        with heeded(optimizer), optimizer.calling(f"zero_grad() after step {optimizer.num_steps}"):
            optimizer.overlap.abandon()
    else:
        optimizer.overlap.abandon()
    for param in changing.others(optimizer):
        param.grad = None
    if optimizer.overlaps and set_to_none:
        optimizer.space.drop_gradients()
    else:
        optimizer.space.zero_gradients(set_to_none)


def begin_early(optimizer: OptimizerLike) -> Exchange | str:
    """What hooks of the backward that begins now may send, or why they may not."""
    refuse_edited(optimizer.state, optimizer.param_groups, optimizer.listed)
    if optimizer.has_misfits or not changing.is_laid_out(optimizer):
        return "other parameters are trained than in the step before: step() lays them out anew"
    plan = optimizer.plan(optimizer.num_steps + 1)
    optimizer.reduce.draw = optimizer.num_steps
    return optimizer.waits_for(plan) or optimizer.begin_exchange(plan)


def follow_changes(optimizer: OptimizerLike) -> None:
    """Where other parameters are trained than in the step before, go on with those. Collective where they are.

    Raises: PeerLost; WireMismatch where they changed on some ranks only, or otherwise; ValueError.
    """
    overlap = optimizer.overlap
    if (
        not changing.is_laid_out(optimizer) and overlap.exchange is None
    ):  # what has begun to send is a step of the old ones
        overlap.abandon()
        _refuse_step(optimizer, optimizer.plan(optimizer.num_steps + 1))
        changing.go_on_with_trained(optimizer, "step()")
    if optimizer.has_misfits:
        optimizer.take_in()
        optimizer.has_misfits = False


def _refuse_step(optimizer: OptimizerLike, plan: StepPlan) -> None:
    """Take no part in what ranks that go on as before exchange in this step: they find out why, and all raise.

    In a step without communication they do so at the next sync, where this rank waits for them.
    """
    if optimizer.group.size == 1:
        return
    optimizer.scaled = is_scaled(optimizer)
    memories = list(error_memories(optimizer.vectors).values())
    compressed = plan.gradient is not Wire.FULL and memories
    _begin_beside(optimizer, plan)
    if plan.gradient is Wire.LOCAL and plan.momentum is Wire.LOCAL:
        optimizer.send_beside()
    memory = memories[0] if compressed else None
    try:
        optimizer.overlap.complete(
            lambda: refusal(optimizer.reduce, memory, optimizer.mean_wire), partial(send_due, optimizer)
        )
    except Refused:
        return
    raise RuntimeError("an exchange that this rank refused was finished: a defect of thinwire; please report it")


def _begin_beside(optimizer: OptimizerLike, plan: StepPlan) -> None:
    """Send what goes beside before anything else; where hooks may have sent buckets already, after the last bucket.

    So that on the group all ranks have one order, however many buckets the hooks of each have launched.
    """
    optimizer.beside_due = plan.gradient is not Wire.LOCAL or plan.momentum is Wire.COMPRESSED
    if not optimizer.overlaps or optimizer.waits_for(plan) is not None:
        send_due(optimizer)


def send_due(optimizer: OptimizerLike) -> None:
    """send_beside(), where this step has not done so yet. Collective."""
    if optimizer.beside_due:
        optimizer.beside_due = False
        optimizer.send_beside()
