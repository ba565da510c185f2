"""The loop of a Recipe: an ordinary script. A job with a built-in recipe runs it, and thinwire.train.train() does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import default_collate

from thinwire.comm.protocol import Group
from thinwire.workers.data.order import share
from thinwire.workers.recipe import Recipe, moved
from thinwire.workers.session.session import Session

EVALUATION_SAMPLES = 32
"""Samples evaluated at a time, so that memory does not grow with the validation set."""


def train(recipe: Recipe, run: Session) -> nn.Module:
    """Train it to its last step, and return the model."""
    dataset, samples = recipe.dataset(), recipe.validation()
    model = recipe.model().to(run.device)
    params = model.named_parameters() if recipe.takes_names else model.parameters()
    optimizer = recipe.optimizer(params, run.group)
    run.register(model=model, optimizer=optimizer)
    if samples is not None:
        run.evaluate_every(
            recipe.evaluate_every,
            lambda: part_of_validation(recipe, model, samples, run.group, run.device, run.look),
        )
    batches = run.batches(dataset, global_batch=recipe.global_batch, steps=recipe.steps, seed=recipe.seed)
    recipe.rehearse(model, optimizer, run.device)
    for batch in batches:
        # Before backward: what 0/1 Adam sends in it has the rate in it.
        set_rate(optimizer, recipe.lr(run.step_number + 1))
        run.step(recipe.loss(model, moved(batch, run.device)))
    return model


def set_rate(optimizer: torch.optim.Optimizer, rate: float | None) -> None:
    """Of all parameter groups. None: they keep theirs."""
    if rate is not None:
        for param_group in optimizer.param_groups:
            param_group["lr"] = rate


def _no_look() -> None:
    pass


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
        for number, batch in shared_out(samples, group):
            look()
            total += recipe.loss(model, moved(batch, device)).double() * number
    finally:
        model.train()
    return float(total * (group.size / len(samples)))


def shared_out(samples: Sequence[Any], group: Group) -> Iterator[tuple[int, Any]]:
    """This rank's samples, some at a time: how many, and their batch."""
    mine = share(len(samples), group.rank, group.size)
    for at in range(mine.start, mine.stop, EVALUATION_SAMPLES):
        some = range(at, min(at + EVALUATION_SAMPLES, mine.stop))
        yield len(some), default_collate([samples[i] for i in some])
