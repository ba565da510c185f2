"""Groups of processes: TorchGroup over torch.distributed (NCCL, gloo), and SoloGroup, a group of one.

Bytes are counted here, where a collective is started.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# torch.optim imports it when the first optimizer is made. If a default group exists by then, default arguments of its
# functions hold that group for good: destroy_process_group does not end gloo's threads, and the process may abort at
# its end.
import torch.distributed.nn.functional
from torch import Tensor

from thinwire.comm.errors import PeerLost
from thinwire.comm.pending import Blocking
from thinwire.comm.protocol import Stats
from thinwire.comm.sent_bytes import all_gather_bytes, all_reduce_bytes, all_to_all_bytes, broadcast_bytes

# torch 2.13 renames it and warns at the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_second_lanes: weakref.WeakKeyDictionary[dist.ProcessGroup, weakref.ref[dist.ProcessGroup]] = (
    weakref.WeakKeyDictionary()
)
"""One a process group, however many TorchGroups it has. Weak: torch's own table keeps them until they are destroyed."""


class TorchGroup:
    """A torch.distributed process group (None: the default one) as a Group."""

    def __init__(self, process_group: dist.ProcessGroup | None = None, stats: Stats | None = None) -> None:
        """stats: where to count; None is a count of its own."""
        if not dist.is_initialized():
            raise ValueError("torch.distributed is not initialised: call init_process_group first, or use SoloGroup()")
        # Weak: a group that outlives its destruction keeps gloo's threads, and the process may abort at its end.
        self._given = None if process_group is None else weakref.ref(process_group)
        self.rank = dist.get_rank(process_group)
        self.size = dist.get_world_size(process_group)
        self.stats = Stats() if stats is None else stats
        self._second: TorchGroup | None = None

    def all_to_all(self, out_nB: Tensor, in_nB: Tensor) -> None:
        """out[i] on rank j <- in[j] of rank i. Raises: PeerLost."""
        self.start_all_to_all(out_nB, in_nB).wait()

    def all_gather(self, out_nB: Tensor, in_B: Tensor) -> None:
        """out[i] <- in of rank i. Raises: PeerLost."""
        self.start_all_gather(out_nB, in_B).wait()

    def mean_(self, x: Tensor) -> None:
        """X <- mean over ranks of x. Raises: PeerLost."""
        with self._peers("mean"):
            dist.all_reduce(x, dist.ReduceOp.SUM, group=self._process_group())
        x.div_(self.size)
        self.stats.count("mean", all_reduce_bytes(x, self.size))

    def broadcast_(self, x: Tensor, src: int = 0) -> None:
        """X <- x of rank `src` of this group. Raises: PeerLost."""
        with self._peers("broadcast"):
            dist.broadcast(x, group=self._process_group(), group_src=src)
        self.stats.count("broadcast", broadcast_bytes(x, self.size, self.rank, src))

    def start_all_to_all(self, out_nB: Tensor, in_nB: Tensor) -> TorchPending:
        """all_to_all in the background. Raises: PeerLost."""
        _check_rows(out_nB, in_nB, self.size)
        self.stats.count("all_to_all", all_to_all_bytes(in_nB, self.size))
        with self._peers("all_to_all"):
            return TorchPending(
                self, "all_to_all", dist.all_to_all_single(out_nB, in_nB, group=self._process_group(), async_op=True)
            )

    def start_all_gather(self, out_nB: Tensor, in_B: Tensor) -> TorchPending:
        """all_gather in the background. Raises: PeerLost."""
        _check_rows(out_nB, in_B.view(1, -1).expand(self.size, -1), self.size)
        self.stats.count("all_gather", all_gather_bytes(in_B, self.size))
        with self._peers("all_gather"):
            work = _all_gather(out_nB.view(-1), in_B.view(-1), group=self._process_group(), async_op=True)
            return TorchPending(self, "all_gather", work)

    def start_sum_(self, x: Tensor) -> TorchPending:
        """X <- sum over ranks of x, not divided, in the background. Raises: PeerLost."""
        self.stats.count("sum", all_reduce_bytes(x, self.size))
        with self._peers("sum"):
            return TorchPending(
                self, "sum", dist.all_reduce(x, dist.ReduceOp.SUM, group=self._process_group(), async_op=True)
            )

    def second_lane(self) -> TorchGroup:
        """Another process group of the same ranks, with the same backend, time-out and `stats`.

        Collective at its first call for a process group: all its ranks connect once more. Two lanes over gloo also
        have threads of their own. Raises: PeerLost.
        """
        if self._second is None:
            with self._peers("second_lane"):
                lane = _second_process_group(self._process_group())
            self._second = TorchGroup(lane, self.stats)
        return self._second

    def _process_group(self) -> dist.ProcessGroup:
        process_group = dist.group.WORLD if self._given is None else self._given()
        if process_group is None:
            raise ValueError("the process group of this TorchGroup was destroyed: make both again")
        return process_group

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


class TorchPending:
    """A collective of torch.distributed that was started. On a GPU `wait` holds up the current stream, not the host."""

    __slots__ = ("_collective", "_group", "_work")

    def __init__(self, group: TorchGroup, collective: str, work: dist.Work) -> None:
        self._group, self._collective = group, collective
        self._work: dist.Work | None = work

    def wait(self) -> None:
        """Block until the result is there; at once where it was waited for before. Raises: PeerLost."""
        if self._work is None:
            return
        with self._group._peers(self._collective):
            self._work.wait()
        self._work = None  # it holds connections, which would outlive the process group


class SoloGroup(Blocking):
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

    def sum_(self, x: Tensor) -> None:
        """X is its own sum."""

    def broadcast_(self, x: Tensor, src: int = 0) -> None:
        """X is already everywhere."""


def _check_rows(out_nB: Tensor, in_nB: Tensor, size: int) -> None:
    for name, rows in (("out", out_nB), ("in", in_nB)):
        if rows.dtype != torch.uint8 or rows.shape[0] != size:
            raise ValueError(f"{name}: expected uint8[{size}, B], got {rows.dtype}{list(rows.shape)}")
    if out_nB.shape != in_nB.shape:
        raise ValueError(f"rows of {list(in_nB.shape)} bytes do not fit into {list(out_nB.shape)}")


def _second_process_group(first: dist.ProcessGroup) -> dist.ProcessGroup:
    known = _second_lanes.get(first)
    lane = known() if known else None
    if lane is None:
        ranks = dist.get_process_group_ranks(first)
        device = first._device_types[0]
        timeout: timedelta = first._get_backend(device).options._timeout
        # In the order of `first`, which sorting, the default, would lose; torch 2.11 may not have the argument.
        order: dict[str, Any] = {} if ranks == sorted(ranks) else {"sort_ranks": False}
        # Local: ranks of the world outside of this group need not know of it.
        lane = dist.new_group(ranks, timeout, dist.get_backend(first), use_local_synchronization=True, **order)
        _second_lanes[first] = weakref.ref(lane)
    return lane
