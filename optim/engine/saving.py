"""What a state_dict holds, and how a run goes on from one: states by tensor, taken and put (tensor_states.py).

Everything in it is looked at before anything is written (checking.py). A state of one rank alone: shares.py.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.optim.engine import added, checking, shares
from thinwire.optim.engine.algorithm import Algorithm
from thinwire.optim.engine.flat import FlatSpace
from thinwire.optim.engine.hyperparameters import as_python
from thinwire.optim.engine.local import local
from thinwire.optim.engine.parameters import shard_of
from thinwire.optim.engine.places import places
from thinwire.optim.engine.share import Loaded, Share, is_share
from thinwire.optim.engine.state import MASTER, TensorState, error_memories, replicated, sizes
from thinwire.optim.engine.tensor_states import (
    Order,
    bring_together,
    entries,
    everything,
    frozen_names,
    frozen_states,
    hold,
    joined,
    put_,
    taken,
)

FORMAT = 6
"""Version of what is collected, and of the order of flat vectors."""
OLD_FORMATS = (4, 5)
"""Those of before that are read too:

4    the state of frozen parameters stood apart, under keys of its own: `parked` and what begins so
5    the same; R may be that of gradients, where they are sent in 8 bits
"""
GRADIENT_ERROR = "gradient_error"
"""The error memory that dense optimizers have with 8 bits, and else not."""
SHORTENED = "shortened"
"""Among the saved values: by what factor max_grad_norm has shortened the last gradient, where R is of gradients."""
PLAIN_KEYS = ("num_steps", "frozen_at", "saved", "evidence", "param_groups", "frozen", "entries")
KEYS = (*PLAIN_KEYS, "vectors")
"""What every state_dict holds beside what it is (format, optimizer, shapes), `master` where there is one, and
`residuals` or a share.

