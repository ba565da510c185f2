"""state_dict(), rank_state_dict() and load_state_dict(), with torch.optim's hooks, around what saving.py does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from thinwire.comm.calls import refuse_other_calls
from thinwire.optim.engine import saving, shares
from thinwire.optim.engine.protocol import OptimizerLike
from thinwire.optim.engine.state import error_memories

LOAD_EVERYWHERE = "call load_state_dict() on every rank, of the model and then of the optimizer, before the first step"
SAVE_EVERYWHERE = "call state_dict() on every rank and write what it returns on one, or rank_state_dict() on one alone"


def together(optimizer: OptimizerLike) -> dict[str, Any]:
    """All of the state, for any number of ranks. Collective."""

    def prepare() -> None:
        if error_memories(optimizer.vectors):  # else all of it is local
            refuse_to_be_alone(optimizer)
        optimizer.prepare_to_save()

    with optimizer.calling(f"state_dict() after step {optimizer.num_steps}", SAVE_EVERYWHERE):
        return _saved(optimizer, "state_dict", prepare, saving.collect)


def of_rank(optimizer: OptimizerLike) -> dict[str, Any]:
    """This rank's share of it. Local."""
    return _saved(optimizer, "rank_state_dict", optimizer.note_evidence, saving.collect_share)


def load(optimizer: OptimizerLike, state_dict: dict[str, Any]) -> None:
    """Go on from it. Local. Raises: as FlatOptimizer.load_state_dict."""
    optimizer.overlap.refuse_between("load_state_dict")
    for pre_hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        state_dict = pre_hook(optimizer, state_dict) or state_dict
    optimizer.loaded = saving.apply(optimizer, state_dict)
    optimizer.resumed()
    for post_hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        post_hook(optimizer)


def agree_on_load(optimizer: OptimizerLike) -> None:
    """Once after a load, see that all ranks have loaded what belongs together. Collective, a few bytes.

    Raises: ValueError, alike on every rank, where they do not; PeerLost.
    """
    if optimizer.loaded is not None:
        optimizer.space.take_changes()
        with optimizer.calling(f"load_state_dict() of step {optimizer.num_steps}", LOAD_EVERYWHERE):
            shares.agree(optimizer, optimizer.loaded)
        optimizer.loaded = None


def refuse_to_be_alone(optimizer: OptimizerLike) -> None:
    """Compare, before anything is changed, that all ranks are in the call that this one is in. Collective.

    For calls that could else be taken for a part of a step(), whose collectives are as long. Raises: CallMismatch,
    alike on every rank; PeerLost.
    """
    calls = optimizer.calls
    refuse_other_calls(optimizer.group, calls.now, optimizer.space.p_N.device, remedy=calls.remedy)


def _saved(
    optimizer: OptimizerLike, call: str, prepare: Callable[[], None], collect: Callable[[Any], dict[str, Any]]
) -> dict[str, Any]:
    optimizer.overlap.refuse_between(call)
    for pre_hook in optimizer._optimizer_state_dict_pre_hooks.values():
        pre_hook(optimizer)
    optimizer.space.take_changes()
    prepare()
    optimizer.space.write_back()
    state_dict = collect(optimizer)
    for post_hook in optimizer._optimizer_state_dict_post_hooks.values():
        state_dict = post_hook(optimizer, state_dict) or state_dict
    return state_dict
