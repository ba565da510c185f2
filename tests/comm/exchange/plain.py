"""Signs by the rows of any codec, a bucket for all: what the fused exchange is held against."""

import zlib
from dataclasses import dataclass

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


def plain(group, layout, codec, like, **how):
    """A reducer of one bucket, without fused kernels."""
    chosen = Unfused(codec) if isinstance(codec, SignCodec) else codec
    return flat_reducer(group, layout, chosen, like, **{"bucket_elements": layout.numel, **how})
