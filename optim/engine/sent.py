"""Are the gradients of shards still as they were sent? Clipping them writes them, and torch leaves no trace of it.

A tensor has a version, and who writes it raises that; but torch's foreach operations on DTensors do not, and
clip_grad_norm_ is made of these. So a few elements of each gradient are kept when it is sent, and step() compares them
with what lies there. Clipping scales all elements, so that few of them tell.

One rank may find it alone, as where the norm of its box is above the limit and that of the others is not. It sends NaN
in place of an element of the bucket that has not left yet: so the step is undone on all ranks, and nothing waits for
the device. Why it was they ask then.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.comm.layout import Span
from thinwire.optim.engine.flat import FlatSpace
from thinwire.optim.engine.local import as_dtensor, local

FEW, SMALL = 8, 1 << 14
"""Elements of a gradient that are looked at, about; and of one that is copied for it, at most."""
WRITTEN = (
    "gradients were written between backward and step(), and with overlap they may have been sent before: clip with "
    "max_grad_norm, do what else changes them in the loss, or use overlap=False"
)
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Sent:
    """A few elements of the gradients of a step, where they lie, and what they held when they were sent."""

    def __init__(self) -> None:
        self._there: dict[int, Tensor] = {}
        self._kept: dict[int, Tensor] = {}

    def watch(self, space: FlatSpace, indices: Sequence[int]) -> None:
        """Keep those of these tensors, which are taken and not sent yet. Modifies p.grad of small ones.

        Where the exchange has taken a gradient into g_N the mean will take its place there. Of a small one, as those of
        vectors are, p.grad is a copy from here on, the same tensor in each step: to make a DTensor takes far longer
        than to copy it.
        """
        into, small = [], []
        for index in indices:
            param = space.tensors[index].param
            if param.grad is None:
                continue
            here = local(param.grad)
            if space.lies_flat(here):
                if here.numel() > SMALL:
                    continue
                if index not in space.copies:
                    space.copies[index] = as_dtensor(torch.empty_like(here), param)
                param.grad = space.copies[index]
                small.append(here)
                here = local(param.grad)
                into.append(here)
            if here.numel() and here.is_contiguous():
                every = 1 + here.numel() // FEW  # as here.view(-1)[::every], in one call
                self._there[index] = here.as_strided((-(-here.numel() // every),), (every,))
        if small:
            torch._foreach_copy_(into, small)
        self.written(indices)

    def written(self, indices: Sequence[int]) -> None:
        """These were written before they were sent: keep what they hold now."""
        if watched := [index for index in indices if index in self._there]:
            kept = torch.cat([self._there[index] for index in watched])
            sizes = [self._there[index].numel() for index in watched]
            self._kept.update(zip(watched, torch.split(kept, sizes), strict=True))

    def differ(self, space: FlatSpace, already: bool) -> Tensor:
        """Does one of them hold something else now? A bool, 0-dim. already: it is known that it does."""
        found = space.g_N.new_tensor(already, dtype=torch.bool)
        if self._there:
            there, kept = (torch.cat([*few.values()]) for few in (self._there, self._kept))  # wider holds narrower
            integers = _INTEGERS[there.element_size()]  # a NaN is like itself
            found |= (there.view(integers) != kept.view(integers)).any()
        return found


def spoil_(space: FlatSpace, last: Span, runs: Sequence[Tensor | None], found: Tensor) -> None:
    """The first live element of the gradient <- NaN where this is found, if the bucket `last`, which is to go, has it.

    It has it on the rank of a box that has the beginning of the first tensor. runs: where a tensor's gradient is read;
    None, or no runs: in g_N.
    """
    index = next((i for i, tensor in enumerate(space.tensors) if tensor.start < tensor.stop), None)
    if index is not None and last[0] <= space.tensors[index].start < last[1]:
        run = runs[index] if runs else None
        read = space.g_N[space.first] if run is None else run[:1]
        read.masked_fill_(found, torch.nan)
