"""Which values of a model share a scale on the wire, by name, and the reducer for it."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import torch

from thinwire.comm import default_reducer
from thinwire.comm.exchange.vector_scales import deepspeed_reducer, whole_vector_reducer
from thinwire.comm.groups.nodes import Topology
from thinwire.comm.keeps import Keeps
from thinwire.comm.kernels.reference import BLOCK_SCALES, Scale
from thinwire.comm.layout import Span
from thinwire.comm.protocol import FullWire, Group, Reducer
from thinwire.optim.engine.flat import FlatSpace


class Scales(StrEnum):
    """Values that share a scale. The last three are DeepSpeed's, with its padding, which counts as elements."""

    BLOCK = "block"
    """Ours: runs of a few thousand values of one kind, inside one rank's chunk."""
    WHOLE = "whole"
    """The papers': the whole model, and a chunk of it on the way back."""
    TENSOR = "tensor"
    """Each tensor: DeepSpeed's 1-bit Adam and 0/1 Adam with parameters in fp32."""
    GROUP = "group"
    """Each parameter group: the same under its fp16 wrapper, which makes one tensor of a group."""
    FUSED = "fused"
    """The whole model, its padding never cleared: DeepSpeed's 1-bit LAMB."""


def scaled_reducer(
    scales: Scales,
    group: Group | None,
    space: FlatSpace,
    param_groups: list[dict[str, Any]],
    block: int,
    scale: Scale,
    bucket_elements: int,
    *,
    keeps: Keeps,
    full: FullWire = "fp32",
    sums: torch.dtype | None = None,
    topology: Topology = "flat",
) -> Reducer:
    """The reducer of the vectors of `space`. Vectors are laid end to end in the order of `param_groups`, the user's.

    block: values that share a scale where scales is BLOCK. scale: the norm that it keeps; "l1" where scales is BLOCK
    only. bucket_elements: the most that is sent at a time, there with "l2". keeps: as in
    comm.exchange.bucketed, there too. full, topology, sums: as in default_reducer, where scales is BLOCK. Collective.
    Raises: ValueError, WireMismatch, PeerLost.
    """
    if scale not in BLOCK_SCALES or (scale != "l2" and scales is not Scales.BLOCK):
        allowed = '"l2" or "l1"' if scales is Scales.BLOCK else f'"l2" where settings.scales = {scales.value!r}'
        raise ValueError(f"scale = {scale!r}: must be {allowed}")
    if topology == "node_first" and scales is not Scales.BLOCK:
        raise ValueError(
            f'topology = "node_first": must be "flat" or "auto" where settings.scales = {scales.value!r}, which parity '
            "has: the numbers that are to be met are those of an exchange of every rank with every other"
        )
    place = {id(tensor.param): (tensor.start, tensor.stop) for tensor in space.tensors}
    members = [[id(param) for param in group["params"] if id(param) in place] for group in param_groups]
    by_group: list[list[Span]] = [[place[member] for member in group] for group in members if group]
    every = [run for runs in by_group for run in runs]
    match scales:
        case Scales.BLOCK:
            return default_reducer(
                group,
                space.layout,
                space.p_N,
                block,
                scale,
                bucket_elements=bucket_elements,
                cuts=space.cuts,
                keeps=keeps,
                full=full,
                sums=sums,
                topology=topology,
            )
        case Scales.WHOLE:
            return whole_vector_reducer(group, space.layout, every, space.p_N)
        case Scales.TENSOR:
            return deepspeed_reducer(group, space.layout, [[run] for run in every], space.p_N)
        case Scales.GROUP:
            return deepspeed_reducer(group, space.layout, by_group, space.p_N)
        case Scales.FUSED:
            return deepspeed_reducer(group, space.layout, [every], space.p_N, keep_padding=True)
