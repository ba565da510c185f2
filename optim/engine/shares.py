"""What one rank saves alone: its share, all of a state_dict, but of the error memory only what is on that rank.

    vectors, num_steps, ...   the same on every rank, so that one share is whole but for R
    errors                    this rank's of each error memory (comm.exchange.held); their parts add up to R
    own                       between the syncs of 0/1 Adam what the rank alone holds; else empty

    loaded on rank r of n     that is how it went on, bit for bit                 where it is the share of rank r of n
                              all but R, and a round that others had a part in    where it is that of rank 0
    together(shares)          a state_dict, for any number of ranks               of all n

Loading is local, a share's or a whole state's. So nobody knows then what the others have loaded, and before the first
step (or save) after it the ranks tell each other: they must hold the same, and where some hold no errors of their own,
it is said what is missing.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

import torch

from thinwire.comm.calls import refuse_other_calls
from thinwire.comm.exchange.held import Held
from thinwire.comm.exchange.memory import ErrorMemory
from thinwire.comm.groups.texts import gather_texts
from thinwire.comm.protocol import Group
from thinwire.optim.engine.algorithm import Algorithm
from thinwire.optim.engine.checking import ABSENT, refuse
from thinwire.optim.engine.parameters import digest
from thinwire.optim.engine.share import KEY, REST, Loaded, Share, read
from thinwire.optim.engine.state import error_memories
from thinwire.optim.engine.tensor_states import frozen_names

logger = logging.getLogger(__name__)

LOAD_EVERYWHERE = "call load_state_dict() on every rank, of the model and then of the optimizer, before the first step"
TO_DO = (
    "To lose nothing save optimizer.rank_state_dict() on every rank, and load on each rank its own; or bring all of "
    "them together with thinwire.optim.saves.together"
)


def collect(optimizer: Algorithm[Any]) -> dict[str, Any]:
    """What a share holds beside what all hold alike. Local; new tensors.

    Under a name that no other rank has: torch.distributed.checkpoint takes what has one name on all ranks for equal.
    """
    errors, group = error_memories(optimizer.vectors), optimizer.group
    of_rank = {
        "rank": group.rank,
        "size": group.size,
        "errors": {name: memory.held().plain() for name, memory in errors.items()},
        "own": optimizer.own_state(),
        **({} if (rest := optimizer.clipping.share()) is None else {REST: rest}),
    }
    return {KEY: {f"{group.rank} of {group.size}": of_rank}}


def checked(optimizer: Algorithm[Any], state_dict: Mapping[str, Any]) -> Share:
    """The share that this optimizer can go on from. Raises: ValueError with both values."""
    share, names = read(state_dict), sorted(error_memories(optimizer.vectors))
    group, numel, frozen = optimizer.group, optimizer.space.p_N.numel(), frozen_names(optimizer)
    numels = {name: held.numel for name, held in share.errors.items()}
    of_gradients = share.errors.get(optimizer.errors_of_gradients(state_dict) or "")
    gives_out = of_gradients is not None and not of_gradients.is_empty and optimizer.full_exchange != "int8"
    whole = "load what state_dict() of all ranks or thinwire.optim.saves.together gave"
    refuse(
        [
            (
                "frozen",
                state_dict["frozen"],
                set(state_dict["frozen"]) == set(frozen),
                f"it is of one rank, and this optimizer was made with, or last stepped with, {frozen} frozen (group "
                f"and place in it): freeze the same parameters before the optimizer is made, or {whole}",
            ),
            ("share with errors", sorted(share.errors), sorted(share.errors) == names, f"this optimizer needs {names}"),
            ("share with errors of so many elements", numels, set(numels.values()) <= {numel}, f"needed are {numel}"),
            (
                f"the share of rank {share.rank} of {share.size}, and this is rank {group.rank} of {group.size}",
                ABSENT,
                not share.rank or share.is_of(group),
                f"load on each rank its own share; or bring the shares of all {share.size} ranks together with "
                "thinwire.optim.saves.together, for any number of ranks",
            ),
            (
                "the share of a rank that sent gradients in 8 bits",
                ABSENT,
                not gives_out,
                f"this optimizer has full_exchange = {optimizer.full_exchange!r}: make it with "
                f'full_exchange="int8", or {whole}',
            ),
        ]
    )
    optimizer.check_own(share.own)
    optimizer.clipping.check_share(share.rest)
    return share


def take(optimizer: Algorithm[Any], share: Share) -> Loaded:
    """Hold the errors of a share that was checked; the rest of it is held already. Local."""
    group, mine = optimizer.group, share.is_of(optimizer.group)
    apart = False
    for name, memory in error_memories(optimizer.vectors).items():
        fits = _take_errors(memory, share.errors[name].to(optimizer.space.p_N), share, group)
        apart = apart or (not fits and memory.is_behind)
    optimizer.clipping.hold_share(share.rest if mine else None)
    whole = mine or share.size == 1
    if group.size == 1 and not whole and (missing := _missing(optimizer, share)):
        logger.warning(missing)  # else by rank 0 in _agree()
    return Loaded(share, whole, mine and bool(share.own), apart)


def agree_on_load(optimizer: Algorithm[Any]) -> None:
    """Once after a load, see that all ranks have loaded what belongs together. Collective, a few bytes.

    Raises: ValueError, alike on every rank, where they do not; PeerLost.
    """
    assert optimizer.loaded is not None
    optimizer.space.take_changes()
    with optimizer.calling(f"load_state_dict() of step {optimizer.num_steps}", LOAD_EVERYWHERE):
        _agree(optimizer, optimizer.loaded)
    optimizer.loaded = None


def _agree(optimizer: Algorithm[Any], loaded: Loaded) -> None:
    """See that the ranks have loaded what belongs together, and make them hold the same. Collective.

    Where a rank has loaded the share of another one, rank 0 says what is missing, R is what the ranks have brought, and
    a round of 0/1 Adam ends as if rank 0 had synced alone.
    Raises: ValueError, alike on every rank, for shares that do not belong together; PeerLost.
    """
    group, device = optimizer.group, optimizer.space.p_N.device
    if group.size == 1:
        return
    # A rank that has loaded nothing compares its parameters in its first step, by as many bytes.
    call, _, _ = optimizer.calls.now.partition(" of step ")  # ranks that have loaded other steps hear of that below
    refuse_other_calls(group, call, device, remedy=optimizer.calls.remedy)
    share = loaded.share
    own = {
        "what was loaded": "state_dict() of all ranks" if share is None else f"a share of {share.size} ranks",
        "the step": optimizer.num_steps,
        "the step of the last sync": optimizer.common_steps,
        "as_it_was": loaded.as_it_was,
        "in_round": loaded.is_in_round,
        "apart": loaded.is_apart,
    }
    all_n = _gathered(group, own, device)
    whole = all(one["as_it_was"] for one in all_n)
    for what in list(own)[: 3 if whole else 2]:
        _refuse_different(what, [one[what] for one in all_n])
    if not whole:
        if any(one["in_round"] for one in all_n):
            optimizer.end_round_as(0)
        if group.rank == 0 and share is not None and (missing := _missing(optimizer, share)):
            logger.warning(missing)
    if not whole or any(one["apart"] for one in all_n):
        for memory in error_memories(optimizer.vectors).values():
            memory.restore(memory.residual())  # one owner of each part, replicas of it included
    sums_n = _gathered(group, {name: digest(x) for name, x in optimizer.common_vectors().items()}, device)
    for name in sums_n[0]:
        _refuse_different(name, [one.get(name) for one in sums_n])


def _take_errors(memory: ErrorMemory, held: Held, share: Share, group: Group) -> bool:
    """Returns whether errors are where they were."""
    if share.size == group.size == 1:
        memory.restore(held.part(1))  # all of R; where that is nothing, nothing is held, as in the run that saved
        return True
    if share.is_of(group):
        return memory.hold(held)
    if share.size == group.size:
        memory.restore(torch.zeros_like(held.part(1)))  # rank 0 holds them, where it has loaded the same share
    else:
        memory.restore(held.part(share.size))
    return True


def _missing(optimizer: Algorithm[Any], share: Share) -> str | None:
    """What is lost where this share has been loaded in place of all; None where nothing is."""
    held, missing = share.missing_norm(share.size)
    compresses = optimizer.frozen_at is not None or any(not one.is_empty for one in share.errors.values())
    lost = []
    if share.errors and compresses:
        lost.append(
            f"missing is what {share.size - 1} of {share.size} ranks held of the error memory R (norm about "
            f"{missing:.3g}, beside {held:.3g} that is here): updates that were held back, and are not sent later"
        )
    if share.own:
        lost.append(optimizer.lost_of_others)
    if not lost:
        return None
    step, now = optimizer.num_steps, optimizer.group.size
    event = f"share_of_one_rank step={step} rank={share.rank} of={share.size} loaded_by={now}"
    return f"{event}: {'; '.join(lost)}. {TO_DO}"


def _gathered(group: Group, own: Any, device: torch.device) -> list[Any]:
    return [json.loads(text) for text in gather_texts(group, json.dumps(own).encode(), device)]


def _refuse_different(what: str, values: list[Any]) -> None:
    differ = [rank for rank, value in enumerate(values) if value != values[0]]
    if differ:
        raise ValueError(
            f"the ranks have loaded what does not belong together: {what} is {values[0]} on rank 0 and "
            f"{values[differ[0]]} on rank {differ[0]}. Load the same model on every rank, then on every rank the same "
            "state_dict(); or of rank_state_dict() each rank's own of one save, or on every rank that of rank 0"
        )
