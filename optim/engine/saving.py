"""What a state_dict holds, and whether one can be gone on from: all of it is looked at before anything is written."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from thinwire.comm.protocol import FullWire, Group
from thinwire.optim.engine import shares
from thinwire.optim.engine.ages import Age
from thinwire.optim.engine.flat import FlatSpace
from thinwire.optim.engine.hyperparameters import as_python
from thinwire.optim.engine.parameters import LOW_PRECISION
from thinwire.optim.engine.places import FlatTensor, Places, places
from thinwire.optim.engine.state import error_memories, replicated
from thinwire.optim.engine.tensor_states import TensorState, put_, taken

FORMAT = 5
"""Version of what is collected, and of the order of flat vectors. 3: the vectors of a group come first. 4: some
parameters may be frozen. 5: R may be that of gradients, where they are sent in 8 bits. 3 and 4 are read too."""
GRADIENT_ERROR = "gradient_error"
"""The error memory that dense optimizers have with 8 bits, and else not."""
SHORTENED = "shortened"
"""Among the saved values: by what factor max_grad_norm has shortened the last gradient, where R is of gradients."""
COMMON_KEYS = ("num_steps", "frozen_at", "saved", "evidence", "param_groups", "frozen", "ages", "parked", "vectors")
KEYS = (*COMMON_KEYS, "residuals")
"""What every state_dict holds beside what it is (format, optimizer, shapes), and `master` where there is one.

