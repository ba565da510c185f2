"""The compressed all-reduce on a list of n tensors in one thread, as the papers write it: the oracle of the tests.

No rows, no bits, no transport: signs are +1 and -1, ranks are list entries, the loop over blocks is in the open.
The real collective must give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.comm.kernels.reference import BLOCK_SCALES, Scale
from thinwire.comm.layout import BYTE, DEFAULT_BLOCK, Partition, VectorLayout


@dataclass(slots=True)
class SimulatedErrors:
    """Worker errors, one vector a rank, and the server error E in one piece."""

    workers: list[Tensor]
    server_N: Tensor

    @classmethod
    def zeros(cls, like: list[Tensor]) -> SimulatedErrors:
        """Empty error memory for inputs shaped like these."""
        return cls([torch.zeros_like(x) for x in like], torch.zeros_like(like[0]))

    def residual(self) -> Tensor:
        """R = mean_i worker_i + E."""
        mean = self.workers[0].clone()
        for worker in self.workers[1:]:
            mean += worker
        return mean / len(self.workers) + self.server_N


def compressed_mean(
    xs: list[Tensor], errors: SimulatedErrors, layout: VectorLayout, block: int = DEFAULT_BLOCK, scale: Scale = "l2"
) -> Tensor:
    """out with out + R' = mean_i x_i + R. xs are not modified; errors are."""
    partition = Partition(layout.numel, len(xs))
    spans = [span for rank in range(len(xs)) for span in layout.blocks(block, *partition.bounds(rank))]
    total = torch.zeros_like(xs[0])
    for x, worker in zip(xs, errors.workers, strict=True):
        a = x + worker
        q = _compress(a, layout, spans, scale)
        worker.copy_(a - q)
        total += q
    b = total / len(xs) + errors.server_N
    out = _compress(b, layout, spans, scale)
    errors.server_N.copy_(b - out)
    return out


def _compress(a: Tensor, layout: VectorLayout, spans: list[tuple[int, int]], kept: Scale) -> Tensor:
    """C(a), block by block: scale x sign, 0 where dead."""
    dead = layout.dead(0, layout.numel)
    live = torch.ones_like(a)
    live[dead] = 0
    out = torch.empty_like(a)
    for start, stop in spans:
        num_bytes = torch.tensor([(stop - start) // BYTE], dtype=torch.int64, device="cpu")
        scale = BLOCK_SCALES[kept](a[start:stop], num_bytes, live[start:stop].sum().view(1))
        out[start:stop] = torch.where(a[start:stop] >= 0, scale, -scale)
    out[dead] = 0
    return out
