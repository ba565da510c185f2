"""Which samples a step uses: a pure function of (seed, step), and of nothing else.

Epoch e visits the samples in an order drawn from (seed, e); sample number k = (step - 1) * global_batch + i of the run
is number k mod num_samples of epoch k // num_samples. So every sample is used exactly once an epoch, a batch may span
epochs, and a resumed or resized run sees what it would have seen. What is drawn for a sample, such as a mask or a
shift, is drawn from (seed, k): it does not matter which rank draws it, nor together with which others.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def share(global_batch: int, rank: int, world_size: int) -> range:
    """The positions in the global batch that `rank` computes: contiguous, sizes differ by at most one.

    Shares need not be equal: weigh each rank's mean loss by its size. Raises ValueError for no such rank.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not one of world_size = {world_size}; ranks count from 0")
    size, larger = divmod(global_batch, world_size)
    start = rank * size + min(rank, larger)
    return range(start, start + size + (rank < larger))


class Order:
    """In which order a run visits `num_samples` samples."""

    def __init__(self, num_samples: int, seed: int) -> None:
        self.num_samples = num_samples
        self.seed = seed
        self._epochs: dict[int, Tensor] = {}

    def samples(self, numbers: range) -> Tensor:
        """Which samples those numbers are, int64[len(numbers)], each in [0, num_samples)."""
        first, last = numbers.start, numbers.stop
        parts: list[Tensor] = [torch.empty(0, dtype=torch.int64, device="cpu")]
        while first < last:
            epoch, offset = divmod(first, self.num_samples)
            taken = min(last - first, self.num_samples - offset)
            parts.append(self._epoch(epoch)[offset : offset + taken])
            first += taken
        return torch.cat(parts)

    def _epoch(self, epoch: int) -> Tensor:
        """The order of an epoch. The newest two are kept: a batch may span them."""
        if epoch not in self._epochs:
            while len(self._epochs) > 1:
                del self._epochs[next(iter(self._epochs))]
            self._epochs[epoch] = torch.randperm(self.num_samples, generator=generator(self.seed, epoch), device="cpu")
        return self._epochs[epoch]


def generator(*words: int | str) -> torch.Generator:
    """A generator of its own for what `words` name, such as (seed, "mask", k); sums of seeds would collide."""
    digest = hashlib.sha256("/".join(map(str, words)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
