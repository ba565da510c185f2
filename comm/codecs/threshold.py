"""What is above a threshold, as bfloat16 with its place: 4 bytes for a share of the values, 0.04 bytes a value for 1 %.

A row is [ends of runs, int32 | values, bfloat16 | places in their runs, 16 bits]. A run is 65,536 values long, its end
is how many of what is sent lie up to there, the last one's is known. The threshold of a chunk is its K-th largest |x|,
K = ceil(share x numel), found anew in every row, so that every row is full and none overflows.

Dynamic communication thresholding finds the threshold once in thousands of steps and keeps it, because sorting is slow.
Then a row of fixed length is too short in one step and half empty in the next, and the threshold is state of every
chunk, to be saved and to be found anew when the number of ranks changes. Here a sample proposes a threshold, and only
what is above that is sorted: of millions of values on a CPU that takes a tenth or less of sorting all.
[Gupta et al. 2020, arXiv 2010.08899 (DCT, data parallel), with L = 1]
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from math import ceil
from numbers import Real
from typing import Any, ClassVar

import torch
from torch import Tensor

from thinwire.comm.kernels.peak import peak
from thinwire.comm.layout import VectorLayout

RUN = 1 << 16
"""Values of a run: a place in it has 16 bits."""
MOST_SHARE = 0.5
"""With places and values of more than half, all values in bfloat16 take fewer bytes."""
_ENTRY_BYTES = 4
_END_BYTES = 4
_SAMPLE = 1 << 14
"""Values of a chunk that propose a threshold."""
_MORE = 1.25
"""How many times as many as are sent are to lie above it: of 164 in the sample it is 3 standard deviations off."""


@dataclass(frozen=True, slots=True)
class ThresholdCodec:
    """Makes row codecs of the largest share of a chunk's values, at least one. Raises: ValueError for another share."""

    share: float = 0.01
    name: ClassVar[str] = "threshold"

    def __post_init__(self) -> None:
        given: Any = self.share
        if not isinstance(given, Real) or not 0 < self.share <= MOST_SHARE:
            raise ValueError(
                f"share = {self.share!r}: must be above 0, which would send nothing, and at most {MOST_SHARE}, for "
                "more takes more bytes than all values as Bf16Codec writes them"
            )

    def row(self, layout: VectorLayout, start: int, stop: int, like: Tensor) -> ThresholdRow:
        """The codec of one chunk."""
        return ThresholdRow(stop - start, self.share)

    def fingerprint(self) -> int:
        """32 bits of name and share."""
        return zlib.crc32(f"threshold:{self.share!r}".encode())


class ThresholdRow:
    """Codec of one chunk of `numel` elements. Dead elements are zero, and stay so."""

    def __init__(self, numel: int, share: float) -> None:
        self._keep = ceil(share * numel)
        self._num_ends = max(-(-numel // RUN) - 1, 0)
        self.wire_bytes = _END_BYTES * self._num_ends + _ENTRY_BYTES * self._keep

    def encode(self, x_c: Tensor, row_B: Tensor) -> Tensor:
        """Write values and places. Returns whether all values are finite, and in bfloat16 too."""
        if not self._keep:
            return torch.ones((), dtype=torch.bool, device=x_c.device)
        ends_r, value_k, place_k = self._parts(row_B)
        at_k = largest(x_c.abs(), self._keep).sort().values
        value_k.copy_(x_c[at_k])
        place_k.copy_((at_k % RUN).to(torch.int32))  # modulo 65,536: the same 16 bits
        bounds_r = torch.arange(RUN, RUN * (self._num_ends + 1), RUN, dtype=torch.int64, device=x_c.device)
        ends_r.copy_(torch.searchsorted(at_k, bounds_r))
        return torch.isfinite(peak(x_c)) & torch.isfinite(value_k).all()

    def decode(self, row_B: Tensor, out_c: Tensor) -> None:
        """out <- the values at their places, 0 elsewhere."""
        out_c.zero_()
        if not self._keep:
            return
        ends_r, value_k, place_k = self._parts(row_B)
        run_k = torch.searchsorted(ends_r, torch.arange(self._keep, dtype=torch.int32, device=row_B.device), right=True)
        out_c.scatter_(0, run_k * RUN + (place_k.long() & RUN - 1), value_k.to(out_c.dtype))

    def _parts(self, row_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        sizes = [_END_BYTES * self._num_ends, 2 * self._keep, 2 * self._keep]
        ends_B, values_B, places_B = torch.split(row_B[: self.wire_bytes], sizes)
        return ends_B.view(torch.int32), values_B.view(torch.bfloat16), places_B.view(torch.int16)


def largest(size_c: Tensor, keep: int) -> Tensor:
    """Places of the `keep` largest, int64[keep], in any order. size: not negative. Of equal ones any; NaN is largest.

    On a CPU only what is above a threshold is sorted; a sample proposes it, and where it is too high all are. On a GPU
    all are, which is fast there, and the host need not know how many lie above.
    """
    if size_c.device.type == "cpu" and size_c.numel() > 2 * _SAMPLE:
        sample_s = size_c[:: size_c.numel() // _SAMPLE]
        above = ceil(_MORE * keep / size_c.numel() * len(sample_s)) + 1
        if above < len(sample_s):
            threshold = sample_s.topk(above, sorted=False).values.amin()
            at_a = (size_c >= threshold).nonzero().view(-1)
            if len(at_a) >= keep:
                return at_a[size_c[at_a].topk(keep, sorted=False).indices]
    return size_c.topk(keep, sorted=False).indices
