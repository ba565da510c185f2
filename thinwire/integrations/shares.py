"""Where the shares of the ranks lie in a checkpoint whose optimizer file rank 0 writes alone.

    optimizer.pt                  the library's file: the share of rank 0
    optimizer-rank-1-of-2.pt      beside it, each written by its rank

With `saves="rank"` a checkpoint sends nothing. On as many ranks each loads its own share, and goes on bit for bit. On
another number of ranks each brings all shares together (thinwire.optim.saves). Where files are missing rank 0's share
is loaded, and the log says what is lost.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from thinwire.optim.engine.optimizer import FlatOptimizer
from thinwire.optim.engine.share import is_share, read
from thinwire.optim.saves import together


def write_share(file: Path, optimizer: FlatOptimizer[Any]) -> None:
    """Write this rank's share beside `file`, whole or not at all; nothing on rank 0, or where saves is "together"."""
    rank, size = optimizer.group.rank, optimizer.group.size
    if optimizer.saves != "rank" or rank == 0:
        return
    file.parent.mkdir(parents=True, exist_ok=True)  # rank 0 may not have made it yet
    new = share_file(file, rank, size).with_suffix(".new")
    torch.save(optimizer.rank_state_dict(), new)
    new.replace(share_file(file, rank, size))


def own_state(file: Path, loaded: dict[str, Any], optimizer: FlatOptimizer[Any]) -> dict[str, Any]:
    """What this rank loads where `file`, rank 0's, had `loaded`. Local.

    Raises: ValueError for shares that are not of one save.
    """
    if not is_share(loaded):
        return loaded
    size, rank = read(loaded).size, optimizer.group.rank
    others = [share_file(file, other, size) for other in range(1, size)]
    if size == optimizer.group.size:
        return _read(others[rank - 1]) if rank and others[rank - 1].exists() else loaded
    if all(other.exists() for other in others):
        return together([loaded, *(_read(other) for other in others)])
    return loaded


def share_file(file: Path, rank: int, size: int) -> Path:
    """The file of a rank's share beside that of rank 0."""
    return file.with_name(f"{file.stem}-rank-{rank}-of-{size}{file.suffix}")


def _read(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    return found
