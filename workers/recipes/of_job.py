"""What every recipe of a job file has from it, whatever its model and data are."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import default_collate

from thinwire.comm.layout import DEFAULT_BUCKET
from thinwire.comm.protocol import Group
from thinwire.contract.spec import TrainSpec
from thinwire.optim import FlatOptimizer
from thinwire.workers.hyper import OPTIMIZERS, PRECISIONS, hyperparameters, learning_rate
from thinwire.workers.recipe import Recipe, moved


class OfJob(Recipe):
    """A recipe whose optimizer, rates and numbers are those of a TrainSpec.

    Its model draws nothing while it trains, and what it computes for a sample does not depend on the others of the
    batch.
    """

    global_batch: int
    steps: int
    seed: int

    def __init__(self, spec: TrainSpec) -> None:
        self.spec = spec
        self.global_batch, self.steps, self.seed = spec.global_batch, spec.steps, spec.seed
        self.evaluate_every = spec.evaluation.every_steps

    @property
    def dtype(self) -> torch.dtype:
        """Of the model's parameters."""
        return PRECISIONS[self.spec.precision]

    @abstractmethod
    def validation(self) -> Sequence[Any]:
        """As many samples as the spec says, or all where there are fewer. Raises: DataError."""

    def optimizer(self, params: Iterable[Any], group: Group) -> FlatOptimizer[Any]:
        """The one that the spec names."""
        made = OPTIMIZERS[self.spec.optimizer.name].sized(self.spec.bucket_elements or DEFAULT_BUCKET)
        optimizer: FlatOptimizer[Any] = made(
            params,
            group=group,
            overlap=self.spec.overlap,
            topology=self.spec.topology,
            **hyperparameters(self.spec),
        )
        return optimizer

    def lr(self, step: int) -> float:
        """As the spec's schedule has it."""
        return learning_rate(self.spec, step)

    def rehearse(self, model: nn.Module, optimizer: FlatOptimizer[Any], device: Any) -> None:
        """One backward, whose gradient is thrown away."""
        dataset = self.dataset()
        one = dataset.visit(0, 0) if hasattr(dataset, "visit") else dataset[0]
        with optimizer.no_sync():
            self.loss(model, moved(default_collate([one]), device)).backward()  # type: ignore[no-untyped-call]
        optimizer.zero_grad()
