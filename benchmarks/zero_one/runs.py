"""One run: a problem, a method, a seed, and whether the optimizer is told of the run's length and schedule."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import cos, pi
from typing import Any

import torch
from torch import nn

from benchmarks.convergence.turns import run_in_turns
from benchmarks.zero_one.problems import Problem
from thinwire.comm.protocol import Group
from thinwire.optim import Adam, ZeroOneAdam, ZeroOneSchedule
from thinwire.optim.engine.optimizer import FlatOptimizer

Parameters = Iterator[nn.Parameter]
Make = Callable[..., FlatOptimizer[Any]]

CURVE = 10
"""Validation losses of a run, at equal distances."""
ALWAYS = 10**9
"""var_update_scaler with which the variance moves at every step."""


@dataclass(frozen=True, slots=True)
class Method:
    """An optimizer as it is compared. ranks: with 1 nothing is compressed."""

    title: str
    make: Make
    settings: dict[str, Any]
    ranks: int = 2


_GROWING = {"schedule": ZeroOneSchedule(dense_steps=0)}
_EACH = {"schedule": ZeroOneSchedule(dense_steps=0, var_update_scaler=ALWAYS)}
_SHORT = {"betas": (0.9, 0.99)}
"""v remembers 100 steps, so that dense start and freeze come early in a run whose length nobody told."""

METHODS = {
    "adam": Method("Adam", Adam, {}),
    "default": Method("0/1 Adam", ZeroOneAdam, {}),
    "frozen-100": Method("0/1 Adam, var_freeze_step=100", ZeroOneAdam, {"var_freeze_step": 100}),
    "growing": Method("0/1 Adam, dense_steps=0", ZeroOneAdam, _GROWING),
    "growing-alone": Method("the same on one rank", ZeroOneAdam, _GROWING, 1),
    "each": Method("the same, v moves at each step", ZeroOneAdam, _EACH),
    "each-alone": Method("and on one rank", ZeroOneAdam, _EACH, 1),
    "dense-50": Method("0/1 Adam, dense_steps=50", ZeroOneAdam, {"schedule": ZeroOneSchedule(dense_steps=50)}),
    "adam-99": Method("Adam, beta2 = 0.99", Adam, _SHORT),
    "default-99": Method("0/1 Adam, beta2 = 0.99", ZeroOneAdam, _SHORT),
    "growing-99": Method("the same, dense_steps=0", ZeroOneAdam, _SHORT | _GROWING),
}
KNOWN = ("adam", "default", "frozen-100", "growing")
"""Those that are run told of the run too."""


@dataclass(frozen=True, slots=True)
class Run:
    """At its end. curve: validation losses, nats; the last one is of what a checkpoint would hold.

    sent_bytes, rounds: of a rank's training steps; a round is a step in which anything is sent.
    """

    problem: str
    method: str
    told: bool
    seed: int
    lr: float
    steps: int
    curve: list[float]
    sent_bytes: int
    fp32_bytes: int
    rounds: int
    frozen_at: int | None
    cpu_s: float


def rate(step: int, steps: int, lr: float) -> float:
    """The schedule of a run that is told of: it rises for a tenth, then falls as a cosine to a tenth."""
    rise = steps // 10
    return lr * (step / rise if step <= rise else 0.55 + 0.45 * cos(pi * (step - rise) / (steps - rise)))


def run(problem: Problem, name: str, method: Method, seed: int, *, told: bool, lr: float, steps: int) -> Run:
    """One run. told: a schedule of rates and total_steps; else a constant rate, and the optimizer knows no length."""
    torch.manual_seed(seed)
    models = [problem.make() for _ in range(method.ranks)]
    validation = problem.validation_batch()
    of_run = {"total_steps": steps, "lr_warmup_steps": steps // 10} if told and method.make is not Adam else {}
    began = time.process_time()

    def work(group: Group) -> Run:
        model, curve, rounds = models[group.rank], [], 0
        optimizer = method.make(model.parameters(), lr=lr, group=group, **method.settings, **of_run)
        at_first = group.stats.sent_bytes
        for step in range(1, steps + 1):
            for param_group in optimizer.param_groups:
                param_group["lr"] = rate(step, steps, lr) if told else lr
            batch = tuple(part.tensor_split(group.size)[group.rank] for part in problem.batch_of(seed, step))
            optimizer.zero_grad()
            problem.loss(model, batch).backward()
            before = group.stats.sent_bytes
            optimizer.step()
            rounds += group.stats.sent_bytes > before
            if step % (steps // CURVE) == 0 and step < steps:
                curve.append(_validate(problem, model, validation) if group.rank == 0 else 0.0)
        sent = group.stats.sent_bytes - at_first
        optimizer.state_dict()
        curve.append(_validate(problem, model, validation) if group.rank == 0 else 0.0)
        numel = sum(p.numel() for p in model.parameters())
        fp32 = round(2 * (group.size - 1) / group.size * 4 * numel * steps)
        seconds = time.process_time() - began
        return Run(
            problem.name, name, told, seed, lr, steps, curve, sent, fp32, rounds, optimizer.frozen_at, round(seconds, 1)
        )

    return run_in_turns(method.ranks, work)[0]


@torch.no_grad()
def _validate(problem: Problem, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> float:
    return float(problem.loss(model, batch))
