"""Ways to write a vector in fewer bytes. Adding one is a file and a row here; its law tests come by parametrisation."""

from collections.abc import Callable

from thinwire.comm.codecs.bf16 import Bf16Codec
from thinwire.comm.codecs.dense import DenseCodec
from thinwire.comm.codecs.int8 import Int8Codec
from thinwire.comm.codecs.sign import SignCodec
from thinwire.comm.protocol import Codec

__all__ = ["REGISTRY", "Bf16Codec", "DenseCodec", "Int8Codec", "SignCodec"]

REGISTRY: dict[str, Callable[[], Codec]] = {
    SignCodec.name: SignCodec,
    DenseCodec.name: DenseCodec,
    Bf16Codec.name: Bf16Codec,
    Int8Codec.name: Int8Codec,
}
