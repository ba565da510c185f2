"""Into buckets of what size should a model's vectors be cut on this network? Measured; every rank gets the same answer.

More buckets overlap wire and processor better, and each costs something: two collectives are started and waited for,
and a thread is woken. Scales end where buckets do, so a run that is to be bit-equal to another needs the same size.
"""

from __future__ import annotations

import torch

from thinwire.comm.layout import DEFAULT_BUCKET
from thinwire.comm.protocol import Group
from thinwire.comm.wire.link_probe import measure
from thinwire.comm.wire.network import Network, Work, bucket_elements

ON_CPU = Work(elements_per_s=4e8, bucket_s=3e-3)
"""Encoding, serving and decoding on one core, and what a bucket more costs a step: docs/speed.md."""
ON_GPU = Work(elements_per_s=1e10, bucket_s=2e-4)
"""Not measured: plain torch on one GPU, and the host's part of a bucket."""


def measured_bucket(group: Group, numel: int, device: torch.device | str = "cpu") -> tuple[int, Network | None]:
    """Elements of a bucket for vectors of `numel` elements, and the network that was measured for it.

    Collective; about a second. One rank sends nothing: the default size, and no network. Raises: PeerLost.
    """
    if group.size == 1:
        return DEFAULT_BUCKET, None
    network = measure(group, device=device)
    return bucket_elements(network, ON_CPU if torch.device(device).type == "cpu" else ON_GPU, numel), network
