"""A codec of one's own: of each chunk the largest values, with their places. What they leave waits in error memory.

Nothing of Thinwire is edited: an optimizer is given its codec, and the exchange does the rest.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.comm.layout import VectorLayout
from thinwire.optim import OneBitAdam


@dataclass(frozen=True)
class TopK:
    """One value of `one_in` crosses."""

    one_in: int = 16
    name: ClassVar[str] = "top_k"

    def row(self, layout: VectorLayout, start: int, stop: int, like: Tensor) -> TopKRow:
        """The codec of one chunk."""
        return TopKRow(-(-(stop - start) // self.one_in), like)

    def fingerprint(self) -> int:
        """32 bits of name and setting: two ranks that differ are refused before the first step."""
        return zlib.crc32(f"{self.name}:{self.one_in}".encode())


class TopKRow:
    """k places, int64, and then k values."""

    def __init__(self, k: int, like: Tensor) -> None:
        self._k, self._dtype = k, like.dtype
        self.wire_bytes = k * (8 + like.element_size())

    def encode(self, x_c: Tensor, row_B: Tensor) -> Tensor:
        """Write the largest. Returns whether all values are finite."""
        places_k, values_k = self._parts(row_B)
        places_k.copy_(x_c.abs().topk(self._k).indices)
        values_k.copy_(x_c[places_k])
        return torch.isfinite(x_c).all()

    def decode(self, row_B: Tensor, out_c: Tensor) -> None:
        """out <- those, 0 elsewhere."""
        places_k, values_k = self._parts(row_B)
        out_c.zero_()
        out_c[places_k] = values_k

    def _parts(self, row_B: Tensor) -> tuple[Tensor, Tensor]:
        end = 8 * self._k
        return row_B[:end].view(torch.int64), row_B[end : self.wire_bytes].view(self._dtype)


class TopKAdam(OneBitAdam):
    """1-bit Adam, but that the momentum crosses so."""

    codec = TopK()


if __name__ == "__main__":
    from thinwire.comm import run_threads

    def train(group):  # type: ignore[no-untyped-def]
        """Two ranks, as threads."""
        weight = torch.nn.Parameter(torch.full((4096,), 1.0))
        optimizer = TopKAdam([weight], lr=0.1, warmup=5, group=group)
        for _ in range(60):
            (weight - group.rank).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return weight.detach().mean().item(), optimizer.stats()["sent_bytes"]

    print(run_threads(2, train))
