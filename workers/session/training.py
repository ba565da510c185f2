"""What a session trains with, as the loop, the checkpoints and the log of steps know it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from thinwire.comm.protocol import Group
from thinwire.optim import FlatOptimizer
from thinwire.workers.data.feed import Feed
from thinwire.workers.session.registered import Registered


class SessionFeed(Feed, Protocol):
    """A feed that says of itself, in which workers must agree: its data, and how they are drawn."""

    @property
    def told(self) -> str:
        """The data."""

    @property
    def drawn(self) -> str:
        """How they are drawn."""


@dataclass(frozen=True, slots=True)
class Training:
    """Over one group; over another group it is another one.

    registered: what else belongs to the state of a step. rates: with which steps were made that are not reported yet.
    refuses_nan: a loss that is not finite ends the run, as in a job of a built-in recipe; what a script reports is its
    own affair, and its gradients are looked at in any case.
    """

    group: Group
    device: torch.device
    optimizer: FlatOptimizer[Any]
    registered: Registered
    feed: SessionFeed
    rates: dict[int, float] = field(default_factory=dict)
    refuses_nan: bool = False

    def global_batch(self, step: int) -> int:
        """Samples of a step, over all ranks."""
        return self.feed.samples(step)

    def lr(self, step: int) -> float:
        """The rate with which the step was made, or the one of now."""
        return self.rates.get(step, float(self.optimizer.param_groups[0]["lr"]))

    @property
    def told(self) -> str:
        """The samples and the registered objects, in words in which all workers must agree."""
        return f"{self.feed.told}, {self.feed.drawn}; registered: {', '.join(self.registered.names)}"
