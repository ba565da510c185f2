"""What is left in a loop that was moved over is refused or said once, with the line to change; nothing else is."""

import json
import logging

import pytest
import torch

from tests.comm.gloo_ranks import said, start
from tests.covering import every_value
from tests.optim.constructing import construct
from tests.optim.seeded import seeded
from thinwire.comm import run_threads
from thinwire.optim import SGD, Adam, OneBitAdam, ZeroOneAdam


def network():
    return seeded(0, lambda: torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 2)))


def inputs(step, rank):
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def train(net, optimizer, rank, steps=(1, 2)):
    for step in steps:
        optimizer.zero_grad()
        net(inputs(step, rank)).square().mean().backward()
        optimizer.step()


@every_value({"made": [Adam, OneBitAdam, ZeroOneAdam], "overlap": [False, True]})
def test_gradients_that_are_equal_before_the_exchange_are_said_once(made, overlap, caplog):
    def work(group, told):
        net = network()
        train(net, made(net.parameters(), group=group, overlap=overlap), group.rank * told, range(1, 4))

    run_threads(3, lambda group: work(group, 1))
    assert "gradients_equal" not in caplog.text
    run_threads(3, lambda group: work(group, 0))
    assert caplog.text.count("gradients_equal") == 1
    assert "DistributedSampler" in caplog.text
    caplog.clear()
    run_threads(1, lambda group: work(group, 0))
    assert "gradients_equal" not in caplog.text


def test_after_a_first_step_that_was_left_out_the_next_is_looked_at_as_it_is_laid_out_then(caplog):
    def work(group):
        net = network()
        optimizer = Adam(net.parameters(), group=group, non_finite="skip")
        net(inputs(1, 0) * torch.nan).square().mean().backward()
        optimizer.step()
        net[2].requires_grad_(False)
        train(net, optimizer, 0)
        return optimizer.num_steps

    assert run_threads(2, work) == [2, 2]
    assert caplog.text.count("gradients_equal") == 1


CLEARED = {
    "optimizer": lambda net, optimizer: optimizer.zero_grad(),
    "model": lambda net, optimizer: net.zero_grad(),
    "in place": lambda net, optimizer: net.zero_grad(set_to_none=False),
    "no": lambda net, optimizer: None,
}


@pytest.mark.parametrize("by", CLEARED)
def test_gradients_from_before_the_optimizer_are_said_where_backward_adds_to_them(by, caplog):
    net = network()
    net(inputs(0, 0)).sum().backward()
    optimizer = Adam(net.parameters())
    CLEARED[by](net, optimizer)
    for _ in range(2):
        net(inputs(1, 0)).sum().backward()
    optimizer.step()
    assert caplog.text.count("gradients_left") == (by == "no")


def test_a_step_with_gradients_from_before_the_optimizer_says_nothing(caplog):
    net = network()
    net(inputs(0, 0)).sum().backward()
    Adam(net.parameters()).step()
    assert not caplog.records


