"""The shortest way to train: a class that says what the model, the data and the loss are."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from thinwire.train.run import session

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from thinwire.comm.protocol import Group


class Recipe(ABC):
    """What is trained. global_batch, steps: as of run.batches(); None: the job's file says them."""

    global_batch: int | None = None
    steps: int | None = None

    @abstractmethod
    def model(self) -> nn.Module:
        """A new model. Its values may be any: all workers begin with those of the first."""

    @abstractmethod
    def dataset(self) -> Any:
        """What is trained on: with len() and [i], or an iterable."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The mean loss over a batch that lies on the model's device."""

    def optimizer(self, params: Iterable[Any], group: Group) -> Optimizer:
        """What steps the model: one of thinwire.optim. The default: 1-bit Adam with a rate of 1e-3."""
        from thinwire.optim import OneBitAdam

        return OneBitAdam(params, lr=1e-3, group=group, total_steps=self.steps)


def train(recipe: Recipe, folder: str | os.PathLike[str] | None = None) -> nn.Module:
    """Train it to its last step, and return the model. folder: as of session()."""
    with session(folder) as run:
        model = recipe.model().to(run.device)
        optimizer = recipe.optimizer(model.parameters(), run.group)
        run.register(model=model, optimizer=optimizer)
        for batch in run.batches(recipe.dataset(), global_batch=recipe.global_batch, steps=recipe.steps):
            run.step(recipe.loss(model, moved(batch, run.device)))
    return model


def moved(batch: Any, device: Any) -> Any:
    """The same with its tensors on the device: of tensors, and of lists, tuples and dicts of them."""
    if hasattr(batch, "to"):
        return batch.to(device)
    if isinstance(batch, dict):
        return {name: moved(value, device) for name, value in batch.items()}
    if isinstance(batch, list | tuple):
        items = [moved(value, device) for value in batch]
        return items if isinstance(batch, list) else tuple(items)
    return batch
