"""Whether what is to be loaded is whole, and of this optimizer: all of it is looked at before anything is written.

What is asked are rows of a table: where it stands, what is there, whether it fits, and what is needed. The first row
that does not fit is the error, so that a later one may rely on those before it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.optim.engine.parameters import LOW_PRECISION
from thinwire.optim.engine.places import FlatTensor

Row = tuple[str, object, bool, str]
"""Where, what is there (ABSENT: nothing to be shown), whether it fits, what is needed."""
ABSENT = object()

ANOTHER = "it is not whole; load another checkpoint"
FILLED_BY_HALVES = (
    "which were saved: torch.distributed.checkpoint.load fills in only the keys that it is given. Turn the checkpoint "
    "into one file with its format_utils.dcp_to_torch_save, and give what torch.load reads from that"
)


def refuse(rows: Iterable[Row]) -> None:
    """Raises: ValueError for the first row that does not fit, with both values."""
    for where, found, fits, needed in rows:
        if not fits:
            there = "" if found is ABSENT else f" = {_shown(found)}"
            raise ValueError(f"state_dict has {where}{there}: {needed}")


def refuse_missing(what: str, found: Mapping[str, Any], needed: Iterable[str]) -> None:
    """Raises: ValueError where keys are missing."""
    missing = [key for key in needed if key not in found]
    if missing:
        raise ValueError(f"{what} lacks {missing}: {ANOTHER}")


OTHER_SHARDS = (
    "this rank has {own}: with boxes of as many ranks each rank loads what the rank at its place in a box has saved; "
    "for others save and load by thinwire.integrations.checkpoint.by_parameter (docs/sharded.md)"
)


def identity(loaded: Mapping[str, Any], mine: Mapping[str, Any], reads: Sequence[int]) -> Iterator[Row]:
    """It is of the same optimizer, and of the same shapes, in a format that is read."""
    of, needed = loaded.get("format"), f"this optimizer reads {', '.join(map(str, reads))}"
    yield "format", of, of in reads, f"{needed}; load an older one with the thinwire that saved it"
    kind = loaded.get("optimizer")
    yield "optimizer", kind, kind == mine["optimizer"], f"this optimizer needs {mine['optimizer']!r}"
    theirs: Any = loaded.get("shapes")
    yield "shapes", theirs, isinstance(theirs, list), "must be a list of the shapes of all parameters"
    shards, own = loaded.get("shards", []), mine.get("shards", [])
    yield "shards", shards, shards == own, OTHER_SHARDS.format(own=own)
    another = "it is of another model; go back to the one that was saved, or begin a new run"
    for i, shape in enumerate(mine["shapes"][: len(theirs)]):
        yield f"shapes[{i}]", theirs[i], theirs[i] == shape, f"this optimizer needs {shape}: {another}"
    num = len(mine["shapes"])
    yield f"{len(theirs)} shapes", ABSENT, len(theirs) == num, f"this optimizer has {num} parameters: {another}"


def plain_values(loaded: Mapping[str, Any], begun: Mapping[str, Any], names: Sequence[str]) -> Iterator[Row]:
    """All that is no vector and no parameter group. begun: saved values of a beginning; names: of all parameters."""
    steps, frozen_at, saved = loaded["num_steps"], loaded["frozen_at"], loaded["saved"]
    yield "num_steps", steps, is_count(steps), "must be a whole number, at least 0"
    fits = frozen_at is None or (is_count(frozen_at) and 1 <= frozen_at <= steps)
    yield "frozen_at", frozen_at, fits, f"must be None or a step, from 1 to {steps}"
    yield from values("saved", saved, begun)
    listed = loaded.get("names", ())
    yield "names", listed, isinstance(listed, list | tuple), "must be a list of the names in saved"
    missing = sorted(set(listed) - set(saved))
    yield f"saved without {missing}", ABSENT, not missing, FILLED_BY_HALVES
    yield from values("evidence", loaded["evidence"], {})
    frozen, rows = loaded["frozen"], loaded["entries"]
    fits = isinstance(frozen, list) and all(name in names for name in frozen) and len(frozen) < len(names)
    yield "frozen", frozen, fits, f"must be names of some of {len(names)} parameters"
    fits = isinstance(rows, list | tuple) and all(_is_entry(row) for row in rows)
    yield "entries", rows, fits, "must be [parameter, steps, updates of its variance] of each that has a state"


def values(what: str, theirs: Any, mine: Mapping[str, Any]) -> Iterator[Row]:
    """A dict with at least the same keys, numbers for numbers and lists of the same length for lists."""
    yield what, theirs, isinstance(theirs, dict), "must be a dict"
    for key, value in mine.items():
        other = theirs.get(key)
        if isinstance(value, int | float):
            fits = isinstance(other, int | float | Tensor)  # torch.optim takes a learning rate as a tensor too
        elif isinstance(value, list | tuple):
            fits = isinstance(other, list | tuple) and len(list(other)) == len(value)
        else:
            fits = value is None or isinstance(other, type(value))
        yield f"{what}[{key!r}]", other, fits, f"this optimizer needs one like {value!r}"


def vectors(what: str, theirs: Any, needed: Mapping[str, int]) -> Iterator[Row]:
    """A dict of floating vectors of these lengths, in any precision."""
    found = sorted(map(str, theirs)) if isinstance(theirs, dict) else theirs
    yield what, found, isinstance(theirs, dict) and set(theirs) == set(needed), f"this optimizer needs {sorted(needed)}"
    for name, size in needed.items():
        yield vector(f"{what}[{name!r}]", theirs[name], size)


def vector(where: str, x: object, *lengths: int) -> Row:
    """A floating vector of one of these lengths."""
    fits = isinstance(x, Tensor) and x.dtype.is_floating_point and x.dim() == 1 and len(x) in lengths
    return where, x, fits, f"this optimizer needs a floating vector of {' or '.join(map(str, lengths))}"


def variance(v_N: Tensor | None) -> Iterator[Row]:
    """A mean of squares is a number, and not below 0."""
    damaged = 0 if v_N is None else int((~(v_N >= 0)).count_nonzero())
    why = "as no mean of squares is. It is damaged; load another file"
    yield f"vectors['v_N'] with {damaged} values that are NaN or below 0", ABSENT, not damaged, why


def merged_groups(
    mine: Sequence[dict[str, Any]], check_group: Callable[[dict[str, Any]], None], theirs: Any
) -> list[dict[str, Any]]:
    """The parameter groups as they would be with the loaded hyperparameters: new dicts. Raises: ValueError.

    check_group: refuses hyperparameters out of range.
    """
    fits = isinstance(theirs, list | tuple) and len(theirs) == len(mine)
    found = len(theirs) if isinstance(theirs, list | tuple) else theirs
    refuse([("param_groups", found, fits, f"this optimizer needs a list of {len(mine)}")])
    merged = []
    for index, (saved, group) in enumerate(zip(theirs, mine, strict=True)):
        what = f"param_groups[{index}]"
        refuse(values(what, saved, {}))
        refuse(values(what, saved, {key: group[key] for key in group if key in saved and key != "params"}))
        missing = [key for key in group if key not in (*saved, "params", "param_names", "initial_lr")]
        refuse([(f"{what} without {missing}", ABSENT, not missing, "it is of another optimizer")])
        kept = {key: value for key, value in saved.items() if key not in ("params", "param_names")}
        turned = {key: tuple(kept[key]) for key in kept if isinstance(group.get(key), tuple)}  # JSON has lists alone
        merged.append({**group, **copy.deepcopy({**kept, **turned})})
        check_group(merged[-1])
    return merged


def masters(found: Any, tensors: Sequence[FlatTensor]) -> dict[Tensor, Tensor]:
    """The masters of those of the tensors that are in low precision, as views. Raises: ValueError."""
    low = [tensor for tensor in tensors if tensor.param.dtype in LOW_PRECISION]
    counts = [tensor.stop - tensor.start for tensor in low]
    if not low and found is not None:
        raise ValueError(
            "state_dict has the float32 master of bfloat16 or float16 parameters, and this optimizer has no such "
            "parameters: convert the model as the saved one was, then make the optimizer"
        )
    if low and found is None:
        raise ValueError(
            f"state_dict has no master, and this optimizer has {sum(counts)} bfloat16 or float16 elements that need "
            "it: it was saved with float32 parameters; train in float32, with torch.autocast, or begin a new run"
        )
    if not low:
        return {}
    refuse([vector("master", found, sum(counts))])
    return {tensor.param: part for tensor, part in zip(low, torch.split(found, counts), strict=True)}


def is_count(value: object) -> bool:
    """A whole number, at least 0."""
    return type(value) is int and value >= 0


def _is_entry(row: Any) -> bool:
    whole = isinstance(row, list | tuple) and len(row) == 3 and is_count(row[1])
    return whole and (row[2] is None or type(row[2]) is int)


def _shown(found: object) -> str:
    if isinstance(found, Tensor):
        return f"{found.dtype} {list(found.shape)}"
    return repr(found)