LEFT_IN = """
import json, logging
from tests.optim.engine.test_first_step import network, inputs, train
from thinwire.optim import Adam, OneBitAdam
from torch.nn.parallel import DistributedDataParallel as DDP
join()
lines = []
class Kept(logging.Handler):
    def emit(self, record):
        lines.append(record.getMessage())
logging.getLogger("thinwire").addHandler(Kept())
found = {}

def told(name):
    found[name] = [line.split(":")[0] for line in lines]
    lines.clear()

def refused(call):
    try:
        call()
    except (ValueError, RuntimeError) as error:
        return str(error)

# Nothing is wrong
net, copy = network(), network()
optimizer = Adam(net.parameters())
optimizer = OneBitAdam(net.parameters())  # remade on purpose
other = DDP(copy)
adamw = torch.optim.AdamW(copy.parameters())  # another model
average = torch.optim.swa_utils.AveragedModel(net)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=10)
class Shows(torch.optim.Optimizer):  # as trainers wrap
    def __init__(self, inner):
        self.inner = inner
    @property
    def param_groups(self):
        return self.inner.param_groups
shows = Shows(optimizer)
train(net, optimizer, rank)
told("nothing")

# DDP left in, then kept with its gradients local
net = network()
wrapped = DDP(net)
train(wrapped, OneBitAdam(wrapped.parameters()), rank)
told("ddp")
found["ddp as model"] = refused(lambda: OneBitAdam(wrapped.parameters(), model=torch.nn.ModuleList([wrapped])))
net = network()
wrapped = DDP(net)
wrapped.thinwire_gradients = "local"
Adam(net.parameters(), model=wrapped)
train(net, Adam(net.parameters()), rank)
told("ddp, local")

# Averaged by hand
net = network()
optimizer = Adam(net.parameters())
net(inputs(1, rank)).sum().backward()
for p in net.parameters():
    dist.all_reduce(p.grad)
    p.grad /= size
optimizer.step()
told("averaged")

# Sharded
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
net = network()
fully_shard(net, mesh=init_device_mesh("cpu", (size,)))
found["fsdp"] = refused(lambda: Adam(net.parameters()))
found["fsdp as model"] = refused(lambda: Adam(network().parameters(), model=net))

from torch.distributed.fsdp import FullyShardedDataParallel
def wrapped(net, **settings):
    return FullyShardedDataParallel(net, device_id=torch.device("cpu"), **settings)
for kept in (True, False):
    found[f"fsdp1 {kept}"] = refused(lambda: Adam(wrapped(network(), use_orig_params=kept).parameters()))
found["fsdp1 as model"] = refused(lambda: Adam(network().parameters(), model=wrapped(network())))
later = {"fsdp1": wrapped, "fsdp": lambda net: fully_shard(net, mesh=init_device_mesh("cpu", (size,)))}
for name, shard in later.items():
    net = network()
    optimizer = Adam(net.parameters())
    net = shard(net)
    found[f"{name}, later"] = refused(lambda: train(net, optimizer, rank))

# What only its marks tell: DeepSpeed is not installed
class Engine(torch.nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module
Engine.__name__, Engine.__module__ = "DeepSpeedEngine", "deepspeed.runtime.engine"
net = network()
found["engine"] = refused(lambda: Adam(net.parameters(), model=Engine(net)))
net[0].weight.ds_id = 0
net[0].weight.data = torch.empty(0)  # as stage 3 leaves it
found["stage 3"] = refused(lambda: Adam(net.parameters()))
say("found", json.dumps(found))
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_what_others_do_to_the_parameters_is_said_or_refused_and_nothing_else(tmp_path):
    ranks = start(LEFT_IN, 2, tmp_path, timeout_s=60)
    assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    found, other = (json.loads(said(tmp_path, rank, "found")) for rank in (0, 1))
    assert found["nothing"] == found["ddp, local"] == []
    assert found["ddp"] == ["gradients_equal"]
    assert found["averaged"] == ["gradients_equal"]
    assert "model.0 is a DistributedDataParallel" in found["ddp as model"]
    assert "keep_gradients_local(model)" in found["ddp as model"]
    assert "ranks [0, 1] of the world have a shard of it each" in found["fsdp"]
    assert "fully_shard(model, mesh=" in found["fsdp"]
    assert "none of the parameters that were given" in found["fsdp as model"]
    assert "FullyShardedDataParallel or ZeRO has cut" in found["fsdp1 True"]
    assert "FullyShardedDataParallel or ZeRO has cut" in found["fsdp1 False"]
    assert "model = FullyShardedDataParallel" in found["fsdp1 as model"]
    assert "make the optimizer" in found["fsdp1, later"]
    assert "make the optimizer" in found["fsdp, later"]
    assert "model = DeepSpeedEngine" in found["engine"]
    assert "deepspeed.zero.Init()" in found["stage 3"]
    assert all(not lines for lines in other.values() if isinstance(lines, list))  # rank 0 says it for all


@pytest.mark.slow  # torch.compile is slow to import
def test_a_model_compiled_before_the_optimizer_was_made_trains_as_any():
    ends = []
    for compiled in (True, False):
        net = network()
        model = torch.compile(net, backend="aot_eager") if compiled else net
        model(inputs(0, 0)).sum().backward()
        train(model, Adam(model.parameters(), lr=1e-2, model=model), 0, range(1, 4))
        ends.append(list(net.parameters()))
    for a, b in zip(*ends, strict=True):
        torch.testing.assert_close(a, b)


def test_what_a_first_step_says_is_a_warning_of_this_package(caplog):
    def work(group):
        net = network()
        train(net, Adam(net.parameters(), group=group), 0)

    run_threads(2, work)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.name.startswith("thinwire.")


@pytest.mark.parametrize("wire", ["int8", "bf16"])
def test_after_a_first_step_that_was_left_out_overlap_does_not_take_means_for_gradients(wire, caplog):
    """What backward has sent by then lies in g as the mean of all ranks already."""

    def work(group):
        params = [torch.nn.Parameter(torch.ones(64)) for _ in range(3)]
        options = {"full_exchange": wire, "overlap": True, "non_finite": "skip", "bucket_elements": 64}
        optimizer = construct(SGD, params, lr=1e-2, group=group, **options)
        last = optimizer.space.tensors[0].param  # its bucket is sent last, and no rank has anything for it
        for step in range(3):
            optimizer.zero_grad()
            random = torch.Generator().manual_seed(100 * step + group.rank)
            own = sum((p * torch.randn(64, generator=random) * (p is not last)).sum() for p in params)
            (own * (torch.nan if step == 0 else 1)).backward()
            optimizer.step()
        return optimizer.steps_skipped

    assert run_threads(2, work) == [1, 1]
    assert "gradients_equal" not in caplog.text
