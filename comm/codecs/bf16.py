"""bfloat16: half of fp32's bytes, rounded to nearest. Every value keeps 8 of its bits, so nothing need be kept of it.

torch converts a vector as fast as memory is read, on every device, so there is no kernel of ours.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.comm.kernels.peak import peak
from thinwire.comm.layout import VectorLayout


@dataclass(frozen=True, slots=True)
class Bf16Codec:
    """Makes row codecs that round."""

    name: ClassVar[str] = "bf16"

    def row(self, layout: VectorLayout, start: int, stop: int, like: Tensor) -> Bf16Row:
        """The codec of one chunk."""
        return Bf16Row(2 * (stop - start))

    def fingerprint(self) -> int:
        """32 bits of the name."""
        return zlib.crc32(b"bf16")


@dataclass(frozen=True, slots=True)
class Bf16Row:
    """Codec of one chunk."""

    wire_bytes: int

    def encode(self, x_c: Tensor, row_B: Tensor) -> Tensor:
        """Write x, rounded. Returns whether all that was written is finite."""
        largest = peak(x_c) if x_c.numel() else x_c.new_zeros(())
        self._values(row_B).copy_(x_c)
        return torch.isfinite(largest.bfloat16())

    def decode(self, row_B: Tensor, out_c: Tensor) -> None:
        """out <- what was written."""
        out_c.copy_(self._values(row_B))

    def add(self, row_B: Tensor, out_c: Tensor) -> None:
        """out <- out + what was written."""
        out_c.add_(self._values(row_B))

    def left_out(self, row_B: Tensor, x_c: Tensor, out_c: Tensor) -> None:
        """out <- x - what was written. out may be x."""
        torch.sub(x_c, self._values(row_B), out=out_c)

    def _values(self, row_B: Tensor) -> Tensor:
        return row_B[: self.wire_bytes].view(torch.bfloat16)
