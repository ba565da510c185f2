"""scale x sign: one bit a value and one scale a block.  C(a) = s(a) sgn(a).

    l2    s(a) = ||a||_2 / sqrt(live)    keeps the 2-norm: all three papers (Tang et al. 2021; Li et al. 2021; Lu et al.
                                         2022). May leave out more than it was given, up to 2 ||a||^2
    l1    s(a) = ||a||_1 / live          leaves out least, always less than it was given, and gives a shorter vector

A row is [scales of the chunk's blocks | signs], in the dtype of the computation.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.comm.kernels import reference
from thinwire.comm.kernels.reference import Scale
from thinwire.comm.layout import BYTE, DEFAULT_BLOCK, VectorLayout, refuse_block
from thinwire.comm.protocol import RowCodec


@dataclass(frozen=True, slots=True)
class SignCodec:
    """Makes sign row codecs whose scales are shared by `block` values and keep the norm that `scale` names."""

    block: int = DEFAULT_BLOCK
    scale: Scale = "l2"
    name: ClassVar[str] = "sign"

    def __post_init__(self) -> None:
        refuse_block(self.block)
        if self.scale not in reference.BLOCK_SCALES:
            raise ValueError(f"scale = {self.scale!r}: must be one of {', '.join(reference.BLOCK_SCALES)}")

    def row(self, layout: VectorLayout, start: int, stop: int, like: Tensor) -> RowCodec:
        """The codec of one chunk; see `SignRow`."""
        return SignRow(layout, start, stop, self.block, like, self.scale)

    def fingerprint(self) -> int:
        """32 bits of name, block size and scale."""
        return zlib.crc32(f"sign:{self.block}:{self.scale}".encode())


class SignRow:
    """Codec of the elements [start, stop) of vectors with one layout."""

    def __init__(
        self, layout: VectorLayout, start: int, stop: int, block: int, like: Tensor, scale: Scale = "l2"
    ) -> None:
        self._block_scales = reference.BLOCK_SCALES[scale]
        blocks = layout.blocks(block, start, stop)
        dead = layout.dead(start, stop)
        self.num_bytes = (stop - start) // BYTE
        self.scale_bytes = len(blocks) * like.element_size()
        self.wire_bytes = self.scale_bytes + self.num_bytes
        self.bytes_per_block = torch.tensor([(b - a) // BYTE for a, b in blocks], dtype=torch.int64, device=like.device)
        self.dead = torch.tensor([i - start for i in dead], dtype=torch.int64, device=like.device)
        live = torch.ones(stop - start, dtype=like.dtype, device=like.device)
        live[self.dead] = 0
        self.live_per_block = reference.block_sums(live, self.bytes_per_block)

    def encode(self, x_c: Tensor, row_B: Tensor) -> Tensor:
        """Write scales and signs of x. Returns whether all scales, and so all values, are finite."""
        if not self.num_bytes:
            return torch.ones((), dtype=torch.bool, device=x_c.device)
        scales = self._block_scales(x_c, self.bytes_per_block, self.live_per_block)
        row_B[: self.scale_bytes].view(x_c.dtype).copy_(scales)
        reference.pack_signs(x_c, row_B[self.scale_bytes : self.wire_bytes])
        return torch.isfinite(scales).all()

    def decode(self, row_B: Tensor, out_c: Tensor) -> None:
        """out <- scale x sign, 0 where dead."""
        if not self.num_bytes:
            return
        scales = row_B[: self.scale_bytes].view(out_c.dtype)
        reference.unpack_signs(row_B[self.scale_bytes : self.wire_bytes], out_c)
        out_c.view(-1, BYTE).mul_(reference.expand_scales(scales, self.bytes_per_block, self.num_bytes))
        out_c[self.dead] = 0
