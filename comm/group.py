"""Groups of processes: TorchGroup over torch.distributed (NCCL, gloo), and SoloGroup, a group of one.

Bytes are counted here, where they leave: what this rank sends to others, as the standard algorithm of each
collective does it (ring for mean and gather, pairwise for all-to-all). Transport headers are not payload.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

# torch.optim imports it when the first optimizer is made. If a default group exists by then, default arguments of its
# functions hold that group for good: destroy_process_group does not end gloo's threads, and the process may abort at
# its end.
import torch.distributed.nn.functional
from torch import Tensor

from thinwire.comm.errors import PeerLost
from thinwire.comm.protocol import Stats

# torch 2.13 renames it and warns at the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class TorchGroup:
    """A torch.distributed process group (None: the default one) as a Group."""

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        if not dist.is_initialized():
            raise ValueError("torch.distributed is not initialised: call init_process_group first, or use SoloGroup()")
        self._pg = process_group
        self.rank = dist.get_rank(process_group)
        self.size = dist.get_world_size(process_group)
        self.stats = Stats()

    def all_to_all(self, out_nB: Tensor, in_nB: Tensor) -> None:
        """out[i] on rank j <- in[j] of rank i. Raises: PeerLost."""
        _check_rows(out_nB, in_nB, self.size)
        with self._peers("all_to_all"):
            dist.all_to_all_single(out_nB, in_nB, group=self._pg)
        self.stats.count("all_to_all", all_to_all_bytes(in_nB, self.size))

    def all_gather(self, out_nB: Tensor, in_B: Tensor) -> None:
        """out[i] <- in of rank i. Raises: PeerLost."""
        _check_rows(out_nB, in_B.view(1, -1).expand(self.size, -1), self.size)
        with self._peers("all_gather"):
            _all_gather(out_nB.view(-1), in_B.view(-1), group=self._pg)
        self.stats.count("all_gather", all_gather_bytes(in_B, self.size))

    def mean_(self, x: Tensor) -> None:
        """X <- mean over ranks of x. Raises: PeerLost."""
        with self._peers("mean"):
            dist.all_reduce(x, dist.ReduceOp.SUM, group=self._pg)
        x.div_(self.size)
        self.stats.count("mean", all_reduce_bytes(x, self.size))

    def broadcast_(self, x: Tensor, src: int = 0) -> None:
        """X <- x of rank `src` of this group. Raises: PeerLost."""
        with self._peers("broadcast"):
            dist.broadcast(x, group=self._pg, group_src=src)
        self.stats.count("broadcast", broadcast_bytes(x, self.size, self.rank, src))

    @contextmanager
    def _peers(self, collective: str) -> Iterator[None]:
        # Shapes are checked before, so what torch raises here is the transport's: a peer is gone or silent.
        try:
            yield
        except RuntimeError as error:
            raise PeerLost(
                f"rank {self.rank} of {self.size} lost a peer in {collective}: {error}. Restart the group from its "
                "checkpoint; the logs of the rank that stopped first say why"
            ) from error


class SoloGroup:
    """One rank without a process group: every collective is the identity and sends nothing."""

    rank = 0
    size = 1

    def __init__(self) -> None:
        self.stats = Stats()

    def all_to_all(self, out_nB: Tensor, in_nB: Tensor) -> None:
        """Out <- in."""
        out_nB.copy_(in_nB)

    def all_gather(self, out_nB: Tensor, in_B: Tensor) -> None:
        """out[0] <- in."""
        out_nB.view(-1).copy_(in_B.view(-1))

    def mean_(self, x: Tensor) -> None:
        """X is its own mean."""

    def broadcast_(self, x: Tensor, src: int = 0) -> None:
        """X is already everywhere."""


def all_to_all_bytes(rows: Tensor, size: int) -> int:
    """Bytes a rank sends: every row but its own."""
    return rows.nbytes // size * (size - 1)


def all_gather_bytes(row: Tensor, size: int) -> int:
    """Bytes a rank sends in a ring: one row at each of n-1 steps."""
    return row.nbytes * (size - 1)


def all_reduce_bytes(x: Tensor, size: int) -> int:
    """Bytes a rank sends in a ring: 2 (n-1)/n of the vector."""
    return 2 * (size - 1) * x.nbytes // size


def broadcast_bytes(x: Tensor, size: int, rank: int, src: int) -> int:
    """Bytes a rank sends, booked on the source: n-1 copies leave it, by itself or relayed."""
    return x.nbytes * (size - 1) if rank == src else 0


def _check_rows(out_nB: Tensor, in_nB: Tensor, size: int) -> None:
    for name, rows in (("out", out_nB), ("in", in_nB)):
        if rows.dtype != torch.uint8 or rows.shape[0] != size:
            raise ValueError(f"{name}: expected uint8[{size}, B], got {rows.dtype}{list(rows.shape)}")
    if out_nB.shape != in_nB.shape:
        raise ValueError(f"rows of {list(in_nB.shape)} bytes do not fit into {list(out_nB.shape)}")
