"""A built-in recipe trained step by step, without a session: for benchmarks and tests that look at single steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.comm.protocol import Group
from thinwire.contract.spec import TrainSpec
from thinwire.optim import FlatOptimizer
from thinwire.workers.data.feed import MapFeed
from thinwire.workers.recipe import moved
from thinwire.workers.recipes import recipe_of
from thinwire.workers.recipes.bert import IGNORED
from thinwire.workers.recipes.of_job import OfJob
from thinwire.workers.session.job import part_of_validation, set_rate, shared_out
from thinwire.workers.telemetry.meter import Meter
from thinwire.workers.telemetry.step_log import refuse_non_finite


@dataclass(frozen=True, slots=True)
class Training:
    """Everything that one rank trains with. validation: samples on the CPU."""

    recipe: OfJob
    group: Group
    device: torch.device
    model: nn.Module
    optimizer: FlatOptimizer[Any]
    feed: MapFeed
    validation: Sequence[Any]


def feed_for(recipe: OfJob) -> MapFeed:
    """Its samples, step by step. Raises: DataError."""
    return MapFeed(recipe.dataset(), recipe.global_batch, recipe.steps, seed=recipe.seed)


def build(spec: TrainSpec, group: Group, device: torch.device) -> Training:
    """Build it. Collective: the optimizer compares layouts and sends rank 0's parameters to all."""
    recipe = recipe_of(spec)
    model = recipe.model().to(device)
    optimizer = recipe.optimizer(model.parameters(), group)
    return Training(recipe, group, device, model, optimizer, feed_for(recipe), recipe.validation())


def train_step(training: Training, step: int, meter: Meter) -> Tensor:
    """Step `step` (from 1). Returns this rank's part of the global mean loss: the mean over ranks is the loss."""
    group, optimizer = training.group, training.optimizer
    with meter.part("optimizer"):
        mine = training.feed.share(step, group.rank, group.size)
        optimizer.zero_grad()
        set_rate(optimizer, training.recipe.lr(step))
        loss = training.recipe.loss(training.model, moved(mine.batch, training.device)) * mine.weight
        loss.backward()
        optimizer.step()
    return loss.detach()


def evaluate(training: Training, meter: Meter) -> float:
    """The validation loss, the same on every rank. Raises: NonFiniteLoss, alike on every rank."""
    group = training.group
    with meter.part("evaluation"):
        part = part_of_validation(training.recipe, training.model, training.validation, group, training.device)
        total = torch.full((1,), part, dtype=torch.float64, device=training.device)
        finite = torch.isfinite(total).all()
        group.mean_(total)
        refuse_non_finite("validation loss", total.item(), group, finite)
        return total.item()


@torch.no_grad()
def accuracy(training: Training) -> float:
    """The share of validation targets whose logit is the largest, each rank a share; what is IGNORED does not count."""
    found = torch.zeros(2, dtype=torch.float64, device=training.device)  # right ones, all
    training.model.eval()
    for _, batch in shared_out(training.validation, training.group):
        inputs, targets = moved(batch, training.device)
        counted = targets != IGNORED
        right = training.model(inputs).argmax(dim=-1) == targets
        found += torch.stack([(right & counted).sum(), counted.sum()])
    training.model.train()
    training.group.mean_(found)
    num_right, num_counted = (found * training.group.size).round().tolist()  # counts, whatever the mean's rounding
    return float(num_right / num_counted)
