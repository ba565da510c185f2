"""Optimizers of small tensors: with many blocks and buckets, and with the fields of a schedule or of bounds by name."""

from dataclasses import fields

from thinwire.comm.codecs import SignCodec
from thinwire.optim import LambBounds, ZeroOneSchedule


def sized(kind, *, block=None, bucket_elements=None):
    """The class with so many values that share a scale, and so many that are sent at a time at most."""
    own = {} if block is None else {"codec": SignCodec(block)}
    if bucket_elements is not None:
        own["bucket_elements"] = bucket_elements
    return type(kind.__name__, (kind,), own) if own else kind


def construct(kind, params, *args, block=None, bucket_elements=None, **options):
    """An optimizer of this class. options: its own, and what are fields of ZeroOneSchedule and LambBounds."""
    for name, grouped in (("schedule", ZeroOneSchedule), ("bounds", LambBounds)):
        given = {field.name: options.pop(field.name) for field in fields(grouped) if field.name in options}
        if given:
            options[name] = grouped(**given)
    return sized(kind, block=block, bucket_elements=bucket_elements)(params, *args, **options)
