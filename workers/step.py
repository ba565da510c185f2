"""One training step and one evaluation, on one rank. The world size changes who computes what, never the sum."""

from __future__ import annotations

import torch

from thinwire.workers.build import Training, learning_rate
from thinwire.workers.data.batches import share
from thinwire.workers.meter import Meter

EVALUATION_WINDOWS = 32
"""Windows evaluated at a time, so that memory does not grow with the validation set."""


def train_step(training: Training, step: int, meter: Meter) -> torch.Tensor:
    """Step `step` (from 1). Returns this rank's part of the global mean loss, 0-dim: the mean over ranks is the loss.

    Shares of the global batch may differ by one window, so each rank's mean loss is weighed by its share; the mean
    gradient over ranks is then exactly the gradient of the mean loss over the global batch.
    Raises: NonFiniteInput, alike on every rank; PeerLost. Then the model is as before the step.
    """
    group, optimizer = training.group, training.optimizer
    with meter.part("forward_backward"):
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


@torch.no_grad()
def evaluate(training: Training, meter: Meter) -> float:
    """Mean loss in nats over the validation windows, each rank a share. The same for any number of ranks, to rounding.

    Raises: PeerLost.
    """
    with meter.part("evaluation"):
        inputs, targets = training.validation
        mine = share(len(inputs), training.group.rank, training.group.size)
        total = torch.zeros(1, dtype=torch.float64, device=training.device)
        training.model.eval()
        for at in range(mine.start, mine.stop, EVALUATION_WINDOWS):
            window = slice(at, min(at + EVALUATION_WINDOWS, mine.stop))
            total += training.model(inputs[window], targets[window]).double() * (window.stop - window.start)
        training.model.train()
        total *= training.group.size / len(inputs)
        training.group.mean_(total)
        return total.item()
