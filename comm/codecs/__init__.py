"""Ways to write a vector in fewer bytes. Adding one is a file and a row here; its law tests come by parametrisation."""

from collections.abc import Callable

from thinwire.comm.codecs.dense import DenseCodec
from thinwire.comm.codecs.sign import SignCodec
from thinwire.comm.protocol import Codec

__all__ = ["REGISTRY", "DenseCodec", "SignCodec"]

REGISTRY: dict[str, Callable[[], Codec]] = {SignCodec.name: SignCodec, DenseCodec.name: DenseCodec}