shapes: of all parameters in flat order. frozen: the numbers in it of those that are not in `vectors`. ages: of the
others. parked: [number, steps, seen] of each frozen one that has a state, whose tensors are in PARKED_KEYS, end to end.
`parameters` is there where shares of the middle of a round were brought together: all parameters, as a flat vector.
"""
PARKED_KEYS = ("parked_vectors", "parked_residuals", "parked_master")


class Saved(Protocol):
    """What is read of an optimizer, and set again: see FlatOptimizer."""

    num_steps: int
    frozen_at: int | None
    saved: dict[str, Any]
    evidence: dict[str, Any]
    param_groups: list[dict[str, Any]]
    handed_over: dict[str, Tensor] | None
    ages: list[Age]
    parked: dict[Tensor, TensorState]

    @property
    def num_updates(self) -> int:
        """What Age.unseen is counted in."""

    @property
    def fresh(self) -> Mapping[str, float]:
        """What a tensor begins with, by vector, where that is not 0."""

    @property
    def common_age(self) -> Age:
        """Of a tensor that has been trained from the first step on."""

    @property
    def group(self) -> Group:
        """The ranks."""

    @property
    def common_steps(self) -> int:
        """The last step at which all held the same."""

    @property
    def begun(self) -> dict[str, Any]:
        """What `saved` was at first."""

    @property
    def space(self) -> FlatSpace:
        """Parameters and gradients."""

    @property
    def vectors(self) -> object:
        """A dataclass whose fields declare their Kind."""

    @property
    def full_exchange(self) -> FullWire:
        """How the mean gradient is sent."""

    def gradient_weight(self, group: dict[str, Any]) -> float:
        """What a gradient counts in the momentum of a group."""

    def errors_of_gradients(self, loaded: Mapping[str, Any]) -> str | None:
        """The name of the error memory whose R in this state_dict is that of gradients; None where there is none."""

    def fit_vectors(self) -> None:
        """Have vectors of the type that they are in at this frozen_at."""

    def check_group(self, group: dict[str, Any]) -> None:
        """Raises: ValueError for hyperparameters out of range."""

    def check_saved(self, saved: dict[str, Any]) -> None:
        """Raises: ValueError for values that the algorithm cannot go on from."""

    def own_state(self) -> dict[str, Any]:
        """What this rank alone holds between syncs."""

    def check_own(self, own: dict[str, Any]) -> None:
        """Raises: ValueError where it is not what own_state() gave."""

    def go_on_from(self, own: dict[str, Any], *, in_round: bool) -> None:
        """Hold it, where there is any: as it was, or as if the round had ended there."""

    def common_vectors(self) -> dict[str, Tensor]:
        """What all ranks must hold alike now."""

    def end_round_as(self, src: int) -> None:
        """All ranks hold what rank `src` does. Collective."""


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


def collect(optimizer: Saved) -> dict[str, Any]:
    """All but the parameters, copied. Collective. Error memory is brought together as R, from which the run goes on.

    Raises: PeerLost; then nothing has changed.
    """
    errors = error_memories(optimizer.vectors)
    vectors = replicated(optimizer.vectors)  # before the error memory moves: a momentum may still be in received rows
    residuals = {name: memory.residual() for name, memory in errors.items()}
    optimizer.handed_over = residuals  # from here on ranks may differ in how R is split, until the last has it
    for name, memory in errors.items():
        memory.restore(residuals[name])
    return {**plain(optimizer), **_vectors(optimizer, vectors), "residuals": residuals}


def collect_share(optimizer: Saved) -> dict[str, Any]:
    """The same of this rank alone: in place of R its own share of the error memory. Local; nothing has changed."""
    vectors = replicated(optimizer.vectors)
    return {**plain(optimizer), **_vectors(optimizer, vectors), **shares.collect(optimizer)}


def _vectors(optimizer: Saved, vectors: Mapping[str, Tensor]) -> dict[str, Any]:
    return {
        "state": {},  # of single parameters nothing: so set_optimizer_state_dict of torch hands all on as it is
        "vectors": {name: vector.clone() for name, vector in vectors.items()},
        **({"master": optimizer.space.master()} if optimizer.space.has_master else {}),
        **parked_vectors(optimizer),
    }


def plain(optimizer: Saved) -> dict[str, Any]:
    """What a state_dict holds beside vectors, copied."""
    groups, saved = optimizer.param_groups, copy.deepcopy(optimizer.saved)
    factor = optimizer.space.shortened_by if optimizer.full_exchange == "int8" else None
    if factor is not None and optimizer.errors_of_gradients({"saved": saved, "frozen_at": optimizer.frozen_at}):
        saved[SHORTENED] = float(factor)
    return {
        **_identity(optimizer),
        "num_steps": optimizer.num_steps,
        "frozen_at": optimizer.frozen_at,
        "saved": saved,
        "names": sorted(saved),
        "evidence": copy.deepcopy(optimizer.evidence),
        "param_groups": [
            SavedGroup(copy.deepcopy({k: as_python(v) for k, v in g.items() if k != "params"})) for g in groups
        ],
        "frozen": _frozen(optimizer),
        "ages": [[age.missed, age.unseen] for age in optimizer.ages],
        "parked": [[i, state.steps, state.seen] for i, state in _parked(optimizer)],
    }


def apply(optimizer: Saved, state_dict: object) -> shares.Loaded:
    """Go on from what was collected, by all ranks or by one. Local. Returns what is to be compared with other ranks.

    What is trained now, and what was when it was saved, may differ: each parameter is given its own. Not so in a share.
    Raises: ValueError naming what differs; then nothing has changed.
    """
    is_share = shares.is_share(state_dict)
    loaded = _whole(state_dict, _identity(optimizer), COMMON_KEYS if is_share else KEYS)
    space, vectors, errors = optimizer.space, replicated(optimizer.vectors), error_memories(optimizer.vectors)
    _refuse_other_counts(loaded)
    _refuse_other_values("saved", loaded["saved"], optimizer.begun)
    _refuse_half(loaded)
    _refuse_other_values("evidence", loaded["evidence"], {})
    order = _everything(optimizer).tensors
    frozen = _refuse_other_numbers(loaded, len(order))
    then = places(optimizer.param_groups, {t.param for i, t in enumerate(order) if i not in frozen}.__contains__)
    ages = _refuse_other_ages(loaded, len(then.tensors))
    parked = [order[number] for number, _, _ in loaded["parked"]]
    whole, sizes = then.layout.numel, [tensor.stop - tensor.start for tensor in parked]
    per_element = {name for name, vector in vectors.items() if len(vector) == space.layout.numel}
    of_then = {name: whole if name in per_element else len(then.tensors) for name in vectors}
    of_parked = {name: sum(sizes) if name in per_element else len(parked) for name in vectors}
    _refuse_other_vectors("vectors", loaded["vectors"], _like(vectors, of_then))
    _refuse_no_variance(loaded["vectors"].get("v_N"))
    share = None
    if is_share:
        _refuse_other_frozen(frozen, _frozen(optimizer))
        share = shares.checked(optimizer, loaded)
        of_gradients = share.errors.get(optimizer.errors_of_gradients(loaded) or "")
        if of_gradients is not None and not of_gradients.is_empty and optimizer.full_exchange != "int8":
            raise ValueError(
                f"state_dict is of one rank that sent gradients in 8 bits, and this optimizer has full_exchange = "
                f'{optimizer.full_exchange!r}: make it with full_exchange="int8", or load what state_dict() of all '
                "ranks or optim.saves.together gave"
            )
        optimizer.check_own(share.own)
    else:
        loaded = _with_room(loaded, errors, space.p_N.new_zeros(whole), space.p_N.new_zeros(sum(sizes)))
        residuals = dict.fromkeys([*errors, *_surplus(loaded, errors)], space.p_N)
        _refuse_other_vectors("residuals", loaded["residuals"], _like(residuals, dict.fromkeys(residuals, whole)))
        if "parameters" in loaded:
            mine = _like({"all": space.p_N}, {"all": whole})
            _refuse_other_vectors("parameters", {"all": loaded["parameters"]}, mine)
    if parked:
        _refuse_other_vectors("parked_vectors", loaded.get("parked_vectors"), _like(vectors, of_parked))
        names = [*errors, *_surplus(loaded, errors)]
        of_errors = _like(dict.fromkeys(names, space.p_N), dict.fromkeys(names, sum(sizes)))
        _refuse_other_vectors("parked_residuals", loaded.get("parked_residuals"), of_errors)
    masters = _masters(loaded, "master", then.tensors, space) | _masters(loaded, "parked_master", parked, space)
    groups = _merged_groups(loaded["param_groups"], optimizer.param_groups)
    optimizer.check_saved(loaded["saved"])
    factor = loaded["saved"].get(SHORTENED, 1.0)
    if not isinstance(factor, float) or not 0 <= factor <= 1:
        raise ValueError(f"state_dict has saved['{SHORTENED}'] = {factor!r}, a number from 0 to 1 is needed")
    for group in groups:
        optimizer.check_group(group)
    space.take_changes()  # before anything is written that a parameter in other memory would be taken over
    for group, merged in zip(optimizer.param_groups, groups, strict=True):
        group.update(merged)
    optimizer.num_steps, optimizer.frozen_at = loaded["num_steps"], loaded["frozen_at"]
    optimizer.saved, optimizer.evidence = copy.deepcopy(loaded["saved"]), copy.deepcopy(loaded["evidence"])
    optimizer.fit_vectors()
    counts = [
        (optimizer.num_steps - age.missed, None if age.unseen is None else optimizer.num_updates - age.unseen)
        for age in ages or [optimizer.common_age] * len(then.tensors)
    ]
    states = taken(then, loaded["vectors"], {} if share else loaded["residuals"], masters, counts)
    states |= dict(zip((tensor.param for tensor in parked), _of_parked(loaded, sizes), strict=True))
    _give_out_gradients(optimizer, optimizer.errors_of_gradients(loaded), states, factor)
    for param, state in states.items():
        state.master = masters.get(param)
    held = put_(optimizer, states)
    laid_out = {tensor.param for tensor in space.tensors}
    optimizer.parked = {param: state.copied_like(space.p_N) for param, state in states.items() if param not in laid_out}
    optimizer.handed_over, found = held, shares.Loaded()
    if share is not None:
        optimizer.handed_over = None
        found = shares.take(optimizer, share)
    if "parameters" in loaded:
        _take_parameters(space, then, loaded["parameters"])
    space.load_masters(masters)
    optimizer.go_on_from({} if share is None else share.own, in_round=found.is_in_round)
    return found


def go_on(optimizer: Saved, plain: dict[str, Any], residuals: dict[str, Tensor], parked: dict[str, Any]) -> None:
    """Go on from plain() of another rank, with vectors that are in place: as apply() of the same tensors. Local.

    residuals: R of each error memory, kept until the next step. parked: as parked_vectors() of that rank.
    Raises: ValueError naming what differs; then nothing but the vectors has changed.
    """
    loaded = _whole({**plain, "vectors": {}, **parked}, _identity(optimizer), COMMON_KEYS)
    _refuse_other_values("saved", loaded["saved"], optimizer.begun)
    space, order = optimizer.space, _everything(optimizer).tensors
    aside = [order[number] for number, _, _ in loaded["parked"]]
    masters = _masters(loaded, "parked_master", aside, space)
    groups = _merged_groups(loaded["param_groups"], optimizer.param_groups)
    optimizer.check_saved(loaded["saved"])
    for group in groups:
        optimizer.check_group(group)
    for group, merged in zip(optimizer.param_groups, groups, strict=True):
        group.update(merged)
    optimizer.num_steps, optimizer.frozen_at = loaded["num_steps"], loaded["frozen_at"]
    optimizer.saved, optimizer.evidence = copy.deepcopy(loaded["saved"]), copy.deepcopy(loaded["evidence"])
    ages = _refuse_other_ages(loaded, len(space.tensors))
    optimizer.ages = [optimizer.common_age] * len(space.tensors) if ages is None else ages
    for name, memory in error_memories(optimizer.vectors).items():
        memory.restore(residuals[name])
    states = _of_parked(loaded, [tensor.stop - tensor.start for tensor in aside])
    for tensor, state in zip(aside, states, strict=True):
        state.master = masters.get(tensor.param)
    optimizer.parked = {t.param: state.copied_like(space.p_N) for t, state in zip(aside, states, strict=True)}
    optimizer.handed_over = residuals
    space.write_back()
    optimizer.go_on_from({}, in_round=False)


def parked_vectors(optimizer: Saved) -> dict[str, Any]:
    """The tensors of the frozen parameters that have a state, as a state_dict holds them; nothing where there are none.

    They are copies.
    """
    states = [state for _, state in _parked(optimizer)]
    if not states:
        return {}
    masters = [state.master for state in states if state.master is not None]
    return {
        "parked_vectors": {name: torch.cat([s.vectors[name] for s in states]) for name in states[0].vectors},
        "parked_residuals": {name: torch.cat([s.residuals[name] for s in states]) for name in states[0].residuals},
        **({"parked_master": torch.cat(masters)} if masters else {}),
    }


def room_for_parked(optimizer: Saved, parked: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """As parked_vectors() of a rank whose plain() has these `parked`, with nothing in it yet."""
    if not parked:
        return {}
    order, like, vectors = _everything(optimizer).tensors, optimizer.space.p_N, replicated(optimizer.vectors)
    tensors = [order[number] for number, _, _ in parked]
    whole = sum(tensor.stop - tensor.start for tensor in tensors)
    low = sum(tensor.stop - tensor.start for tensor in tensors if tensor.param.dtype in LOW_PRECISION)
    sizes = {name: whole if len(vector) == like.numel() else len(parked) for name, vector in vectors.items()}
    return {
        "parked_vectors": {name: like.new_zeros(size) for name, size in sizes.items()},
        "parked_residuals": {name: like.new_zeros(whole) for name in error_memories(optimizer.vectors)},
        **({"parked_master": like.new_zeros(low)} if low else {}),
    }


def _refuse_no_variance(v_N: Tensor | None) -> None:
    damaged = 0 if v_N is None else int((~(v_N >= 0)).count_nonzero())
    if damaged:
        raise ValueError(
            f"state_dict has vectors['v_N'] with {damaged} values that are NaN or below 0, as no mean of squares is. "
            "It is damaged; load another file"
        )


@torch.no_grad()
def _take_parameters(space: FlatSpace, then: Places, parameters_N: Tensor) -> None:
    """Parameters <- these, which are laid out as they were then."""
    now = {tensor.param: tensor for tensor in space.tensors}
    for tensor in then.tensors:
        part = parameters_N[tensor.start : tensor.stop]
        if (place := now.get(tensor.param)) is not None:
            space.p_N[place.start : place.stop].copy_(part)
        else:
            tensor.param.copy_(part.view(tensor.param.shape))
    space.write_back()


def _surplus(loaded: Mapping[str, Any], errors: Mapping[str, Any]) -> list[str]:
    """The error memory of gradients, where it was saved and there is none here."""
    found = loaded.get("residuals")  # not in a share of one rank
    there = found if isinstance(found, dict) else {}
    return [GRADIENT_ERROR] if GRADIENT_ERROR in there and GRADIENT_ERROR not in errors and not errors else []


def _with_room(
    loaded: dict[str, Any], errors: Mapping[str, Any], empty_N: Tensor, empty_parked: Tensor
) -> dict[str, Any]:
    """The same with R = 0 of the error memory of gradients, where one is here and none was saved."""
    found = loaded["residuals"]
    if GRADIENT_ERROR not in errors or not isinstance(found, dict) or GRADIENT_ERROR in found:
        return loaded
    parked = loaded.get("parked_residuals")
    more = {"parked_residuals": {**parked, GRADIENT_ERROR: empty_parked}} if isinstance(parked, dict) else {}
    return {**loaded, "residuals": {**found, GRADIENT_ERROR: empty_N}, **more}


def _give_out_gradients(
    optimizer: Saved, name: str | None, states: Mapping[Tensor, TensorState], factor: float
) -> None:
    """m <- m + what R of gradients counts in it, R <- 0, where gradients are not sent in 8 bits here.

    factor: by which max_grad_norm has shortened the last gradient, and so what was left out of those, too.
    v takes R in as a gradient too: where 8 bits have left out all that an element had, v is 0, and m / sqrt(v) no step.
    """
    if name is None or optimizer.full_exchange == "int8":
        return
    beta2 = {p: group.get("betas", (0, 0))[1] for group in optimizer.param_groups for p in group["params"]}
    weights = {p: optimizer.gradient_weight(group) for group in optimizer.param_groups for p in group["params"]}
    for param, state in states.items():
        if name in state.residuals:
            residual = state.residuals[name] * factor
            state.vectors["m_N"] = state.vectors["m_N"] + weights[param] * residual
            if "v_N" in state.vectors:
                state.vectors["v_N"] = state.vectors["v_N"] + (1 - beta2[param]) * residual**2
            state.residuals[name] = torch.zeros_like(residual)


def _frozen(optimizer: Saved) -> list[int]:
    """The numbers in flat order of the parameters that are not laid out."""
    laid_out = {tensor.param for tensor in optimizer.space.tensors}
    return [i for i, tensor in enumerate(_everything(optimizer).tensors) if tensor.param not in laid_out]


def _refuse_other_frozen(theirs: set[int], mine: list[int]) -> None:
    """What is trained is what the share is of. Raises: ValueError."""
    if theirs != set(mine):
        raise ValueError(
            f"state_dict is of one rank and has frozen = {sorted(theirs)}, and this optimizer was made with, or last "
            f"stepped with, {mine} frozen (numbers in the order of its `shapes`): freeze the same parameters before "
            "the optimizer is made, or load what state_dict() of all ranks or optim.saves.together gave"
        )


def _parked(optimizer: Saved) -> list[tuple[int, TensorState]]:
    """The frozen parameters that have a state, by their numbers in flat order."""
    order = _everything(optimizer).tensors
    return [(i, optimizer.parked[tensor.param]) for i, tensor in enumerate(order) if tensor.param in optimizer.parked]


def _everything(optimizer: Saved) -> Places:
    """All parameters in flat order, frozen ones too."""
    return places(optimizer.param_groups, lambda param: True)


def _like(vectors: Mapping[str, Tensor], sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """What they would be with so many elements, without memory."""
    return {name: torch.empty(sizes[name], dtype=vector.dtype, device="meta") for name, vector in vectors.items()}


def _of_parked(loaded: dict[str, Any], sizes: list[int]) -> list[TensorState]:
    """The states of the parameters that were frozen, as views."""
    found = [TensorState(steps, seen) for _, steps, seen in loaded["parked"]]
    for what in ("vectors", "residuals") if found else ():
        for name, x in loaded[f"parked_{what}"].items():
            parts = torch.split(x, sizes if len(x) == sum(sizes) else [1] * len(sizes))
            for state, part in zip(found, parts, strict=True):
                getattr(state, what)[name] = part
    return found


def _identity(optimizer: Saved) -> dict[str, Any]:
    """What a state_dict says of itself."""
    shapes = [list(tensor.param.shape) for tensor in _everything(optimizer).tensors]
    return {"format": FORMAT, "optimizer": type(optimizer).__name__, "shapes": shapes}


def _whole(state_dict: object, expected: Mapping[str, object], keys: Sequence[str]) -> dict[str, Any]:
    """The state_dict itself, when it says of itself what is expected and has all keys. Raises: ValueError."""
    if not isinstance(state_dict, dict):
        raise ValueError(f"state_dict is {type(state_dict).__name__}; give what state_dict() returned")
    if "format" not in state_dict and {"state", "param_groups"} <= state_dict.keys():
        raise ValueError(
            "state_dict is of an optimizer of torch.optim, whose state cannot be taken over: load the model's weights "
            "alone, and begin the optimizer anew; or go on with the optimizer that saved it"
        )
    if state_dict.get("format") == 3:  # nothing could be frozen
        state_dict = {**state_dict, "format": 4, "frozen": [], "ages": None, "parked": []}
    if state_dict.get("format") == 4:  # gradients were sent in full
        state_dict = {**state_dict, "format": FORMAT}
    for key, value in expected.items():
        if state_dict.get(key) != value:
            raise ValueError(f"state_dict has {key} = {state_dict.get(key)!r}, this optimizer needs {value!r}")
    missing = [key for key in keys if key not in state_dict]
    if missing:
        raise ValueError(f"state_dict lacks {missing}: it is not whole; load another checkpoint")
    return state_dict


def _refuse_other_counts(state_dict: dict[str, Any]) -> None:
    """num_steps and frozen_at are what they say. Raises: ValueError."""
    num_steps, frozen_at = state_dict["num_steps"], state_dict["frozen_at"]
    if type(num_steps) is not int or num_steps < 0:
        raise ValueError(f"state_dict has num_steps = {num_steps!r}: must be a whole number, at least 0")
    if frozen_at is not None and (type(frozen_at) is not int or not 1 <= frozen_at <= num_steps):
        raise ValueError(f"state_dict has frozen_at = {frozen_at!r}: must be None or a step, from 1 to {num_steps}")


def _refuse_half(state_dict: dict[str, Any]) -> None:
    """All that was saved has arrived: who fills in a dict takes only the keys that it has. Raises: ValueError."""
    missing = sorted(set(state_dict.get("names", ())) - set(state_dict["saved"]))
    if missing:
        raise ValueError(
            f"state_dict has saved without {missing}, which were saved: torch.distributed.checkpoint.load fills in "
            "only the keys that it is given. Turn the checkpoint into one file with its "
            "format_utils.dcp_to_torch_save, and give what torch.load reads from that"
        )


def _merged_groups(theirs: object, mine: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The groups of `mine` as they would be with the loaded hyperparameters: new dicts. Raises: ValueError."""
    if not isinstance(theirs, list | tuple) or len(theirs) != len(mine):
        found = len(theirs) if isinstance(theirs, list | tuple) else theirs
        raise ValueError(f"state_dict has param_groups = {found}, this optimizer needs a list of {len(mine)}")
    merged = []
    for index, (saved, group) in enumerate(zip(theirs, mine, strict=True)):
        what = f"param_groups[{index}]"
        _refuse_other_values(what, saved, {})
        _refuse_other_values(what, saved, {key: group[key] for key in group if key in saved and key != "params"})
        missing = [key for key in group if key not in (*saved, "params", "param_names", "initial_lr")]
        if missing:
            raise ValueError(f"state_dict has {what} without {missing}: it is of another optimizer")
        kept = {key: value for key, value in saved.items() if key not in ("params", "param_names")}
        merged.append({**group, **copy.deepcopy(kept)})
    return merged


