"""Process groups with ranks of other worlds: each process has a default group of its own, and they meet beside it.

So the ranks that hold one shard in several boxes exchange, where the default group of each is its box, which has come
and will go alone (workers/forming/box.py). torch.distributed numbers the ranks of a group by those of the default
one. Of such a group only this rank is there: the others get numbers below 0, that no rank of the world has.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _new_process_group_helper, _world


@dataclass(slots=True)
class _Made:
    """How one was made. num_more: process groups of some of its ranks that were made since."""

    store: Store
    rank: int
    name: str
    backend: str
    num_more: int = 0


_made: weakref.WeakKeyDictionary[dist.ProcessGroup, _Made] = weakref.WeakKeyDictionary()


def new_outside(store: Store, rank: int, size: int, name: str, backend: str, timeout: timedelta) -> dist.ProcessGroup:
    """The process group of all that call it with this store and name, beside their default ones. Collective.

    Raises: what the backend raises where it does not come together; then nothing of it is noted.
    """
    known_as: Any = name
    found = _new_process_group_helper(
        size, rank, [], dist.Backend(backend), PrefixStore(name, store), group_name=known_as, timeout=timeout
    )
    group: dist.ProcessGroup = found[0] if isinstance(found, tuple) else found
    own = dist.get_rank()
    _world.pg_group_ranks[group] = {own if other == rank else -1 - other: other for other in range(size)}
    _made[group] = _Made(store, rank, name, backend)
    return group


def is_outside(group: dist.ProcessGroup) -> bool:
    """Was it made here?"""
    return group in _made


def more_of(first: dist.ProcessGroup, ranks: Sequence[int], timeout: timedelta) -> dist.ProcessGroup:
    """Another process group, of these ranks of one that was made here, by their numbers in its world. Collective."""
    known = _made[first]
    known.num_more += 1
    members = [_world.pg_group_ranks[first][rank] for rank in ranks]
    name = f"{known.name}/{'-'.join(map(str, members))}/{known.num_more}"
    return new_outside(known.store, members.index(known.rank), len(members), name, known.backend, timeout)


def close_outside(group: dist.ProcessGroup) -> list[dist.ProcessGroup]:
    """Have torch.distributed forget it and all that was made of its ranks. Returns them: who drops them ends them."""
    name = _made[group].name
    theirs = [one for one, known in list(_made.items()) if known.name == name or known.name.startswith(f"{name}/")]
    for one in theirs:
        del _made[one]
        dist.destroy_process_group(one)
    return theirs
