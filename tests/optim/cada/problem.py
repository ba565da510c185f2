"""A small net, a batch for each rank and step, and a closure: what the tests of CADA share."""

import torch

from tests.optim.constructing import sized
from tests.optim.muon.test_muon import network
from thinwire.optim import CADA

SIZES = (1, 2, 3, 4, 8)
SOME = {"max_age": 6, "horizon": 4, "threshold": 0.02}
"""Some ranks send in most steps, none in others."""


def made(net, group=None, lr=0.01, **more):
    return sized(CADA, bucket_elements=64)(net.parameters(), lr=lr, group=group, **{**SOME, **more})


def loss_of(net, step, rank):
    x = torch.randn(8, 7, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64)
    dtype = next(net.parameters()).dtype
    return (net(x.to(dtype)) - torch.sin(2 * x[:, :1] + 0.3 * rank).to(dtype)).square().mean()


def closure_of(net, step, rank, unit=1.0):
    def closure():
        loss = unit * loss_of(net, step, rank)
        loss.backward()
        return loss

    return closure


def train(net, optimizer, steps, rank):
    for _ in range(steps):
        optimizer.step(closure_of(net, optimizer.num_steps + 1, rank))


def sent_by_all(optimizer):
    """The mean of what ranks sent last. Collective."""
    mean_N = optimizer.vectors.sent_N.clone()
    optimizer.group.mean_(mean_N)
    return mean_N


__all__ = ["SIZES", "SOME", "closure_of", "loss_of", "made", "network", "sent_by_all", "train"]
