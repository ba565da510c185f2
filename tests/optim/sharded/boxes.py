"""Boxes of real gloo ranks on CPUs, with a small model that FSDP shards inside of each: for tests that run on them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

SETUP = """
import json
from torch import nn
from tests.optim.sharded.boxes import Net, data, every, full, grid, refused, sharded, train
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from thinwire.comm import NonFiniteInput, SoloGroup
from thinwire.optim import SGD, Adam, Lamb, Muon, OneBitAdam, OneBitLamb, OneBitMuon, OneBitSGD, SparseAdam, ZeroOneAdam
join()
found = {}
"""
WIDTH = 11


class Net(nn.Sequential):
    """Rows that no number of ranks divides, and a last layer of one: a rank may have nothing of it."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        hidden = [nn.Linear(WIDTH, 24), nn.ReLU(), nn.Linear(24, 10), nn.LayerNorm(10), nn.Linear(10, 1)]
        super().__init__(*(layer.to(dtype) for layer in hidden))


def grid(ranks_of_a_box: int) -> DeviceMesh:
    """All ranks as boxes of so many."""
    size = dist.get_world_size()
    shape = (size // ranks_of_a_box, ranks_of_a_box)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def sharded(mesh: DeviceMesh, model: nn.Module | None = None, **options: Any) -> nn.Module:
    """The model, layer by layer and then the rest, as FSDP's users have it."""
    model = Net() if model is None else model
    for layer in model.children():
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def data(step: int, rank: int | None = None) -> tuple[Tensor, Tensor]:
    """A batch that each rank of the world has for itself."""
    rank = dist.get_rank() if rank is None else rank
    x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(1000 * step + rank))
    return x, x[:, :1] * 2 + x[:, 1:2]


def train(model: nn.Module, optimizer: Any, steps: range, batches: int = 1, clip: float | None = None) -> list[float]:
    """Train; the losses, averaged over the world."""
    losses = []
    for step in steps:
        for batch in range(batches):
            x, y = data(step * batches + batch)
            loss = (model(x).float() - y).square().mean()
            loss.backward()
            losses.append(loss.detach())
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    every = torch.stack(losses)
    dist.all_reduce(every)
    return (every / dist.get_world_size()).tolist()


def full(model: nn.Module) -> Tensor:
    """All parameters, whole, in one vector."""
    found = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return torch.cat([p.detach().reshape(-1).float() for p in found])


def every(x: Tensor, group: Any = None) -> list[Tensor]:
    """That of each rank."""
    found = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, x, group=group)
    return found


def refused(call: Any) -> str:
    """What it raises, with its kind."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - whatever it is, a test looks at it
        return f"{type(error).__name__}: {error}"
    return "nothing"