shapes: of all parameters in flat order. frozen: the names of those that were not laid out. entries: the name of each
that has a state, and what states.Entry says of it, in the order in which `vectors`, `residuals` and `master` have them:
as they were laid out, then the frozen ones end to end. A share has of `residuals` only these. `parameters` may be there
too, of all entries or of those that were laid out, as where shares of the middle of a round were brought together.
"""


class SavedGroup(dict[str, Any]):
    """A saved parameter group, which says what it is not where somebody looks for torch.optim's. Loaded as a dict."""

    def __missing__(self, key: object) -> Any:
        if key == "params":
            raise ValueError(
                "a parameter group in the state_dict() of a thinwire optimizer has no entry 'params': the state is not "
                "kept by parameter, but as a few vectors of all of them. torch.optim's optimizers cannot load it, nor "
                "can get_state_dict of torch.distributed.checkpoint take it apart. Save "
                "{'model': model.state_dict(), 'optimizer': optimizer.state_dict()} with "
                "torch.distributed.checkpoint.save or torch.save instead"
            )
        raise KeyError(key)

    def __deepcopy__(self, memo: dict[int, Any]) -> SavedGroup:
        return SavedGroup(copy.deepcopy(dict(self), memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, (), None, None, iter(self.items())  # what torch.load takes with weights_only


def collect(optimizer: Algorithm[Any]) -> dict[str, Any]:
    """All but the parameters, copied. Collective. Error memory is brought together as R, from which the run goes on.

    Raises: PeerLost; then nothing has changed.
    """
    vectors = replicated(optimizer.vectors)  # before the error memory moves: a momentum may still be in received rows
    residuals, more = bring_together(optimizer), frozen_states(optimizer)
    return {
        **plain(optimizer),
        **_vectors(optimizer, vectors, more),
        "residuals": {name: joined(r_N, name, more) for name, r_N in residuals.items()},
    }


def collect_share(optimizer: Algorithm[Any]) -> dict[str, Any]:
    """The same of this rank alone: in place of R its own share of the error memory. Local; nothing has changed."""
    more, nothing = frozen_states(optimizer), optimizer.space.p_N.new_empty(0)
    residuals = {name: joined(nothing, name, more) for name in error_memories(optimizer.vectors)}
    return {
        **plain(optimizer),
        **_vectors(optimizer, replicated(optimizer.vectors), more),
        **({"residuals": residuals} if more else {}),
        **shares.collect(optimizer),
    }


def _vectors(optimizer: Algorithm[Any], vectors: Mapping[str, Tensor], more: Sequence[TensorState]) -> dict[str, Any]:
    """more: the states of frozen parameters."""
    masters = [
        *optimizer.space.masters().values(),
        *(state.values[MASTER] for state in more if MASTER in state.values),
    ]
    return {
        "state": {},  # of torch's form nothing: so set_optimizer_state_dict of torch hands all on as it is
        "vectors": {name: joined(x, name, more) if more else x.clone() for name, x in vectors.items()},
        **({MASTER: torch.cat(masters)} if masters else {}),
        **({added.ADDED: others} if (others := added.collect(optimizer)) else {}),
    }


def plain(optimizer: Algorithm[Any]) -> dict[str, Any]:
    """What a state_dict holds beside vectors, copied."""
    groups, saved = optimizer.param_groups, copy.deepcopy(optimizer.saved)
    factor = optimizer.space.shortened_by if optimizer.full_exchange == "int8" else None
    if factor is not None and optimizer.errors_of_gradients({"saved": saved, "frozen_at": optimizer.frozen_at}):
        saved[SHORTENED] = float(factor)
    return {
        **identity(optimizer),
        "num_steps": optimizer.num_steps,
        "frozen_at": optimizer.frozen_at,
        "saved": saved,
        "names": sorted(saved),
        "evidence": copy.deepcopy(optimizer.evidence),
        "param_groups": [
            SavedGroup(copy.deepcopy({k: as_python(v) for k, v in g.items() if k != "params"})) for g in groups
        ],
        "frozen": frozen_names(optimizer),
        "entries": [list(entry) for entry in entries(optimizer)],
    }


def apply(optimizer: Algorithm[Any], state_dict: object) -> Loaded:
    """Go on from what was collected, by all ranks or by one. Local. Returns what is to be compared with other ranks.

    What is trained now, and what was when it was saved, may differ: each parameter is given its own. Not so in a share.
    Raises: ValueError naming what differs; then nothing has changed.
    """
    loaded = _whole(optimizer, state_dict)
    order = _checked(optimizer, loaded)
    _refuse_other_vectors(optimizer, loaded, order)
    masters = checking.masters(loaded.get(MASTER), order.tensors)
    share, residuals = _errors(optimizer, loaded, order)
    groups = checking.merged_groups(optimizer.param_groups, optimizer.check_group, loaded["param_groups"])
    optimizer.check_saved(loaded["saved"])
    checking.refuse([added.row(optimizer, loaded)])
    optimizer.space.take_changes()  # before anything is written that a parameter in other memory would be taken over

    _take_plain(optimizer, loaded, groups)
    optimizer.fit_vectors()
    counts = [(steps, seen) for _, steps, seen in loaded["entries"]]
    states = taken(order.tensors, {**loaded["vectors"], **residuals}, masters, counts)
    _give_out_gradients(optimizer, optimizer.errors_of_gradients(loaded), states, loaded["saved"].get(SHORTENED, 1.0))
    optimizer.handed_over, found = put_(optimizer, states), Loaded()
    optimizer.clipping.forget()
    if share is not None:
        optimizer.handed_over = None
        found = shares.take(optimizer, share)
    if "parameters" in loaded:
        _take_parameters(optimizer.space, order, loaded["parameters"])
    optimizer.space.load_masters(masters)
    optimizer.go_on_from({} if share is None else share.own, in_round=found.is_in_round)
    added.replace(optimizer, loaded.get(added.ADDED, {}))
    return found


def go_on(
    optimizer: Algorithm[Any],
    plain: dict[str, Any],
    states: Mapping[Tensor, TensorState],
    residuals: dict[str, Tensor],
) -> None:
    """Go on from plain() of another rank, with live vectors that are in place: as apply() of the same. Local.

    states: those of its entries. residuals: R of each error memory, kept until the next step.
    Raises: ValueError naming what differs; then nothing but the vectors has changed.
    """
    _checked(optimizer, plain)
    groups = checking.merged_groups(optimizer.param_groups, optimizer.check_group, plain["param_groups"])
    optimizer.check_saved(plain["saved"])
    _take_plain(optimizer, plain, groups)
    hold(optimizer, states, residuals)
    optimizer.handed_over = residuals
    optimizer.space.write_back()
    optimizer.go_on_from({}, in_round=False)


def identity(optimizer: Algorithm[Any]) -> dict[str, Any]:
    """What a state_dict says of itself."""
    shapes = [list(tensor.shape) for tensor in everything(optimizer)]
    shards = list(dict.fromkeys(shard_of(tensor.param) for tensor in everything(optimizer)))
    of_box = {} if optimizer.space.box is None else {"shards": shards}
    return {"format": FORMAT, "optimizer": type(optimizer).__name__, "shapes": shapes, **of_box}


def _whole(optimizer: Algorithm[Any], state_dict: object) -> dict[str, Any]:
    """The state_dict, in the form of now, when it says of itself what it must and has all keys. Raises: ValueError."""
    if not isinstance(state_dict, dict):
        raise ValueError(f"state_dict is {type(state_dict).__name__}; give what state_dict() returned")
    if "format" not in state_dict and {"state", "param_groups"} <= state_dict.keys():
        raise ValueError(
            "state_dict is of an optimizer of torch.optim, whose state cannot be taken over: load the model's weights "
            "alone, and begin the optimizer anew; or go on with the optimizer that saved it"
        )
    mine = identity(optimizer)
    checking.refuse(checking.identity(state_dict, mine, reads=(FORMAT, *OLD_FORMATS)))
    loaded = modern(state_dict, optimizer.param_groups)
    checking.refuse_missing("state_dict", loaded, KEYS if is_share(loaded) else (*KEYS, "residuals"))
    return loaded


def _checked(optimizer: Algorithm[Any], loaded: Mapping[str, Any]) -> Order:
    """Where entries stand, where plain values fit. Raises: ValueError."""
    every = everything(optimizer)
    checking.refuse(checking.plain_values(loaded, optimizer.begun, [tensor.name for tensor in every]))
    factor = loaded["saved"].get(SHORTENED, 1.0)
    fits = isinstance(factor, float) and 0 <= factor <= 1
    checking.refuse([(f"saved['{SHORTENED}']", factor, fits, "a number from 0 to 1 is needed")])
    frozen = {tensor.param for tensor in every if tensor.name in loaded["frozen"]}
    names = [name for name, *_ in loaded["entries"]]
    live = places(optimizer.param_groups, lambda param: param not in frozen)
    order = Order.of(live, [one for one in every if one.param in frozen and one.name in names])
    expected = [tensor.name for tensor in order.tensors]
    checking.refuse([("entries", names, names == expected, f"this optimizer needs those of {expected}")])
    return order


def _refuse_other_vectors(optimizer: Algorithm[Any], loaded: Mapping[str, Any], order: Order) -> None:
    mine = optimizer.space.p_N.numel()
    needed = sizes(optimizer.vectors, mine).items()
    lengths = {name: order.numel if size == mine else len(order.tensors) for name, size in needed}
    checking.refuse(checking.vectors("vectors", loaded["vectors"], lengths))
    checking.refuse(checking.variance(loaded["vectors"].get("v_N")))
    if "parameters" in loaded:
        checking.refuse([checking.vector("parameters", loaded["parameters"], order.numel_live, order.numel)])


def _errors(
    optimizer: Algorithm[Any], loaded: Mapping[str, Any], order: Order
) -> tuple[Share | None, dict[str, Tensor]]:
    """The share, where it is one, and R of each error memory: of a share that of frozen parameters alone, in its place.

    Raises: ValueError for errors that cannot be held.
    """
    needed = dict.fromkeys(error_memories(optimizer.vectors), order.numel)
    theirs = loaded.get("residuals")
    if not is_share(loaded):
        needed.pop(GRADIENT_ERROR, None)  # R = 0 where none was saved; what was is given out where none is kept here
        needed |= {GRADIENT_ERROR: order.numel} if isinstance(theirs, dict) and GRADIENT_ERROR in theirs else {}
        checking.refuse(checking.vectors("residuals", theirs, needed))
        return None, loaded["residuals"]
    share = shares.checked(optimizer, loaded)
    if order.numel == order.numel_live:
        return share, {}
    frozen = dict.fromkeys(needed, order.numel - order.numel_live)
    checking.refuse(checking.vectors("residuals", theirs, frozen))
    none_N = optimizer.space.p_N.new_zeros(order.numel_live)
    return share, {name: torch.cat([none_N, r.to(none_N)]) for name, r in loaded["residuals"].items()}


def _take_plain(optimizer: Algorithm[Any], loaded: Mapping[str, Any], groups: Sequence[dict[str, Any]]) -> None:
    for group, merged in zip(optimizer.param_groups, groups, strict=True):
        group.update(merged)
    optimizer.num_steps, optimizer.frozen_at = loaded["num_steps"], loaded["frozen_at"]
    optimizer.saved, optimizer.evidence = copy.deepcopy(loaded["saved"]), copy.deepcopy(loaded["evidence"])


@torch.no_grad()
def _take_parameters(space: FlatSpace, order: Order, parameters_N: Tensor) -> None:
    """Parameters <- these, which stand as they were laid out then."""
    now = {tensor.param: tensor for tensor in space.tensors}
    for tensor in order.tensors if len(parameters_N) == order.numel else order.tensors[: order.num_live]:
        part = parameters_N[tensor.start : tensor.stop]
        if (place := now.get(tensor.param)) is not None:
            space.p_N[place.start : place.stop].copy_(part)
        else:
            local(tensor.param).copy_(part.view(tensor.shape))
    space.write_back()


def _give_out_gradients(
    optimizer: Algorithm[Any], name: str | None, states: Mapping[Tensor, TensorState], factor: float
) -> None:
    """m <- m + what R of gradients counts in it, R <- 0, where gradients are not sent in 8 bits here.

    factor: by which max_grad_norm has shortened the last gradient, and so what was left out of those, too.
    v takes R in as a gradient too: where 8 bits have left out all that an element had, v is 0, and m / sqrt(v) no step.
    """
    if name is None or optimizer.full_exchange == "int8":
        return
    group_of = {param: group for group in optimizer.param_groups for param in group["params"]}
    for param, state in states.items():
        if name in state.values:
            group, residual = group_of[param], state.values.pop(name) * factor
            state.values["m_N"] = state.values["m_N"] + optimizer.gradient_weight(group) * residual
            if "v_N" in state.values:
                state.values["v_N"] = state.values["v_N"] + (1 - group["betas"][1]) * residual**2


def modern(state_dict: dict[str, Any], param_groups: list[dict[str, Any]]) -> dict[str, Any]:
    """One of these as one of FORMAT; any other as it is. Its shapes are those of the groups.

    Raises: ValueError where it is not whole.
    """
    if state_dict.get("format") not in OLD_FORMATS:
        return state_dict
    try:
        return {**state_dict, **_old_entries(state_dict, param_groups), **_old_vectors(state_dict), "format": FORMAT}
    except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
        raise ValueError(
            f"state_dict has format = {state_dict['format']} and is not whole ({error!r}); load another checkpoint"
        ) from error


def _old_entries(old: dict[str, Any], param_groups: list[dict[str, Any]]) -> dict[str, Any]:
    order = places(param_groups, lambda param: True).tensors
    frozen = [order[number] for number in old["frozen"]]
    aside = {tensor.param for tensor in frozen}
    trained = places(param_groups, lambda param: param not in aside).tensors
    steps, updates = old["num_steps"], old["saved"].get("variance_updates", old["num_steps"])
    ages = zip(trained, old["ages"], strict=True)
    live = [[one.name, steps - age[0], None if age[1] is None else updates - age[1]] for one, age in ages]
    parked = [[order[number].name, steps, seen] for number, steps, seen in old["parked"]]
    return {"frozen": [tensor.name for tensor in frozen], "entries": live + parked}


def _old_vectors(old: dict[str, Any]) -> dict[str, Any]:
    """Of a share `residuals` are those of frozen parameters alone."""
    if not old["parked"]:
        return {}
    found = {}
    for key in ("vectors", "residuals"):
        live, parked = old.get(key), old[f"parked_{key}"]
        found[key] = parked if live is None else {name: torch.cat([x, parked[name]]) for name, x in live.items()}
    masters = [old[key] for key in ("master", "parked_master") if key in old]
    return {**found, **({"master": torch.cat(masters)} if masters else {})}
