"""What a rank computes a step: a small GPT on random bytes, or gradients that are handed over ready-made.

For the exchange alone the gradients are made outside the clock, and autograd hands them out one parameter after the
other, from the last to the first, as a backward would: hooks, buckets and the adding into .grad are what they are in
training, for every method alike, DDP's too. What is timed is all between a gradient and an updated parameter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.wire.cases import Load
from thinwire.workers.recipes.gpt import Gpt
from thinwire.workers.recipes.gpt import build as build_gpt

SEED = 1


class Inputs:
    """Makes the arguments of a rank's model for each step; outside the clock.

    While `alike` is set every rank gets the same: what all ranks hold is then already its mean.
    """

    def __init__(self, load: Load, rank: int) -> None:
        self.alike = True
        self._load = load
        self._rank = rank
        self._step = 0
        self._gradients: list[Tensor] = []

    def next(self) -> tuple[Any, ...]:
        """Arguments for one call of the model."""
        self._step += 1
        generator = torch.Generator().manual_seed(1000 * self._step + (0 if self.alike else 1 + self._rank))
        if not self._load.computes:
            return (self._handed(generator),)
        shape = (self._load.sequences, self._load.recipe.context + 1)
        bytes_BT = torch.randint(0, 256, shape, generator=generator)
        return bytes_BT[:, :-1], bytes_BT[:, 1:]

    def _handed(self, generator: torch.Generator) -> list[list[Tensor]]:
        """A fresh copy of each gradient, held by nobody else, so that autograd may keep it as it keeps a computed one.

        Random numbers of 25 M elements take longer than a step, so they are drawn once; a factor makes steps differ.
        """
        if not self._gradients:
            # The same on every rank: the factor is what tells the ranks apart.
            fixed = torch.Generator().manual_seed(SEED)
            self._gradients = [1e-3 * torch.randn(shape, generator=fixed) for shape in shapes(self._load)]
        factor = float(torch.randn((), generator=generator))
        return [[factor * gradient] for gradient in self._gradients]


class Handed(nn.Module):
    """Parameters whose gradients are given: backward hands them out from the last parameter to the first."""

    def __init__(self, load: Load) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(SEED)
        self.values = nn.ParameterList(0.02 * torch.randn(shape, generator=generator) for shape in shapes(load))

    def forward(self, gradients: list[list[Tensor]]) -> Tensor:
        """A scalar that depends on every parameter. gradients: one box a parameter, emptied by backward."""
        x = torch.zeros((), requires_grad=True)
        for value, box in zip(self.values, gradients, strict=True):
            x = _HandOver.apply(x, value, box)  # type: ignore[no-untyped-call]
        return x


class _HandOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor, box: list[Tensor]) -> Tensor:
        ctx.box = box
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, Tensor, None]:
        return dx, ctx.box.pop(), None


def build(load: Load) -> nn.Module:
    """The model of a load, with the same values on every rank."""
    return build_gpt(load.recipe, SEED) if load.computes else Handed(load)


def shapes(load: Load) -> list[torch.Size]:
    """Shapes of the parameters of its GPT, in the order in which the model uses them, more or less."""
    with torch.device("meta"):
        return [parameter.shape for parameter in Gpt(load.recipe).parameters()]


def num_parameters(load: Load) -> int:
    """Values that a step must average."""
    return sum(shape.numel() for shape in shapes(load))
