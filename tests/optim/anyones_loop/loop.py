"""The loop that anyone writes, over a small model: what a case may change is an attribute. And AdamW as the measure.

The measure is torch's optimizer on mean gradients, formed by hand: what DistributedDataParallel gives it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.optim.reference.written_out import make
from thinwire.comm.protocol import Group

WARMUP, BLOCK, BUCKET, BATCH = 4, 64, 512, 16
RATES = {"sgd": 0.03, "onebit_sgd": 0.03, "lamb": 0.02, "onebit_lamb": 0.04, "zero_one_adam": 0.02, "onebit_muon": 0.04}
ADAM = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.05}


class Net(nn.Module):
    """An image of 2 x 3 x 3 in, three numbers out; two layers of one shape, which can be tied."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.first = nn.Linear(36, 16)
        self.second = nn.Linear(16, 16)
        self.third = nn.Linear(16, 16)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, 2, 3, 3] -> [batch, 3]"""
        x = torch.tanh(self.first(torch.tanh(self.conv(x)).flatten(1)))
        return self.head(self.middle(x))

    def middle(self, x: Tensor) -> Tensor:
        """[batch, 16] -> [batch, 16]: what a case may run in its own way."""
        return x + torch.tanh(self.third(torch.tanh(self.second(x))))


@lru_cache
def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Another one for each step and rank; what is to be learnt of it is the same for all."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(BATCH, 2, 3, 3, generator=generator)
    teacher = torch.randn(18, 3, generator=torch.Generator().manual_seed(7)) / 3
    return x, torch.sin(x.flatten(1) @ teacher)


class Loop:
    """One rank's training. net: the model that the user holds, and at last looks at. model: what is called, mostly net.

    between: called one after another between backward and step. iterate: one step. at_end: called after the last one.
    """

    def __init__(self, net: nn.Module, group: Group, make_optimizer: Callable[[Iterable[Any]], Any]) -> None:
        self.net = self.model = net
        self.rank = group.rank
        self.step = 0
        self.optimizer: Any = None
        self.iterate: Callable[[Loop], None] = plain
        self.between: list[Callable[[], None]] = []
        self.at_end: list[Callable[[], None]] = []
        self._make = make_optimizer

    def make_optimizer(self, params: Iterable[Any] | None = None) -> None:
        """A new one over these parameters, or over the model's."""
        self.optimizer = self._make(self.net.parameters() if params is None else params)

    def inputs(self) -> tuple[Tensor, Tensor]:
        """This step's, in the precision of the model."""
        x, y = batch(self.step, self.rank)
        like = next(self.net.parameters())
        return x.to(like), y.to(like)

    def loss(self) -> Tensor:
        """Of this step's batch."""
        x, y = self.inputs()
        return F.mse_loss(self.model(x), y)

    def train(self, steps: int) -> None:
        """So many steps more."""
        for _ in range(steps):
            self.step += 1
            self.iterate(self)

    def evaluate(self) -> float:
        """The loss of the model that the user holds, on what no rank has seen."""
        x, y = (torch.cat(both) for both in zip(*(batch(-1 - k, 0) for k in range(8)), strict=True))
        first = next(self.net.parameters())
        with torch.no_grad():
            return float(F.mse_loss(self.net(x.to(first.dtype).to(first.device)).cpu().float(), y))


def plain(loop: Loop) -> None:
    """One step, as in every tutorial."""
    loop.optimizer.zero_grad()
    loop.loss().backward()
    for act in loop.between:
        act()
    loop.optimizer.step()


class _OnMeans:
    """Before torch's optimizer of the next class: gradients <- their means over the ranks, where there are any.

    none_is_zero: whether a tensor without a gradient takes a step with one of zero. Sparse ones become dense.
    """

    group: Group
    none_is_zero = False

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """As torch's."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            params = [p for group in self.param_groups for p in group["params"] if p.requires_grad]  # type: ignore[attr-defined]
            if self.none_is_zero:
                for param in (p for p in params if p.grad is None):
                    param.grad = torch.zeros_like(param)
            params = [p for p in params if p.grad is not None]
            mean = torch.cat([p.grad.to_dense().reshape(-1) for p in params])
            self.group.mean_(mean)
            for param, part in zip(params, mean.split([p.numel() for p in params]), strict=True):
                param.grad = part.view(param.shape)
        super().step()  # type: ignore[misc]
        return loss


class MeanAdamW(_OnMeans, torch.optim.AdamW):
    """torch.optim.AdamW under data parallelism."""


class MeanSGD(_OnMeans, torch.optim.SGD):
    """torch.optim.SGD under data parallelism."""


def ours(name: str, params: Iterable[Any], group: Group, *, overlap: bool) -> Any:
    """An optimizer of this package: a few steps of warm-up, several blocks and several buckets."""
    param_group = {"params": list(params), **ADAM, "lr": RATES.get(name, ADAM["lr"])}
    return make(name, [param_group], group, warmup=WARMUP, block=BLOCK, overlap=overlap, bucket_elements=BUCKET)


def theirs(name: str, params: Iterable[Any], group: Group, *, none_is_zero: bool) -> Any:
    """What the optimizer of this name is held against."""
    optimizer: Any
    if name.endswith("sgd"):
        optimizer = MeanSGD(params, lr=RATES["sgd"], momentum=0.9, weight_decay=ADAM["weight_decay"])
    else:
        optimizer = MeanAdamW(params, **ADAM)
    optimizer.group, optimizer.none_is_zero = group, none_is_zero
    return optimizer
