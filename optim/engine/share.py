"""The share that one rank saved, read and whole, and what a rank knows of what it has loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch

from thinwire.comm.exchange.held import Held
from thinwire.comm.protocol import Group
from thinwire.optim.engine.checking import ABSENT, is_count, refuse, refuse_missing

KEY = "share"
"""What a share has in the place of `residuals`: one entry, by the name "0 of 2" that of rank 0 of 2, a dict of KEYS."""
KEYS = ("rank", "size", "errors", "own")
REST = "rest"
"""Beside KEYS, where max_grad_norm clips by what was known in the step before: as Clipping.share()."""


@dataclass(frozen=True, slots=True)
class Share:
    """A share that fits. errors: of each error memory; own: as own_state(); rest: as Clipping.share()."""

    rank: int
    size: int
    errors: dict[str, Held]
    own: dict[str, Any]
    rest: Any = None

    def is_of(self, group: Group) -> bool:
        """Was it saved by this rank of as many ranks?"""
        return (self.rank, self.size) == (group.rank, group.size)

    def missing_norm(self, size: int) -> tuple[float, float]:
        """Of R: the norm of what is in here, and about that of what is not, from what this rank held.

        That of the others: (size - 1) server errors, and as many worker errors divided by size.
        """
        held, missing = 0.0, 0.0
        for one in self.errors.values():
            held += float(torch.linalg.vector_norm(one.part(size))) ** 2
            worker, server = (float(torch.linalg.vector_norm(x)) for x in (one.worker_M, one.server_c))
            missing += (size - 1) * (server**2 + worker**2 / (one.workers or size) ** 2)
        return sqrt(held), sqrt(missing)


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a rank has loaded and not yet compared with the others. share: None for a state of all ranks.

    as_it_was: its own share, or all of R. is_in_round: between syncs of 0/1 Adam. is_apart: errors that other ranks own
    now are held here, until the ranks come together.
    """

    share: Share | None = None
    as_it_was: bool = True
    is_in_round: bool = False
    is_apart: bool = False


def is_share(state_dict: object) -> bool:
    """Is it of one rank, whole or not?"""
    return isinstance(state_dict, Mapping) and KEY in state_dict


def read(state_dict: Mapping[str, Any]) -> Share:
    """The share in a dict that is_share(). Raises: ValueError for what is damaged."""
    of_ranks = state_dict[KEY]
    names, fits = (list(of_ranks), len(of_ranks) == 1) if isinstance(of_ranks, dict) else (of_ranks, False)
    refuse([("share", names, fits, "must be a dict of one rank; it is damaged")])
    name, of_rank = next(iter(of_ranks.items()))
    refuse_missing("state_dict['share']", of_rank if isinstance(of_rank, dict) else {}, KEYS)
    rank, size, errors, own = (of_rank[key] for key in KEYS)
    fits = is_count(rank) and is_count(size) and rank < size and name == f"{rank} of {size}"
    damaged = "must be a dict; it is damaged"
    refuse(
        [
            (f"share with rank = {rank!r}, size = {size!r} under {name!r}", ABSENT, fits, "it is damaged"),
            ("share with errors", errors, isinstance(errors, dict), damaged),
            ("share with own", own, isinstance(own, dict), damaged),
        ]
    )
    held = {name: Held.of_plain(f"state_dict['share'] errors[{name!r}]", errors[name]) for name in errors}
    return Share(rank, size, held, own, of_rank.get(REST))
