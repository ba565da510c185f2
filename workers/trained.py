"""What the course of steps, the checkpoints and the log of steps know of what is trained."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn

from thinwire.comm.protocol import Group
from thinwire.optim import FlatOptimizer
from thinwire.workers.session.registered import Registered


class Trained(Protocol):
    """What a course trains with, over one group. Another group is another one."""

    @property
    def group(self) -> Group:
        """With whom."""

    @property
    def device(self) -> torch.device:
        """Where."""

    @property
    def model(self) -> nn.Module | None:
        """What a checkpoint calls the parameters by; None where `registered` has the model."""

    @property
    def optimizer(self) -> FlatOptimizer[Any]:
        """Holds parameters and state."""

    @property
    def registered(self) -> Registered | None:
        """What else belongs to the state of a step."""

    def global_batch(self, step: int) -> int:
        """Samples of a step, over all ranks."""

    def lr(self, step: int) -> float:
        """The learning rate of a step."""
