"""What the reference algorithms share: hyperparameters, parameters with their moments, and means over workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.reference.exchange import Exchange, Floor, Vectors, laid_end_to_end, mean, split_like


@dataclass(slots=True)
class Hyper:
    """Hyperparameters under torch.optim's names. Change `lr` between steps to follow a schedule."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0


class Moments:
    """x, m, v and the step count t of a model whose workers agree; hyper: one for all tensors, or one a tensor."""

    def __init__(self, x: Sequence[Tensor], hyper: Hyper | Sequence[Hyper], bias_correction: bool) -> None:
        self.x, self.m, self.v = copies(x), zeros(x), zeros(x)
        self.hyper = hypers(hyper, x)
        self.bias_correction = bias_correction
        self.t = 0

    def accumulate(self, g: Vectors) -> None:
        """m <- b1 m + (1 - b1) g;  v <- b2 v + (1 - b2) g^2."""
        for at, h in enumerate(self.hyper):
            b1, b2 = h.betas
            self.m[at] = b1 * self.m[at] + (1 - b1) * g[at]
            self.v[at] = b2 * self.v[at] + (1 - b2) * g[at] ** 2

    def corrected(self, at: int) -> tuple[Tensor, Tensor]:
        """m / (1 - b1^t) and v / (1 - b2^t) where bias is corrected, else m and v."""
        if not self.bias_correction:
            return self.m[at], self.v[at]
        b1, b2 = self.hyper[at].betas
        return self.m[at] / (1 - b1**self.t), self.v[at] / (1 - b2**self.t)

    def adam_descend(self) -> None:
        """x <- x - lr (m_hat / (sqrt(v_hat) + eps) + decay x)."""
        for at, h in enumerate(self.hyper):
            m, v = self.corrected(at)
            self.x[at] = self.x[at] - h.lr * (m / (v.sqrt() + h.eps) + h.weight_decay * self.x[at])

    def exchange_momentum(self, gradients: Sequence[Vectors], exchange: Exchange, scale: Sequence[float]) -> None:
        """m <- exchange of z_i = b1 m + (1 - b1) g_i, laid end to end, each tensor scaled meanwhile."""
        zs = []
        for g in gradients:
            b1s = [h.betas[0] for h in self.hyper]
            z = [k * (b1 * m + (1 - b1) * g_l) for k, b1, m, g_l in zip(scale, b1s, self.m, g, strict=True)]
            zs.append(laid_end_to_end(z))
        out = split_like(exchange(zs, "momentum"), self.x)
        self.m = [m / k for m, k in zip(out, scale, strict=True)]

    def freeze_variance(self, floor: Floor | None) -> list[Tensor]:
        """v <- floor(v_hat), used as it is from here on, like m. Returns which elements were raised."""
        kept = [self.corrected(at)[1] for at in range(len(self.v))]
        self.v = floor(kept) if floor else kept
        self.bias_correction = False
        return [now > before for now, before in zip(self.v, kept, strict=True)]


def mean_gradient(gradients: Sequence[Vectors]) -> Vectors:
    """The mean over workers, tensor by tensor."""
    return [mean(tensors) for tensors in zip(*gradients, strict=True)]


def copies(tensors: Sequence[Tensor]) -> Vectors:
    """Copies that no graph knows."""
    return [tensor.detach().clone() for tensor in tensors]


def zeros(tensors: Sequence[Tensor]) -> Vectors:
    """Zeros in the same shapes."""
    return [torch.zeros_like(tensor) for tensor in tensors]


def hypers(hyper: Hyper | Sequence[Hyper], x: Sequence[Tensor]) -> list[Hyper]:
    """One a tensor; the same object for all where one is given."""
    return [hyper] * len(x) if isinstance(hyper, Hyper) else list(hyper)