def _refuse_other_vectors(what: str, theirs: object, mine: Mapping[str, Tensor]) -> None:
    """The same names, each with a floating tensor of the same shape, in any precision. Raises: ValueError."""
    if not isinstance(theirs, dict) or set(theirs) != set(mine):
        names = sorted(map(str, theirs)) if isinstance(theirs, dict) else theirs
        raise ValueError(f"state_dict has {what} {names}, this optimizer needs {sorted(mine)}")
    for name, vector in mine.items():
        other = theirs[name]
        if not isinstance(other, Tensor) or not other.dtype.is_floating_point or other.shape != vector.shape:
            found = f"{other.dtype} {list(other.shape)}" if isinstance(other, Tensor) else type(other).__name__
            raise ValueError(
                f"state_dict has {what}[{name!r}] = {found}, this optimizer needs {vector.dtype} {list(vector.shape)}"
            )


def _refuse_other_values(what: str, theirs: object, mine: Mapping[str, Any]) -> None:
    """At least the same keys, with numbers for numbers and lists of the same length for lists. Raises: ValueError."""
    if not isinstance(theirs, dict):
        raise ValueError(f"state_dict has {what} = {theirs!r}: must be a dict")
    for key, value in mine.items():
        if value is None:
            continue
        other = theirs.get(key)
        if isinstance(value, int | float):
            same = isinstance(other, int | float | Tensor)  # torch.optim takes a learning rate as a tensor too
        elif isinstance(value, list | tuple):
            same = isinstance(other, list | tuple) and len(list(other)) == len(value)
        else:
            same = isinstance(other, type(value))
        if not same:
            raise ValueError(f"state_dict has {what}[{key!r}] = {other!r}, this optimizer needs one like {value!r}")


