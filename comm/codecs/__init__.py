"""Ways to write a vector in fewer bytes: a file each."""

from __future__ import annotations

from thinwire.comm.codecs.bf16 import Bf16Codec
from thinwire.comm.codecs.int4 import Int4Codec
from thinwire.comm.codecs.int8 import Int8Codec
from thinwire.comm.codecs.low_rank import PowerSGD
from thinwire.comm.codecs.sign import SignCodec
from thinwire.comm.codecs.sketch import CountSketch
from thinwire.comm.codecs.threshold import ThresholdCodec
from thinwire.comm.codecs.topk import TopKCodec
from thinwire.comm.protocol import Codec, LinearCodec

__all__ = [
    "Bf16Codec",
    "CountSketch",
    "Int4Codec",
    "Int8Codec",
    "PowerSGD",
    "SignCodec",
    "ThresholdCodec",
    "TopKCodec",
]

BY_NAME: dict[str, Codec] = {
    "sign": SignCodec(),
    "int8": Int8Codec(),
    "int4": Int4Codec(),
    "topk": TopKCodec(),
    "threshold": ThresholdCodec(),
}
"""What `codec` of an optimizer and of a job file may be called."""


def codec_of(given: str | Codec) -> Codec:
    """The codec of this name, or itself. Raises: ValueError."""
    if isinstance(given, str) and given in BY_NAME:
        return BY_NAME[given]
    if isinstance(given, LinearCodec):
        raise ValueError(
            f"codec = {given!r}: crosses in sums of the whole vector and not in rows, which this optimizer sends: give "
            f"one of {', '.join(BY_NAME)}, or use OneBitSGD for factors of matrices and SketchedSGD for a sketch"
        )
    if isinstance(given, str) or not (hasattr(given, "row") and hasattr(given, "fingerprint")):
        raise ValueError(f"codec = {given!r}: must be one of {', '.join(BY_NAME)}, or a Codec of thinwire.comm")
    return given
