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

    def encode_left(self, x_c: Tensor, error_c: Tensor, left_c: Tensor, row_B: Tensor) -> Tensor:
        """As encode of x + error; left <- what the row leaves out of it."""
        torch.add(x_c, error_c, out=left_c)
        finite = self.encode(left_c, row_B)
        left_c.sub_(self._values(row_B))
        return finite

    def mean_left(self, rows_nB: Tensor, error_c: Tensor | None, left_c: Tensor, row_B: Tensor) -> Tensor:
        """As encode of the mean of rows + error; left <- what the row leaves out of it."""
        left_c.zero_()
        for one_B in rows_nB:
            left_c.add_(self._values(one_B))
        left_c.div_(left_c.new_full((), len(rows_nB)))
        if error_c is not None:
            left_c.add_(error_c)
        finite = self.encode(left_c, row_B)
        if error_c is not None:
            left_c.sub_(self._values(row_B))
        return finite

    def _values(self, row_B: Tensor) -> Tensor:
        return row_B[: self.wire_bytes].view(torch.bfloat16)