def _refuse_other_numbers(state_dict: dict[str, Any], num_tensors: int) -> set[int]:
    """Which parameters were frozen, by their numbers. `parked` is a part of them. Raises: ValueError."""
    frozen, parked = state_dict["frozen"], state_dict["parked"]
    known = set(range(num_tensors))
    if not isinstance(frozen, list) or not set(map(_hashable, frozen)) < known:
        raise ValueError(f"state_dict has frozen = {frozen!r}: must be numbers of some of {num_tensors} parameters")
    rows = parked if isinstance(parked, list) else [parked]
    for row in rows:
        whole = isinstance(row, list | tuple) and len(row) == 3 and all(type(x) is int and x >= 0 for x in row[:2])
        if not whole or row[0] not in frozen or not _is_count(row[2]):
            raise ValueError(f"state_dict has parked = {row!r}: must be [number of a frozen parameter, steps, seen]")
    return set(frozen)


def _refuse_other_ages(state_dict: dict[str, Any], num_tensors: int) -> list[Age] | None:
    """The ages of the parameters that were trained; None where they are not told. Raises: ValueError."""
    ages = state_dict["ages"]
    if ages is None:
        return None
    whole = isinstance(ages, list) and len(ages) == num_tensors
    if not whole or not all(isinstance(a, list | tuple) and type(a[0]) is int and _is_count(a[1]) for a in ages):
        raise ValueError(f"state_dict has ages = {ages!r}: must be [missed, unseen] of {num_tensors} parameters")
    return [Age(missed, unseen) for missed, unseen in ages]


