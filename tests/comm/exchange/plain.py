"""Signs by the rows of any codec, a bucket for all: what the fused exchange is held against."""

import zlib
from dataclasses import dataclass

import torch

from thinwire.comm.codecs import SignCodec
from thinwire.comm.exchange.reducer import flat_reducer


@dataclass(frozen=True)
class Unfused:
    """A codec whose rows are those of another one, and that no coder knows."""

    codec: SignCodec
    name = "unfused"

    def row(self, layout, start, stop, like):
        """The other one's."""
        return self.codec.row(layout, start, stop, like)

    def fingerprint(self):
        """32 bits."""
        return zlib.crc32(f"unfused {self.codec.fingerprint()}".encode())


@dataclass(frozen=True)
class Dense:
    """The values themselves: nothing is left out."""

    wire_bytes: int = 0
    name = "dense"

    def row(self, layout, start, stop, like):
        """The codec of one chunk."""
        return Dense((stop - start) * like.element_size())

    def fingerprint(self):
        """32 bits."""
        return zlib.crc32(b"dense")

    def encode(self, x_c, row_B):
        """The values' bytes. Are all finite?"""
        row_B[: self.wire_bytes].view(x_c.dtype).copy_(x_c)
        return torch.isfinite(x_c).all()

    def decode(self, row_B, out_c):
        """out <- what was written."""
        out_c.copy_(row_B[: self.wire_bytes].view(out_c.dtype))


def plain(group, layout, codec, like, **how):
    """A reducer of one bucket, without fused kernels."""
    chosen = Unfused(codec) if isinstance(codec, SignCodec) else codec
    return flat_reducer(group, layout, chosen, like, **{"bucket_elements": layout.numel, **how})
