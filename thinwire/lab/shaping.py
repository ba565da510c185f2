"""Which queueing makes a veth pair behave like a link of a given rate?

A token bucket (tbf) at both ends of a link: on the host's interface for what it sends, on the switch's port for what it
receives. The bucket holds half a millisecond of line rate: smaller ones starve one direction of a two-way transfer as
soon as a segment (GSO, the large packet that the kernel cuts into frames late) is more than about half of it; larger
ones let bursts through that no real link would. The queue behind it holds 8 ms and drops what comes on top, as switches
with small buffers do.
"""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.lab.spec import LabSpec

BUCKET_S = 0.5e-3
MIN_BUCKET_BYTES = 16 * 1024
FAST_RATE_MBIT, FAST_BUCKET_BYTES = 1500.0, 256 * 1024
QUEUE_S = 8e-3
MIN_QUEUE_BYTES = 256 * 1024
MAX_GSO_BYTES = 65536


@dataclass(frozen=True)
class Shaping:
    """What tc and ip are told. rate in bit/s; the others in bytes."""

    rate_bit: int
    bucket_bytes: int
    queue_bytes: int
    gso_bytes: int


def shaping_of(spec: LabSpec) -> Shaping:
    """The queueing of every link of a lab."""
    rate_bytes = spec.rate_mbit * 1e6 / 8
    if spec.rate_mbit > FAST_RATE_MBIT:
        bucket = max(FAST_BUCKET_BYTES, int(rate_bytes * BUCKET_S))
    else:
        bucket = max(MIN_BUCKET_BYTES, int(rate_bytes * BUCKET_S))
    return Shaping(
        rate_bit=round(spec.rate_mbit * 1e6),
        bucket_bytes=bucket,
        queue_bytes=max(MIN_QUEUE_BYTES, int(rate_bytes * QUEUE_S)),
        gso_bytes=min(MAX_GSO_BYTES, bucket // 2),
    )
