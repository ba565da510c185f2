"""Ways to write a vector in fewer bytes: a file each."""

from thinwire.comm.codecs.bf16 import Bf16Codec
from thinwire.comm.codecs.int4 import Int4Codec
from thinwire.comm.codecs.int8 import Int8Codec
from thinwire.comm.codecs.sign import SignCodec
from thinwire.comm.codecs.threshold import ThresholdCodec
from thinwire.comm.codecs.topk import TopKCodec

__all__ = ["Bf16Codec", "Int4Codec", "Int8Codec", "SignCodec", "ThresholdCodec", "TopKCodec"]
