"""An optimizer as it is between two steps, on one rank alone: so that steps that stood can be taken back.

Where several optimizers step with one batch, and the exchange of a later one is lost, the steps of those before it
stand on all ranks, and must not: the batch is computed again from its beginning, with other ranks. An exchange that was
committed cannot be undone, for its input is gone. So a copy is held, as rank_state_dict() gives it: parameters,
replicated vectors, and of the error memory what this rank holds. It is local, and all ranks that put it back are as
they were, bit for bit; of R no part is lost, but what the rows of the last exchange would tell of a rank that is gone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from thinwire.optim.engine import saving, tensor_states
from thinwire.optim.engine.optimizer import FlatOptimizer


class Kept:
    """All of it but gradients. Copies: as many bytes as parameters and state have. Local.

    Raises: RuntimeError where gradients are on their way (overlap).
    """

    def __init__(self, optimizer: FlatOptimizer[Any]) -> None:
        optimizer.settle()
        optimizer.overlap.refuse_between("Kept()")
        optimizer.space.take_written()
        self._optimizer, self._steps = optimizer, optimizer.num_steps
        self._skipped = optimizer.steps_skipped
        self._handed_over = optimizer.handed_over
        parameters_N = tensor_states.parameters(optimizer).clone()
        self._state = {**saving.collect_share(optimizer), "parameters": parameters_N}

    @property
    def has_moved(self) -> bool:
        """Has a step been made since, that stands?"""
        return self._optimizer.num_steps != self._steps

    def put_back(self) -> None:
        """The optimizer <- what it was, over the same ranks. Gradients stay. Local."""
        optimizer = self._optimizer
        saving.apply(optimizer, self._state)
        optimizer.resumed()
        optimizer.handed_over = self._handed_over  # R, where no step had taken it up
        optimizer.loaded = None  # all ranks put back what they had
        optimizer.steps_skipped = self._skipped


@contextmanager
def as_laid_out(optimizer: FlatOptimizer[Any]) -> Iterator[None]:
    """Inside, those parameters require a gradient that the flat vectors are of, whatever has been said of them since.

    Between steps a script may switch gradients off, as those of a discriminator while the generator learns. The next
    step finds whether that is so; a rank that comes meanwhile has not heard of it, and must not differ for it.
    """
    inside = {id(tensor.param) for tensor in optimizer.space.tensors}
    params = [param for group in optimizer.param_groups for param in group["params"]]
    changed = [param for param in params if param.requires_grad != (id(param) in inside)]
    for param in changed:
        param.requires_grad_(id(param) in inside)
    try:
        yield
    finally:
        for param in changed:
            param.requires_grad_(id(param) not in inside)
