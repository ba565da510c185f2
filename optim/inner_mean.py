"""What the inner optimizers of LocalSteps remember, made equal on all ranks before it is saved."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from thinwire.comm.groups.texts import texts_if_they_differ
from thinwire.comm.kernels.peak import witness
from thinwire.optim.engine.added import described
from thinwire.optim.engine.optimizer import FlatOptimizer
from thinwire.optim.inner import plain_of, sorted_out


@torch.no_grad()
def equalise_inner(optimizer: FlatOptimizer[Any]) -> None:
    """Moments of the inner optimizers <- their mean; what has none <- rank 0's. Collective.

    Raises: as LocalSteps.prepare_to_save; then nothing has changed.
    """
    optimizer.refuse_to_be_alone()
    if optimizer.group.size > 1:
        _refuse_other_state(optimizer)
        kept = {param: optimizer.kept_beside(param) for group in optimizer.param_groups for param in group["params"]}
        moments, others = sorted_out(kept.values())
        means = [moment.detach().to(optimizer.space.p_N, copy=True).view(-1) for moment in moments]
        for mean in means:
            optimizer.group.mean_(mean)
        given = _given_by_first(optimizer, others)
        plain = _plain_of_first(optimizer, list(kept.values()))
        if not all(bool(torch.isfinite(witness(mean))) for mean in means):
            raise RuntimeError(
                f"after step {optimizer.num_steps} a moment of some rank's inner optimizer holds NaN or infinity, so "
                "that no state can be saved; nothing was changed. Load a checkpoint of before on every rank"
            )
        for x, common in zip([*moments, *others], [*means, *given], strict=True):
            x.copy_(common.view(x.shape))
        for (param, one), numbers in zip(kept.items(), plain, strict=True):
            optimizer.keep_beside(param, {**one, **numbers})


def _given_by_first(optimizer: FlatOptimizer[Any], others: Sequence[Tensor]) -> list[Tensor]:
    """These of rank 0, new. Collective."""
    device = optimizer.space.p_N.device
    as_bytes = [x.detach().to(device).contiguous().view(-1).view(torch.uint8) for x in others if x.numel()]
    if not as_bytes:
        return [x.clone() for x in others]
    all_B = torch.cat(as_bytes)
    optimizer.group.broadcast_(all_B)
    parts = torch.split(all_B, [x.nbytes for x in others])
    return [part.clone().view(x.dtype) if x.numel() else x.clone() for part, x in zip(parts, others, strict=True)]


def _plain_of_first(optimizer: FlatOptimizer[Any], kept: Sequence[dict[Any, Any]]) -> list[dict[Any, Any]]:
    """Numbers and texts among what rank 0 keeps of each parameter; those of its groups become this rank's too."""
    here = [[plain_of(group) for group in optimizer.param_groups], [plain_of(one) for one in kept]]
    texts = texts_if_they_differ(optimizer.group, json.dumps(here), optimizer.space.p_N.device)
    groups, found = here if texts is None else json.loads(texts[0])
    for group, theirs in zip(optimizer.param_groups, groups, strict=True):
        group.update(theirs)
    return list(found)


def _refuse_other_state(optimizer: FlatOptimizer[Any]) -> None:
    """Raises: ValueError, alike on every rank, where inner optimizers keep different things."""
    rows = [row for row in described(optimizer) if row[2] is not None]
    for name, key, dtype, what in rows:
        if dtype == "":
            raise ValueError(
                f"the inner optimizer keeps {key!r} of parameter {name} (group and place in it), {what}: ranks have no "
                "mean of that. Save rank_state_dict() on every rank, which each loads again. Nothing was changed"
            )
    texts = texts_if_they_differ(optimizer.group, "\n".join(map(str, rows)), optimizer.space.p_N.device)
    if texts is None:
        return
    other = next(rank for rank, theirs in enumerate(texts) if theirs != texts[0])
    sides = [[line or "nothing" for line in texts[rank].split("\n")] for rank in (0, other)]
    first, theirs = next(pair for pair in zip_longest(*sides, fillvalue="nothing") if pair[0] != pair[1])
    raise ValueError(
        f"the inner optimizer of rank 0 keeps {first} (parameter, name, type, shape), that of rank {other} {theirs}: "
        "they have no mean, as where a rank has made no step yet; let every rank make one, then save. Nothing was "
        "changed"
    )
