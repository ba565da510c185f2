"""Where the blocks of one chunk lie, and which of its elements are dead: what every fused kernel is told."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from thinwire.comm.layout import BYTE, VectorLayout


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class BlockTable:
    """The blocks of one chunk of a vector; made once, on the device of the vector. Positions count from the chunk.

    starts: int64[b+1], multiples of 8, from 0 to the chunk's length; block i is [starts[i], starts[i+1]).
    live: float[b], live elements of a block, at least 1: a block without any then has scale 0, not 0 / 0.
    dead: int64[d], positions of dead elements, ascending.  dead_starts: int64[b+1], where each block's begin in dead.
    largest: elements of the largest block.  numel: elements of the chunk.
    """

    starts: Tensor
    live: Tensor
    dead: Tensor
    dead_starts: Tensor
    largest: int
    numel: int

    @classmethod
    def of(cls, layout: VectorLayout, start: int, stop: int, block: int, like: Tensor) -> BlockTable:
        """Blocks of at most `block` values of the elements [start, stop). like: the vector's dtype and device."""
        spans = layout.blocks(block, start, stop)
        return cls.from_spans(
            [(a - start, b - start) for a, b in spans], [i - start for i in layout.dead(start, stop)], like
        )

    @classmethod
    def from_spans(cls, spans: list[tuple[int, int]], dead: list[int], like: Tensor) -> BlockTable:
        """From adjoining spans that begin at 0 and the ascending positions of dead elements.

        Raises: ValueError where spans leave a gap, overlap, are empty or are not whole bytes of signs.
        """
        bounds = [0, *(stop for _, stop in spans)]
        if any(span != (low, high) or high <= low for span, (low, high) in zip(spans, pairwise(bounds), strict=True)):
            raise ValueError(f"spans {spans} must adjoin, begin at 0 and hold something")
        if any(bound % BYTE for bound in bounds):
            raise ValueError(f"spans {spans} must begin and end at multiples of {BYTE}")
        starts = torch.tensor(bounds, dtype=torch.int64)
        at = torch.tensor(dead, dtype=torch.int64)
        dead_starts = torch.searchsorted(at, starts)
        live = (starts.diff() - dead_starts.diff()).clamp_(min=1)
        return cls(
            starts.to(like.device),
            live.to(like.dtype).to(like.device),
            at.to(like.device),
            dead_starts.to(like.device),
            max((high - low for low, high in spans), default=0),
            bounds[-1],
        )

    @property
    def num_blocks(self) -> int:
        """Blocks, and scales in a row."""
        return self.live.numel()
