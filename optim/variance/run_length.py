"""How long is the run? What a learning rate scheduler knows for certain, where the user has not said total_steps.

Certain is a scheduler beyond whose end no step can follow that moves anything:

    OneCycleLR                          raises beyond its total_steps
    PolynomialLR, LinearLR down to 0    the rate is 0 from total_iters on
    LambdaLR of transformers            its num_training_steps says so

A cosine's T_max is not: rates rise again after it, and many give it in epochs. Nor is any of these where it is not
stepped with the optimizer: a scheduler counts as one that is only if its count is a multiple of the optimizer's.
"""

from __future__ import annotations

import functools
import gc

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LinearLR, LRScheduler, OneCycleLR, PolynomialLR

from thinwire.comm.protocol import Group

SEEN_AFTER = 2
"""Steps after which the counts are compared: one alone may be a scheduler's that is stepped for each epoch."""


def has_scheduler(optimizer: Optimizer) -> bool:
    """Has a scheduler of torch.optim been made for it? The same on every rank that runs the same program."""
    return hasattr(optimizer.step, "_wrapped_by_lr_sched")


def known_length(optimizer: Optimizer, num_steps: int) -> int | None:
    """Steps of the run, by its schedulers, after `num_steps` of them; None where none knows. Looks at live objects."""
    lengths = set()
    for thing in gc.get_objects():
        if issubclass(type(thing), LRScheduler) and thing.__dict__.get("optimizer") is optimizer:
            length = _length(thing)
            count = thing.last_epoch
            if length is not None and count >= num_steps and count % num_steps == 0:
                lengths.add(length // (count // num_steps))
    return min(lengths, default=None)


def agreed_length(group: Group, length: int | None, device: torch.device) -> int | None:
    """The length, where all ranks know the same; else None. device: of the group's tensors. Collective, 8 bytes a rank.

    Raises: PeerLost.
    """
    own = torch.tensor([length or 0], dtype=torch.int64, device=device).view(torch.uint8)
    everyone_nB = torch.zeros((group.size, own.numel()), dtype=torch.uint8, device=device)
    group.all_gather(everyone_nB, own)
    known = set(everyone_nB.view(torch.int64).flatten().tolist())
    return length if known == {length} else None


def _length(scheduler: LRScheduler) -> int | None:
    """Of its own steps, until no rate is left; None where that is not certain."""
    if isinstance(scheduler, OneCycleLR):
        return int(scheduler.total_steps)
    if isinstance(scheduler, PolynomialLR):
        return int(scheduler.total_iters)
    if isinstance(scheduler, LinearLR):
        return int(scheduler.total_iters) if scheduler.end_factor == 0 else None
    if isinstance(scheduler, LambdaLR):
        lengths = {
            rule.keywords.get("num_training_steps")
            for rule in scheduler.lr_lambdas
            if isinstance(rule, functools.partial)
        }
        if len(lengths) == 1:
            (length,) = lengths
            return length if type(length) is int else None
    return None
