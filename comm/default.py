"""The reducer that an optimizer gets when its user names none: the default process group, or one rank alone."""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor

from thinwire.comm.codecs import SignCodec
from thinwire.comm.exchange.bucketed import BucketedAllReduce
from thinwire.comm.exchange.plain import CompressedAllReduce
from thinwire.comm.exchange.solo import SoloReducer
from thinwire.comm.groups.distributed import SoloGroup, TorchGroup
from thinwire.comm.kernels.reference import Scale
from thinwire.comm.layout import DEFAULT_BLOCK, DEFAULT_BUCKET, VectorLayout
from thinwire.comm.protocol import Group, Reducer


def default_reducer(
    group: Group | None,
    layout: VectorLayout,
    like: Tensor,
    block: int = DEFAULT_BLOCK,
    scale: Scale = "l2",
    *,
    bucket_elements: int = DEFAULT_BUCKET,
    cuts: Iterable[int] = (),
    server_replica: bool = False,
) -> Reducer:
    """A compressed all-reduce over `group`; None is torch.distributed's default group, or one rank without it.

    block: values that share a scale; scale: the norm that it keeps. "l2" gets the exchange in buckets of at most
    bucket_elements, none across one of `cuts`, with a replica of the server error where asked for
    (exchange/bucketed.py); "l1" gets CompressedAllReduce.
    A group of one exchanges nothing, so it does not compress, and gives out the residual that a larger group may have
    left. Collective. Raises: WireMismatch, PeerLost.
    """
    group = given_or_default(group)
    if group.size == 1:
        return SoloReducer(group, layout, like)
    if scale != "l2":
        return CompressedAllReduce(group, layout, SignCodec(block, scale), like)
    return BucketedAllReduce(
        group, layout, SignCodec(block), like, bucket_elements=bucket_elements, cuts=cuts, server_replica=server_replica
    )


def given_or_default(group: Group | None) -> Group:
    """The group itself; for None torch.distributed's default group, or one rank alone where there is none."""
    if group is not None:
        return group
    return TorchGroup() if dist.is_available() and dist.is_initialized() else SoloGroup()
