"""The shares that ranks saved alone, brought together as one state_dict, which any number of ranks can load.

    shares = [torch.load(f"optimizer-{rank}.pt") for rank in range(4)]
    optimizer.load_state_dict(together(shares))          # on every rank, however many there are now

What all ranks hold alike is taken once; R is the sum of what each brings of it (comm.exchange.held). Between syncs of
0/1 Adam the round ends as in state_dict(): parameters and momentum are the means of those that the ranks hold; so is
the momentum of 1-bit Muon. A round of LocalSteps costs no step: parameters are those where it began, and R has the mean
of what ranks have moved by since.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.optim.engine.share import KEY, Share, is_share, read

logger = logging.getLogger(__name__)

IDENTITY = ("format", "optimizer", "shapes")
NEEDED = (*IDENTITY, "num_steps", "frozen_at", "saved", "param_groups", "frozen", "vectors")
OF_RANK = (KEY, "evidence", "names", "state", "added")
"""What ranks may have saved otherwise. All else that is no tensor is alike."""


def together(shares: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A state_dict of the rank_state_dict() of all ranks, in any order. Local; the shares are not modified.

    R is that of state_dict() at that step, to rounding. Where the ranks were between syncs `parameters` is in it too:
    loading it sets them. Raises: ValueError naming a share that is missing, twice there, damaged or of another save.
    """
    parts = _by_rank(shares)
    first_share, first = parts[0]
    _refuse_other_saves(parts)
    size, in_round = len(parts), bool(first_share.own)
    state = {key: value for key, value in first.items() if key != KEY}
    if in_round:
        if "m_N" in first["vectors"]:
            state["vectors"] = {**first["vectors"], "m_N": _mean([found["vectors"]["m_N"] for _, found in parts])}
        state["saved"] = {**first["saved"], "last_sync": first["num_steps"]}
        if "start_N" in first_share.own:
            state["parameters"] = first_share.own["start_N"]
            if "master" in first:
                masters = first_share.own["master"]
                state["master"] = torch.cat([masters, first["master"][len(masters) :]])
        elif "parameters" in first_share.own:
            state["parameters"] = _mean([share.own["parameters"] for share, _ in parts])
            if "master" in first:
                state["master"] = _mean([found["master"] for _, found in parts])
        lost = [share.rank for share, _ in parts if share.own.get("lost")]
        if lost:
            logger.warning("gradient_left_out step=%d ranks=%s reason=not finite", first["num_steps"], lost)
    residuals = {name: _sum([share.errors[name].part(size) for share, _ in parts]) for name in first_share.errors}
    if "start_N" in first_share.own:
        began = [share.own.get("base_N", share.own["start_N"]) for share, _ in parts]
        moved = [start_N - share.own["parameters"] for start_N, (share, _) in zip(began, parts, strict=True)]
        residuals["move_error"] += _mean([x if bool(x.isfinite().all()) else torch.zeros_like(x) for x in moved])
    for name, frozen in first.get("residuals", {}).items():  # of frozen parameters, whole on every rank
        residuals[name] = torch.cat([residuals[name], frozen])
    return {**state, "residuals": residuals}


def _by_rank(shares: Sequence[dict[str, Any]]) -> list[tuple[Share, dict[str, Any]]]:
    """The shares, read, each with its dict; rank 0 first. Raises: ValueError."""
    if not isinstance(shares, list | tuple) or not shares:
        raise ValueError(
            f"shares = {type(shares).__name__}: must be a list of what rank_state_dict() of all ranks gave"
        )
    found: dict[int, tuple[Share, dict[str, Any]]] = {}
    for at, one in enumerate(shares):
        if not is_share(one):
            what = "state_dict() of all ranks: load it as it is" if isinstance(one, dict) else type(one).__name__
            raise ValueError(f"shares[{at}] is {what}; give what rank_state_dict() of all ranks gave")
        missing = [key for key in NEEDED if key not in one]
        if missing:
            raise ValueError(f"shares[{at}] lacks {missing}: it is not whole; load another file")
        share = read(one)
        if share.rank in found:
            raise ValueError(f"shares[{at}] is of rank {share.rank} of {share.size}, and so is one before it")
        found[share.rank] = share, one
    sizes = {rank: share.size for rank, (share, _) in sorted(found.items())}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"the shares of ranks {list(sizes)} are of {list(sizes.values())} ranks: not of one save")
    size = next(iter(sizes.values()))
    absent = [rank for rank in range(size) if rank not in found]
    if absent:
        raise ValueError(f"{len(found)} shares of {size} ranks: those of ranks {absent} are missing")
    return [found[rank] for rank in range(size)]


def _refuse_other_saves(parts: Sequence[tuple[Share, dict[str, Any]]]) -> None:
    """What all ranks hold alike is alike. Raises: ValueError."""
    first_share, first = parts[0]
    own = {"m_N", "master"} if "parameters" in first_share.own else {"m_N"} if first_share.own else set()
    for share, found in parts:
        for key in filter(lambda key: _is_plain(first[key]) and key not in OF_RANK, first):
            if found.get(key) != first[key]:
                raise ValueError(
                    f"rank 0 saved {key} = {first[key]!r} and rank {share.rank} {found.get(key)!r}: not of one save"
                )
        mine, theirs = ({**one["vectors"], "master": one.get("master")} for one in (first, found))
        for name in mine:
            if name not in own and not _same(mine[name], theirs.get(name)):
                raise ValueError(f"ranks 0 and {share.rank} have saved other values of {name}: not of one save")
        if set(theirs) != set(mine) or set(share.errors) != set(first_share.errors):
            raise ValueError(
                f"ranks 0 and {share.rank} have saved {sorted(mine)} and {sorted(theirs)}: not of one save"
            )
        sizes = {name: held.numel for name, held in share.errors.items()}
        if sizes != {name: held.numel for name, held in first_share.errors.items()}:
            raise ValueError(f"rank {share.rank} has saved errors of {sizes} elements: not of one save")
        if "parameters" in first_share.own:
            x, first_x = share.own.get("parameters"), first_share.own.get("parameters")
            if not (isinstance(x, Tensor) and isinstance(first_x, Tensor) and x.shape == first_x.shape):
                raise ValueError(f"rank {share.rank} lacks parameters of its own between two syncs: it is not whole")


def _is_plain(value: object) -> bool:
    """Without tensors."""
    return not any(isinstance(one, Tensor) for one in (value.values() if isinstance(value, dict) else [value]))


def _same(mine: Tensor | None, theirs: Tensor | None) -> bool:
    """Equal bit for bit; NaN too."""
    if not isinstance(mine, Tensor) or not isinstance(theirs, Tensor):
        return mine is theirs
    alike = mine.dtype == theirs.dtype and mine.shape == theirs.shape
    return alike and torch.equal(mine.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8))


def _sum(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def _mean(parts: Sequence[Tensor]) -> Tensor:
    """Exact where all are equal, as of frozen parameters."""
    return parts[0] + _sum([part - parts[0] for part in parts]) / len(parts)
