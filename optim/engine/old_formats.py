"""State dicts of before, read as those of now.

4    the state of frozen parameters stood apart, under keys of its own: `parked` and what begins so
5    the same; R may be that of gradients, where they are sent in 8 bits
"""

from __future__ import annotations

from typing import Any

import torch

from thinwire.optim.engine.places import places

OLD_FORMATS = (4, 5)


def modern(state_dict: dict[str, Any], param_groups: list[dict[str, Any]], now: int) -> dict[str, Any]:
    """One of these as one of format `now`; any other as it is. Its shapes are those of the groups.

    Raises: ValueError where it is not whole.
    """
    if state_dict.get("format") not in OLD_FORMATS:
        return state_dict
    try:
        return {**state_dict, **_entries(state_dict, param_groups), **_vectors(state_dict), "format": now}
    except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
        raise ValueError(
            f"state_dict has format = {state_dict['format']} and is not whole ({error!r}); load another checkpoint"
        ) from error


def _entries(old: dict[str, Any], param_groups: list[dict[str, Any]]) -> dict[str, Any]:
    order = places(param_groups, lambda param: True).tensors
    frozen = [order[number] for number in old["frozen"]]
    aside = {tensor.param for tensor in frozen}
    trained = places(param_groups, lambda param: param not in aside).tensors
    steps, updates = old["num_steps"], old["saved"].get("variance_updates", old["num_steps"])
    ages = zip(trained, old["ages"], strict=True)
    live = [[one.name, steps - age[0], None if age[1] is None else updates - age[1]] for one, age in ages]
    parked = [[order[number].name, steps, seen] for number, steps, seen in old["parked"]]
    return {"frozen": [tensor.name for tensor in frozen], "entries": live + parked}


def _vectors(old: dict[str, Any]) -> dict[str, Any]:
    """Of a share `residuals` are those of frozen parameters alone."""
    if not old["parked"]:
        return {}
    found = {}
    for key in ("vectors", "residuals"):
        live, parked = old.get(key), old[f"parked_{key}"]
        found[key] = parked if live is None else {name: torch.cat([x, parked[name]]) for name, x in live.items()}
    masters = [old[key] for key in ("master", "parked_master") if key in old]
    return {**found, **({"master": torch.cat(masters)} if masters else {})}
