"""CADA as the paper's Algorithm 1 has it, in float64, with every rank's values in one place.  [Chen et al. 2020]

The threshold is that of its authors' code, in their terms: gradients divided by n, and lr G for a move.

Written for tests; nothing of the product is imported.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Gradient = Callable[[Tensor, int, int], Tensor]
"""gradient(x, step, rank): of the rank's batch of this step, at x."""


class ReferenceCada:
    """x: float64[N]. sent: of each rank, the gradient that the server holds. uploads: of each step, who sent."""

    def __init__(
        self,
        x: Tensor,
        ranks: int,
        gradient: Gradient,
        *,
        rule: int,
        lr: float,
        max_age: int,
        horizon: int,
        threshold: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        self.x, self.ranks, self.gradient = x.clone(), ranks, gradient
        self.rule, self.lr, self.max_age, self.horizon, self.threshold = rule, lr, max_age, horizon, threshold
        self.betas, self.eps, self.weight_decay = betas, eps, weight_decay
        self.m, self.v, self.w = (torch.zeros_like(x) for _ in range(3))
        self.sent: list[Tensor] = [torch.zeros_like(x) for _ in range(ranks)]
        self.age = [max_age] * ranks
        self.older = x.clone()  # rule 1: of all
        self.change = [torch.zeros_like(x) for _ in range(ranks)]  # rule 1: at each rank's last upload
        self.at = [x.clone() for _ in range(ranks)]  # rule 2: x at each rank's last upload
        self.moved: list[float] = []  # |lr G|^2 of each step
        self.steps = 0
        self.uploads: list[list[int]] = []

    def step(self) -> None:
        self.steps += 1
        allowed = self.threshold / (self.ranks**2 * self.lr**2 * self.horizon) * sum(self.moved[-self.horizon :])
        if self.max_age and (self.steps - 1) % self.max_age == 0:
            self.older = self.x.clone()
        givers = []
        for rank in range(self.ranks):
            g = self.gradient(self.x, self.steps, rank)
            if self.rule == 1:
                change = g - self.gradient(self.older, self.steps, rank)
                d = change - self.change[rank]
            else:
                change = d = g - self.gradient(self.at[rank], self.steps, rank)
            if float((d / self.ranks).square().sum()) >= allowed or self.age[rank] >= self.max_age:
                givers.append(rank)
                self.sent[rank], self.change[rank], self.at[rank], self.age[rank] = g, change, self.x.clone(), 0
            self.age[rank] += 1
        self.uploads.append(givers)
        mean = sum(self.sent) / self.ranks
        beta1, beta2 = self.betas
        self.m = beta1 * self.m + (1 - beta1) * mean
        self.v = beta2 * self.v + (1 - beta2) * mean**2
        self.w = torch.maximum(self.w, self.v)
        root = (self.w / (1 - beta2**self.steps)).sqrt() + self.eps
        move = self.lr * (self.m / (1 - beta1**self.steps) / root + self.weight_decay * self.x)
        self.x = self.x - move
        self.moved.append(float((self.lr * mean).square().sum()))
