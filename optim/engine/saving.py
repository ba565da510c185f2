"""What a state_dict holds, and whether one can be gone on from: all of it is looked at before anything is written."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from thinwire.comm.protocol import Group
from thinwire.optim.engine import shares
from thinwire.optim.engine.flat import FlatSpace
from thinwire.optim.engine.state import error_memories, replicated

FORMAT = 3
"""Version of what is collected, and of the order of flat vectors. 3: the vectors of a group come first."""
COMMON_KEYS = ("num_steps", "frozen_at", "saved", "evidence", "param_groups", "vectors")
KEYS = (*COMMON_KEYS, "residuals")
"""What every state_dict holds beside what it is (format, optimizer, shapes), and `master` where there is one.

`parameters` is there where shares of the middle of a round were brought together: all parameters, as a flat vector.
"""


class Saved(Protocol):
    """What is read of an optimizer, and set again: see FlatOptimizer."""

    num_steps: int
    frozen_at: int | None
    saved: dict[str, Any]
    evidence: dict[str, Any]
    param_groups: list[dict[str, Any]]
    handed_over: dict[str, Tensor] | None

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
    }


def plain(optimizer: Saved) -> dict[str, Any]:
    """What a state_dict holds beside vectors, copied."""
    groups = optimizer.param_groups
    return {
        **_identity(optimizer),
        "num_steps": optimizer.num_steps,
        "frozen_at": optimizer.frozen_at,
        "saved": copy.deepcopy(optimizer.saved),
        "names": sorted(optimizer.saved),
        "evidence": copy.deepcopy(optimizer.evidence),
        "param_groups": [SavedGroup(copy.deepcopy({k: v for k, v in g.items() if k != "params"})) for g in groups],
    }


def apply(optimizer: Saved, state_dict: object) -> shares.Loaded:
    """Go on from what was collected, by all ranks or by one. Local. Returns what is to be compared with other ranks.

    Raises: ValueError naming what differs; then nothing has changed.
    """
    is_share = shares.is_share(state_dict)
    loaded = _whole(state_dict, _identity(optimizer), COMMON_KEYS if is_share else KEYS)
    space, vectors, errors = optimizer.space, replicated(optimizer.vectors), error_memories(optimizer.vectors)
    _refuse_other_counts(loaded)
    _refuse_other_values("saved", loaded["saved"], optimizer.begun)
    _refuse_half(loaded)
    _refuse_other_values("evidence", loaded["evidence"], {})
    _refuse_other_vectors("vectors", loaded["vectors"], vectors)
    share = shares.checked(optimizer, loaded) if is_share else None
    if share is None:
        _refuse_other_vectors("residuals", loaded["residuals"], dict.fromkeys(errors, space.p_N))
        if "parameters" in loaded:
            _refuse_other_vectors("parameters", {"all": loaded["parameters"]}, {"all": space.p_N})
    else:
        optimizer.check_own(share.own)
    _refuse_other_master(loaded, space)
    groups = _merged_groups(loaded["param_groups"], optimizer.param_groups)
    optimizer.check_saved(loaded["saved"])
    for group in groups:
        optimizer.check_group(group)
    space.take_changes()  # before anything is written that a parameter in other memory would be taken over
    for group, merged in zip(optimizer.param_groups, groups, strict=True):
        group.update(merged)
    for name, vector in vectors.items():
        vector.copy_(loaded["vectors"][name])
    optimizer.num_steps, optimizer.frozen_at = loaded["num_steps"], loaded["frozen_at"]
    optimizer.saved, optimizer.evidence = copy.deepcopy(loaded["saved"]), copy.deepcopy(loaded["evidence"])
    found = shares.Loaded()
    if share is None:
        residuals = {name: loaded["residuals"][name].to(space.p_N) for name in errors}
        optimizer.handed_over = residuals
        for name, memory in errors.items():
            memory.restore(residuals[name])
    else:
        optimizer.handed_over = None
        found = shares.take(optimizer, share)
    if "parameters" in loaded:
        space.p_N.copy_(loaded["parameters"])
        space.write_back()
    if space.has_master:
        space.load_master(loaded["master"])
    optimizer.go_on_from({} if share is None else share.own, in_round=found.is_in_round)
    return found


def _identity(optimizer: Saved) -> dict[str, Any]:
    """What a state_dict says of itself."""
    return {"format": FORMAT, "optimizer": type(optimizer).__name__, "shapes": optimizer.space.shapes()}


def _whole(state_dict: object, expected: Mapping[str, object], keys: Sequence[str]) -> dict[str, Any]:
    """The state_dict itself, when it says of itself what is expected and has all keys. Raises: ValueError."""
    if not isinstance(state_dict, dict):
        raise ValueError(f"state_dict is {type(state_dict).__name__}; give what state_dict() returned")
    if "format" not in state_dict and {"state", "param_groups"} <= state_dict.keys():
        raise ValueError(
            "state_dict is of an optimizer of torch.optim, whose state cannot be taken over: load the model's weights "
            "alone, and begin the optimizer anew; or go on with the optimizer that saved it"
        )
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


def _refuse_other_master(state_dict: dict[str, Any], space: FlatSpace) -> None:
    """A master on both sides or on neither, of the same size. Raises: ValueError."""
    if not space.has_master:
        if "master" in state_dict:
            raise ValueError(
                "state_dict has the float32 master of bfloat16 or float16 parameters, and this optimizer has no such "
                "parameters: convert the model as the saved one was, then make the optimizer"
            )
        return
    mine = space.master()
    master = state_dict.get("master")
    if master is None:
        raise ValueError(
            f"state_dict has no master, and this optimizer has {mine.numel()} bfloat16 or float16 elements that need "
            "it: it was saved with float32 parameters; train in float32, with torch.autocast, or begin a new run"
        )
    _refuse_other_vectors("master", {"low": master}, {"low": mine})