def _is_count(value: object) -> bool:
    return value is None or type(value) is int


def _hashable(value: object) -> object:
    return value if type(value) is int else None


def _masters(
    state_dict: dict[str, Any], key: str, tensors: Sequence[FlatTensor], space: FlatSpace
) -> dict[Tensor, Tensor]:
    """The masters of those of the tensors that are in low precision, as views. Raises: ValueError."""
    low = [tensor for tensor in tensors if tensor.param.dtype in LOW_PRECISION]
    master, sizes = state_dict.get(key), [tensor.stop - tensor.start for tensor in low]
    if not low:
        if master is not None:
            raise ValueError(
                f"state_dict has the float32 {key} of bfloat16 or float16 parameters, and this optimizer has no such "
                "parameters: convert the model as the saved one was, then make the optimizer"
            )
        return {}
    if master is None:
        raise ValueError(
            f"state_dict has no {key}, and this optimizer has {sum(sizes)} bfloat16 or float16 elements that need "
            "it: it was saved with float32 parameters; train in float32, with torch.autocast, or begin a new run"
        )
    _refuse_other_vectors(key, {"low": master}, _like({"low": space.p_N}, {"low": sum(sizes)}))
    return {tensor.param: part for tensor, part in zip(low, torch.split(master, sizes), strict=True)}
