"""Where tensors lie and how their memory is read, asked of many at once.

Each step asks it of every parameter and every gradient, and mostly the answer is that nothing has changed. So what was
known is compared as lists that map() fills, in a third of the time that a loop of Python takes, or by torch.compile's
guards, in half of the time of that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter, is_

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

GRAD, SHAPE, DTYPE, VERSION = attrgetter("grad"), attrgetter("shape"), attrgetter("dtype"), attrgetter("_version")
"""For map(): of a tensor what is named."""


class Lying:
    """Where dense tensors lay, and how they read their memory, when this was made: see whether others do so too.

    `.data =` and t_() change that in a tensor itself.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.at = list(map(Tensor.data_ptr, tensors))
        self.shapes: list[torch.Size] = list(map(SHAPE, tensors))
        self._strides = list(map(Tensor.stride, tensors))
        self._dtypes = list(map(DTYPE, tensors))
        self._guard: Callable[..., bool] | None = None
        """Of the first for which all_hold() was true: are others like those? Where it says no they may be all the same,
        for it looks at more."""

    def all_hold(self, tensors: Sequence[Tensor]) -> bool:
        """Do all of these, in the same order?"""
        if list(map(Tensor.data_ptr, tensors)) != self.at:
            return False
        if self._guard is not None and self._guard(*tensors):
            return True
        hold = (
            list(map(Tensor.stride, tensors)) == self._strides
            and list(map(SHAPE, tensors)) == self.shapes
            and list(map(DTYPE, tensors)) == self._dtypes
        )
        if hold and self._guard is None:
            self._guard = guard(tensors)
        return hold

    def holds(self, index: int, x: Tensor) -> bool:
        """Does this one, in the place of that number?"""
        alike = x.data_ptr() == self.at[index] and x.stride() == self._strides[index]
        return alike and x.shape == self.shapes[index] and x.dtype is self._dtypes[index]


def guard(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """What says of as many tensors, given one by one, whether type, dtype, shape and strides of each are as of these.

    And whether each requires a gradient, and lies on the same device. It keeps none of them. torch.compile's own, which
    nothing promises: where torch has it no more, what always says no.
    """
    try:
        from torch._C._dynamo.guards import TensorGuards

        check: Callable[..., bool] = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    except (ImportError, AttributeError, TypeError):
        return lambda *_: False
    return check


def are(found: Sequence[object], known: Sequence[object]) -> bool:
    """Are these the same objects, in the same order?"""
    return len(found) == len(known) and all(map(is_, found, known))


def alone(view: Tensor) -> Tensor:
    """The same memory as a tensor with a storage of its own, just as long, at which nothing else can be reached.

    It keeps the memory alive. Its version counter is its own.
    """
    return from_dlpack(view)


def holders(storage: torch.UntypedStorage) -> int:
    """How many tensors and arrays hold a storage, beside the object that it was asked of."""
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1
