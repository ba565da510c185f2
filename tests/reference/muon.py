"""Muon written out: each worker's momentum, the rule of each tensor, the exchange of updates, and the descent.

    worker i   m_i <- b m_i + (1 - b) g_i;  w = b m_i + (1 - b) g_i (Nesterov);  u_i = rule(w)
    all        U = exchange of u_i;  x <- x - lr (U + decay x)

Dense: one worker, whose gradient is the mean. Source: Jordan et al. 2024; the scale 0.2 sqrt(max(rows, columns)) of Liu
et al. 2025, eq. 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

from tests.reference.exchange import Exchange, Vectors, laid_end_to_end, mean, split_like


@dataclass(frozen=True, slots=True)
class MuonHyper:
    """Of one tensor."""

    lr: float
    momentum: float
    weight_decay: float
    nesterov: bool
    rule: str


def newton_schulz(m: Tensor) -> Tensor:
    """Five steps of x <- a x + b (x x^T) x + c (x x^T)^2 x, from m over its Frobenius norm."""
    norm = m.square().sum().sqrt()
    x = m / norm if norm > 0 else m
    for _ in range(5):
        s = x @ x.T
        x = 3.4445 * x - 4.7750 * s @ x + 2.0315 * s @ s @ x
    return x


def update(rule: str, m: Tensor) -> Tensor:
    """u of a tensor's momentum."""
    if rule == "matrix":
        x = m.reshape(len(m), -1)
        return (0.2 * sqrt(max(x.shape)) * newton_schulz(x)).reshape(m.shape)
    if rule == "vector":
        return 0.2 * torch.sign(m)
    raise AssertionError(rule)


class ReferenceMuon:
    """exchange: None: dense."""

    def __init__(self, x: Sequence[Tensor], size: int, hyper: Sequence[MuonHyper], exchange: Exchange | None) -> None:
        self.x = [one.clone() for one in x]
        self.m = [[torch.zeros_like(one) for one in x] for _ in range(1 if exchange is None else size)]
        self.hyper, self.exchange = hyper, exchange

    def step(self, gradients: Sequence[Vectors]) -> None:
        """One step."""
        if self.exchange is None:
            u = self._updates(self.m[0], [mean(list(of_all)) for of_all in zip(*gradients, strict=True)])
        else:
            own = [self._updates(m, g) for m, g in zip(self.m, gradients, strict=True)]
            u = split_like(self.exchange([laid_end_to_end(one) for one in own], "update"), self.x)
        self.x = [x - h.lr * (du + h.weight_decay * x) for x, du, h in zip(self.x, u, self.hyper, strict=True)]

    def _updates(self, m: Vectors, g: Vectors) -> Vectors:
        found = []
        for at, h in enumerate(self.hyper):
            m[at] = h.momentum * m[at] + (1 - h.momentum) * g[at]
            w = h.momentum * m[at] + (1 - h.momentum) * g[at] if h.nesterov else m[at]
            found.append(update(h.rule, w))
        return found
