"""8 bits a value and a float32 scale for each run of `block` values: a gradient in a quarter of fp32's bytes.

A row is [scales of the chunk's runs | whole numbers]. Runs do not end where tensors do: then no table is needed, and a
run that mixes two tensors is one in hundreds. kernels/int8_reference.py says what is computed.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from types import ModuleType
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.comm.kernels import int8_reference
from thinwire.comm.kernels.choose import CPU_DTYPES
from thinwire.comm.layout import VectorLayout, refuse_block

DEFAULT_RUN = 256
"""Values that share a scale: an eighth of a bit each. Longer runs leave out more of small values beside large ones."""
_SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class Int8Codec:
    """Makes row codecs of whole numbers from -127 to 127, rounded to nearest."""

    block: int = DEFAULT_RUN
    name: ClassVar[str] = "int8"

    def __post_init__(self) -> None:
        refuse_block(self.block)

    def row(self, layout: VectorLayout, start: int, stop: int, like: Tensor) -> Int8Row:
        """The codec of one chunk."""
        return Int8Row(stop - start, self.block, like)

    def fingerprint(self) -> int:
        """32 bits of name and length of runs."""
        return zlib.crc32(f"int8:{self.block}".encode())


class Int8Row:
    """Codec of one chunk of `numel` elements. Dead elements are zero, and stay so: zero times any scale."""

    def __init__(self, numel: int, block: int, like: Tensor) -> None:
        self._numel, self._block = numel, block
        self._scale_bytes = _SCALE_BYTES * -(-numel // block)
        self.wire_bytes = self._scale_bytes + numel
        self._kernels = _kernels_for(like)

    def encode(self, x_c: Tensor, row_B: Tensor) -> Tensor:
        """Write scales and numbers of x. Returns whether all values are finite."""
        return self._kernels.encode(x_c, *self._parts(row_B), self._block)  # type: ignore[no-any-return]

    def decode(self, row_B: Tensor, out_c: Tensor) -> None:
        """out <- scale x number."""
        self._kernels.decode(*self._parts(row_B), out_c, self._block)

    def encode_left(self, x_c: Tensor, error_c: Tensor, left_c: Tensor, row_B: Tensor) -> Tensor:
        """As encode of x + error; left <- what the row leaves out of it."""
        return self._kernels.encode_left(x_c, error_c, left_c, *self._parts(row_B), self._block)  # type: ignore[no-any-return]

    def mean_left(self, rows_nB: Tensor, error_c: Tensor | None, left_c: Tensor, row_B: Tensor) -> Tensor:
        """As encode of the mean of rows + error; left <- what the row leaves out of it."""
        rows = [self._parts(one_B) for one_B in rows_nB]
        return self._kernels.mean_left(rows, error_c, left_c, *self._parts(row_B), self._block)  # type: ignore[no-any-return]

    def _parts(self, row_B: Tensor) -> tuple[Tensor, Tensor]:
        scales_B, numbers_B = row_B[: self._scale_bytes], row_B[self._scale_bytes : self.wire_bytes]
        return scales_B.view(torch.float32), numbers_B.view(torch.int8)


def _kernels_for(like: Tensor) -> ModuleType:
    """The loops on the CPU, plain torch elsewhere."""
    if like.device.type != "cpu" or like.dtype not in CPU_DTYPES:
        return int8_reference
    from thinwire.comm.kernels import int8_cpu  # not at the top: it brings numba, which only vectors on a CPU need

    return int8_cpu
