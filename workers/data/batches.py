"""Which windows of the text a step uses: a pure function of (seed, step), and of nothing else.

The text is cut into windows at a fixed stride. Epoch e visits them in an order drawn from (seed, e); sample
k = (step - 1) * global_batch + i of the run is number k mod num_windows of epoch k // num_windows. So every window
is used exactly once an epoch, a batch may span epochs, and a resumed or resized run sees what it would have seen.

Legend: W windows in a batch or share, T bytes of context.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from thinwire.workers.data.corpus import DataError


def share(global_batch: int, rank: int, world_size: int) -> range:
    """The positions in the global batch that `rank` computes: contiguous, sizes differ by at most one.

    Shares need not be equal: weigh each rank's mean loss by its size. Raises ValueError for no such rank.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not one of world_size = {world_size}; ranks count from 0")
    size, larger = divmod(global_batch, world_size)
    start = rank * size + min(rank, larger)
    return range(start, start + size + (rank < larger))


class Batches:
    """Training windows of one text. Steps count from 1."""

    def __init__(self, tokens: Tensor, context: int, global_batch: int, seed: int) -> None:
        """`tokens`: uint8[N], not modified. `context`: bytes a window predicts. Raises DataError if N <= context."""
        self.num_windows = _count_windows(tokens, context, "training")
        self.global_batch = global_batch
        self._tokens = tokens
        self._context = context
        self._seed = seed
        self._orders: dict[int, Tensor] = {}

    def window_ids(self, step: int) -> Tensor:
        """The windows of a step's global batch, int64[global_batch]. Raises ValueError if step < 1."""
        return self._windows(step, range(self.global_batch))

    def local(self, step: int, rank: int, world_size: int) -> tuple[Tensor, Tensor]:
        """A rank's share of a step as (inputs, targets), int64[W, T] each; targets are inputs one byte on."""
        windows_W = self._windows(step, share(self.global_batch, rank, world_size))
        return _cut(self._tokens, windows_W, self._context)

    def _windows(self, step: int, positions: range) -> Tensor:
        if step < 1:
            raise ValueError(f"step {step} has no batch; steps count from 1")
        first = (step - 1) * self.global_batch + positions.start
        last = first + len(positions)
        parts: list[Tensor] = [torch.empty(0, dtype=torch.int64)]
        while first < last:
            epoch, offset = divmod(first, self.num_windows)
            taken = min(last - first, self.num_windows - offset)
            parts.append(self._order(epoch)[offset : offset + taken])
            first += taken
        return torch.cat(parts)

    def _order(self, epoch: int) -> Tensor:
        """The order of an epoch. The newest two are kept: a batch may span them."""
        if epoch not in self._orders:
            while len(self._orders) > 1:
                del self._orders[next(iter(self._orders))]
            generator = torch.Generator().manual_seed(_mix(self._seed, epoch))
            self._orders[epoch] = torch.randperm(self.num_windows, generator=generator)
        return self._orders[epoch]


def validation_windows(tokens: Tensor, context: int, num: int) -> tuple[Tensor, Tensor]:
    """`num` windows spread evenly over the text, always the same, as (inputs, targets), int64[num, T] each.

    Fewer where the text has fewer windows. Raises DataError where it has none.
    """
    available = _count_windows(tokens, context, "validation")
    num = min(num, available)
    return _cut(tokens, torch.arange(num) * available // num, context)


def _count_windows(tokens: Tensor, context: int, part: str) -> int:
    num_windows = (tokens.numel() - 1) // context
    if num_windows < 1:
        raise DataError(
            f"the {part} text has {tokens.numel()} bytes; recipe.context = {context} needs at least {context + 1}; "
            "name a longer text, a shorter context or another data.validation_fraction"
        )
    return num_windows


def _cut(tokens: Tensor, windows_W: Tensor, context: int) -> tuple[Tensor, Tensor]:
    index = windows_W[:, None] * context + torch.arange(context + 1)
    bytes_W = tokens[index].long()
    return bytes_W[:, :-1].contiguous(), bytes_W[:, 1:].contiguous()


def _mix(seed: int, epoch: int) -> int:
    """One seed from two numbers; sums and products of them would collide."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{epoch}".encode()).digest()[:7], "big")
