"""What is trained: a class that says what the model, the data and the loss are. Those of job files are in recipes/.

Importing it imports no torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from torch import Tensor, nn

    from thinwire.comm.protocol import Group
    from thinwire.optim import FlatOptimizer


class Recipe(ABC):
    """What is trained. Three methods have to be written, all else has a default. Its loop: session/recipe_loop.py.

    global_batch, steps, seed: as of run.batches(); None: the job's file says them. evaluate_every: steps between two
    validation losses, where there is something to validate on.
    """

    global_batch: int | None = None
    steps: int | None = None
    seed: int | None = None
    evaluate_every: int = 100

    @abstractmethod
    def model(self) -> nn.Module:
        """A new model. Its values may be any: all workers begin with those of the first."""

    @abstractmethod
    def dataset(self) -> Any:
        """What is trained on: with len() and [i] or visit(i, number), or an iterable."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The mean loss over a batch that lies on the model's device."""

    def validation(self) -> Sequence[Any] | None:
        """Samples that are not trained on, with len() and [i]: their mean loss is the validation loss. None: none."""
        return None

    takes_names: ClassVar[bool] = False
    """Is optimizer() to be given (name, parameter) pairs, from which 1-bit Muon knows tables and output heads?"""

    def optimizer(self, params: Iterable[Any], group: Group) -> FlatOptimizer[Any]:
        """What steps the model: one of thinwire.optim. The default: 1-bit Adam with a rate of 1e-3."""
        from thinwire.optim import OneBitAdam

        return OneBitAdam(params, lr=1e-3, group=group, total_steps=self.steps)

    def lr(self, step: int) -> float | None:
        """The learning rate of a step, from 1. None: that of the optimizer stays."""
        return None

    def rehearse(self, model: nn.Module, optimizer: FlatOptimizer[Any], device: Any) -> None:  # noqa: B027
        """Do once what is slow the first time, before other workers wait for this one; it must leave no trace."""


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
