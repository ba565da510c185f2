"""4 bits a value and a float32 scale for each run of `block` values: 4.25 bits a value with runs of 128.

A row is [scales of the chunk's runs | whole numbers, two a byte]. As in 8 bits (kernels/int8_reference.py), with 7 for
127. In plain torch: for what crosses once in many steps.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.comm.kernels import int8_reference
from thinwire.comm.layout import VectorLayout, refuse_block

LEVELS = 7
"""The largest whole number that is sent."""
_SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class Int4Codec:
    """Makes row codecs of whole numbers from -7 to 7, rounded to nearest. Raises: ValueError for an unfit block."""

    block: int = 128
    name: ClassVar[str] = "int4"

    def __post_init__(self) -> None:
        refuse_block(self.block)

    def row(self, layout: VectorLayout, start: int, stop: int, like: Tensor) -> Int4Row:
        """The codec of one chunk."""
        return Int4Row(stop - start, self.block)

    def fingerprint(self) -> int:
        """32 bits of name and length of runs."""
        return zlib.crc32(f"int4:{self.block}".encode())


class Int4Row:
    """Codec of one chunk of `numel` elements, an even number. Dead elements are zero, and stay so."""

    def __init__(self, numel: int, block: int) -> None:
        self._numel, self._block = numel, block
        self._scale_bytes = _SCALE_BYTES * -(-numel // block)
        self.wire_bytes = self._scale_bytes + numel // 2

    def encode(self, x_c: Tensor, row_B: Tensor) -> Tensor:
        """Write scales and numbers of x. Returns whether all values are finite."""
        scale_b, pairs_B = self._parts(row_B)
        q_c = torch.empty(self._numel, dtype=torch.int8, device=x_c.device)
        finite = int8_reference.encode(x_c, scale_b, q_c, self._block, LEVELS)
        low, high = (q_c + (LEVELS + 1)).view(torch.uint8).view(-1, 2).unbind(1)
        torch.bitwise_or(low, high << 4, out=pairs_B)
        return finite

    def decode(self, row_B: Tensor, out_c: Tensor) -> None:
        """out <- scale x number."""
        scale_b, pairs_B = self._parts(row_B)
        q_c = torch.stack([pairs_B & 15, pairs_B >> 4], 1).view(-1).view(torch.int8) - (LEVELS + 1)
        int8_reference.decode(scale_b, q_c, out_c, self._block)

    def _parts(self, row_B: Tensor) -> tuple[Tensor, Tensor]:
        return row_B[: self._scale_bytes].view(torch.float32), row_B[self._scale_bytes : self.wire_bytes]
