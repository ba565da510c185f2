"""One training step and one evaluation, on one rank. The world size changes who computes what, never the sum."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from thinwire.comm.protocol import Group
from thinwire.workers.build import Training
from thinwire.workers.data.masked import IGNORED
from thinwire.workers.data.order import share
from thinwire.workers.recipe import Recipe, moved
from thinwire.workers.telemetry.meter import Meter
from thinwire.workers.telemetry.step_log import refuse_non_finite

EVALUATION_SAMPLES = 32
"""Samples evaluated at a time, so that memory does not grow with the validation set."""


def train_step(training: Training, step: int, meter: Meter) -> Tensor:
    """Step `step` (from 1). Returns this rank's part of the global mean loss, 0-dim: the mean over ranks is the loss.

    Shares of the global batch may differ by one sample, so each rank's mean loss is weighed by its share; the mean
    gradient over ranks is then exactly the gradient of the mean loss over the global batch.
    Raises: NonFiniteInput, alike on every rank; PeerLost. Then the model is as before the step.
    """
    group, optimizer = training.group, training.optimizer
    with meter.part("forward_backward", bytes_on="optimizer"):  # with overlap buckets leave during backward
        mine = training.feed.share(step, group.rank, group.size)
        optimizer.zero_grad()
        set_rate(optimizer, training.recipe.lr(step))  # before backward: what 0/1 Adam sends in it has the rate in it
        loss = training.recipe.loss(training.model, moved(mine.batch, training.device)) * mine.weight
        loss.backward()  # type: ignore[no-untyped-call]
    with meter.part("optimizer"):
        optimizer.step()
    return loss.detach()


def set_rate(optimizer: torch.optim.Optimizer, rate: float | None) -> None:
    """Of all parameter groups. None: they keep theirs."""
    if rate is not None:
        for param_group in optimizer.param_groups:
            param_group["lr"] = rate


def _no_look() -> None:
    pass


def evaluate(training: Training, meter: Meter, look: Callable[[], None] = _no_look) -> float:
    """Mean loss in nats over the validation samples, each rank a share. The same for any number of ranks, to rounding.

    look: called now and then on the way. Raises: NonFiniteLoss, alike on every rank; PeerLost, and what `look` raises.
    """
    group = training.group
    with meter.part("evaluation"):
        part = part_of_validation(training.recipe, training.model, training.validation, group, training.device, look)
        total = torch.full((1,), part, dtype=torch.float64, device=training.device)
        finite = torch.isfinite(total).all()
        group.mean_(total)
        loss = total.item()
        refuse_non_finite("validation loss", loss, group, finite)
        return loss


@torch.no_grad()
def part_of_validation(
    recipe: Recipe,
    model: nn.Module,
    samples: Sequence[Any],
    group: Group,
    device: torch.device,
    look: Callable[[], None] = _no_look,
) -> float:
    """Of a rank, computed over its share of the samples: the mean over ranks is the mean loss over the samples. Local.

    look: called now and then on the way. Raises: what `look` raises.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    model.eval()
    try:
        for number, batch in _shared_out(samples, group):
            look()
            total += recipe.loss(model, moved(batch, device)).double() * number
    finally:
        model.train()
    return float(total * (group.size / len(samples)))


@torch.no_grad()
def accuracy(training: Training) -> float:
    """The share of validation targets whose logit is the largest, each rank a share; what is IGNORED does not count.

    Raises: PeerLost.
    """
    found = torch.zeros(2, dtype=torch.float64, device=training.device)  # right ones, all
    training.model.eval()
    for _, batch in _shared_out(training.validation, training.group):
        inputs, targets = moved(batch, training.device)
        counted = targets != IGNORED
        right = training.model(inputs).argmax(dim=-1) == targets
        found += torch.stack([(right & counted).sum(), counted.sum()])
    training.model.train()
    training.group.mean_(found)
    num_right, num_counted = (found * training.group.size).round().tolist()  # counts, whatever the mean's rounding
    return float(num_right / num_counted)


def _shared_out(samples: Sequence[Any], group: Group) -> Iterator[tuple[int, Any]]:
    """This rank's samples, some at a time: how many, and their batch."""
    mine = share(len(samples), group.rank, group.size)
    for at in range(mine.start, mine.stop, EVALUATION_SAMPLES):
        some = range(at, min(at + EVALUATION_SAMPLES, mine.stop))
        yield len(some), default_collate([samples[i] for i in some])
