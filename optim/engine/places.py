"""Where each parameter lies in a flat vector: from the parameter groups alone, for any choice of parameters.

    |groups of vectors alone |group 0: its vectors | its matrices, one after another |group 1: ...|

Every tensor starts at a multiple of 8. Vectors (biases, norms: fewer than two dimensions) of a group are neighbours, so
that they share scales; a matrix is a segment of its own. Vectors come first because gradients are sent from the end of
the vector to its start: they are of all layers, so that backward has the last of them only at its end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.comm.layout import BYTE, VectorLayout, round_up
from thinwire.optim.engine.local import local
from thinwire.optim.engine.parameters import is_trained, labels


@dataclass(frozen=True, slots=True)
class FlatTensor:
    """One parameter and its place: elements [start, stop) of the flat vectors. label: what messages call it.

    Of a DTensor it is the place of what is here. Where that is nothing it has a few dead elements, so that all ranks
    of a box have the same tensors in the same order.

    name: its position, "group.index". What a user calls it may differ from rank to rank, and from a save to a load.
    """

    param: Tensor
    start: int
    stop: int
    label: str
    name: str

    @property
    def shape(self) -> torch.Size:
        """Of what is here."""
        return local(self.param).shape


@dataclass(frozen=True, slots=True)
class Places:
    """The tensors in flat order, each group's slice (empty where none of it is trained), and the layout of it all."""

    tensors: list[FlatTensor]
    spans: list[slice]
    layout: VectorLayout


def places(param_groups: list[dict[str, Any]], chosen: Callable[[Tensor], bool] = is_trained) -> Places:
    """The places of the parameters that are chosen: by default those that require a gradient now."""
    tensors: list[FlatTensor] = []
    spans: list[slice] = [slice(0)] * len(param_groups)
    segments: list[tuple[int, int]] = []
    at = 0
    groups = []
    for index, (group, called) in enumerate(zip(param_groups, labels(param_groups), strict=True)):
        known = enumerate(zip(group["params"], called, strict=True))
        groups.append((index, [(param, label, f"{index}.{i}") for i, (param, label) in known if chosen(param)]))
    for index, members in sorted(groups, key=lambda item: any(_is_matrix(param) for param, *_ in item[1])):
        group_start = at
        for param, label, name in sorted(members, key=lambda one: _is_matrix(one[0])):  # stable: vectors, then matrices
            numel = local(param).numel()
            stop = round_up(at + max(numel, 1), BYTE)
            joins = not _is_matrix(param) and at > group_start
            segments.append((segments.pop()[0] if joins else at, stop))
            tensors.append(FlatTensor(param, at, at + numel, label, name))
            at = stop
        spans[index] = slice(group_start, at)
    live = tuple((tensor.start, tensor.stop) for tensor in tensors)
    shapes = tuple(tuple(tensor.shape) for tensor in tensors)
    return Places(tensors, spans, VectorLayout(at, live, tuple(segments), shapes))


def _is_matrix(param: Tensor) -> bool:
    return param.dim() >= 2
