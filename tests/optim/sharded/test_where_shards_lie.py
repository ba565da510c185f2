"""Shards lie in the flat vector, and FSDP gathers them from there; where something else looks at one it stays."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from thinwire.comm import SoloGroup
from thinwire.optim import OneBitAdam
from thinwire.optim.engine.local import local

pytestmark = pytest.mark.usefixtures("one_process")


def net(*, sharded):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    return fully_shard(model, mesh=init_device_mesh("cpu", (1,))) if sharded else model


def made(model):
    return OneBitAdam(model.parameters(), lr=1e-2, group=SoloGroup(), warmup=2)


def train(model, optimizer, steps=range(5)):
    for step in steps:
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(step))
        (model(x) - x[:, :1]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def values(model):
    return torch.cat([local(param.detach()).reshape(-1) for param in model.parameters()])


def lie_flat(model, optimizer):
    first = optimizer.space.p_N.data_ptr()
    return [first <= local(p).data_ptr() < first + optimizer.space.p_N.nbytes for p in model.parameters()]


def trained():
    model = net(sharded=False)
    train(model, made(model))
    return values(model)


def test_shards_lie_in_the_flat_vector_and_fsdp_gathers_what_was_stepped():
    model = net(sharded=True)
    optimizer = made(model)
    train(model, optimizer)
    assert lie_flat(model, optimizer) == [True] * 4
    assert "master" not in optimizer.stats()["bytes_per_parameter"]
    assert torch.equal(values(model), trained())
    again = made(model)  # takes them over
    assert lie_flat(model, again) == [True] * 4


def test_a_shard_stays_while_something_else_lies_in_its_memory_and_moves_when_it_is_gone():
    model = net(sharded=True)
    kept = model.state_dict()
    optimizer = made(model)
    train(model, optimizer)
    assert lie_flat(model, optimizer) == [False] * 4
    assert optimizer.stats()["bytes_per_parameter"]["master"] == 4
    assert torch.equal(torch.cat([local(x).reshape(-1) for x in kept.values()]), values(model))
    assert torch.equal(values(model), trained())
    del kept
    train(model, optimizer, range(5, 7))
    assert lie_flat(model, optimizer) == [True] * 4


def test_a_shard_that_is_loaded_or_frozen_leaves_the_flat_vector_as_a_whole_tensor_does():
    model, other = net(sharded=True), net(sharded=False)
    optimizers = [made(model), made(other)]
    loaded = {name: torch.full_like(local(value), 0.25) for name, value in model.state_dict().items()}
    for one, optimizer in zip((model, other), optimizers, strict=True):
        train(one, optimizer)
        with torch.no_grad():
            for name, param in one.named_parameters():
                local(param).copy_(loaded[name])
        train(one, optimizer, range(5, 7))
        next(one.parameters()).requires_grad_(False)
        train(one, optimizer, range(7, 9))
    assert torch.equal(values(model), values(other))
    assert not lie_flat(model, optimizers[0])[0]


def test_what_a_shard_was_cut_from_sees_every_step():
    """As tensor parallelism by hand has it, and load_state_dict(assign=True) of what is kept."""
    whole = torch.ones(4, 6)
    param = nn.Parameter(DTensor.from_local(whole[:2], init_device_mesh("cpu", (1,)), [Shard(0)]))
    optimizer = OneBitAdam([param], lr=1e-2, group=SoloGroup(), warmup=2)
    model = net(sharded=True)
    model.load_state_dict(kept := {name: x.clone() for name, x in model.state_dict().items()}, assign=True)
    assigned = made(model)
    for step in range(3):
        (param.to_local() * (step + 1)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    train(model, assigned)
    assert torch.equal(whole[:2], local(param.detach()))
    assert not (whole[:2] == 1).any()
    assert (whole[2:] == 1).all()
    assert torch.equal(torch.cat([local(x).reshape(-1) for x in kept.values()]), values(model))
