"""One training step and one evaluation, on one rank. The world size changes who computes what, never the sum."""

from __future__ import annotations

from collections.abc import Callable

import torch

from thinwire.workers.build import Training, learning_rate
from thinwire.workers.data.batches import share
from thinwire.workers.data.masked import IGNORED
from thinwire.workers.telemetry.meter import Meter
from thinwire.workers.telemetry.step_log import refuse_non_finite

EVALUATION_SAMPLES = 32
"""Samples evaluated at a time, so that memory does not grow with the validation set."""


def train_step(training: Training, step: int, meter: Meter) -> torch.Tensor:
    """Step `step` (from 1). Returns this rank's part of the global mean loss, 0-dim: the mean over ranks is the loss.

    Shares of the global batch may differ by one sample, so each rank's mean loss is weighed by its share; the mean
    gradient over ranks is then exactly the gradient of the mean loss over the global batch.
    Raises: NonFiniteInput, alike on every rank; PeerLost. Then the model is as before the step.
    """
    group, optimizer = training.group, training.optimizer
    with meter.part("forward_backward", bytes_on="optimizer"):  # with overlap buckets leave during backward
        inputs, targets = training.batches.local(step, group.rank, group.size)
        weight = len(inputs) * group.size / training.spec.global_batch
        optimizer.zero_grad()
        loss = training.model(inputs.to(training.device), targets.to(training.device)) * weight
        loss.backward()
    with meter.part("optimizer"):
        for param_group in optimizer.param_groups:
            param_group["lr"] = learning_rate(training.spec, step)
        optimizer.step()
    part: torch.Tensor = loss.detach()
    return part


def _no_look() -> None:
    pass


@torch.no_grad()
def evaluate(training: Training, meter: Meter, look: Callable[[], None] = _no_look) -> float:
    """Mean loss in nats over the validation samples, each rank a share. The same for any number of ranks, to rounding.

    look: called now and then on the way. Raises: NonFiniteLoss, alike on every rank; PeerLost, and what `look` raises.
    """
    with meter.part("evaluation"):
        inputs, targets = training.validation
        mine = share(len(inputs), training.group.rank, training.group.size)
        total = torch.zeros(1, dtype=torch.float64, device=training.device)
        training.model.eval()
        try:
            for at in range(mine.start, mine.stop, EVALUATION_SAMPLES):
                look()
                part = slice(at, min(at + EVALUATION_SAMPLES, mine.stop))
                total += training.model(inputs[part], targets[part]).double() * (part.stop - part.start)
        finally:
            training.model.train()
        total *= training.group.size / len(inputs)
        finite = torch.isfinite(total).all()
        training.group.mean_(total)
        loss = total.item()
        refuse_non_finite("validation loss", loss, training.group, finite)
        return loss


@torch.no_grad()
def accuracy(training: Training) -> float:
    """The share of validation targets whose logit is the largest, each rank a share; what is IGNORED does not count.

    Raises: PeerLost.
    """
    inputs, targets = training.validation
    mine = share(len(inputs), training.group.rank, training.group.size)
    found = torch.zeros(2, dtype=torch.float64, device=training.device)  # right ones, all
    training.model.eval()
    for at in range(mine.start, mine.stop, EVALUATION_SAMPLES):
        part = slice(at, min(at + EVALUATION_SAMPLES, mine.stop))
        counted = targets[part] != IGNORED
        right = training.model(inputs[part]).argmax(dim=-1) == targets[part]
        found += torch.stack([(right & counted).sum(), counted.sum()])
    training.model.train()
    training.group.mean_(found)
    num_right, num_counted = (found * training.group.size).round().tolist()  # counts, whatever the mean's rounding
    return float(num_right / num_counted)
