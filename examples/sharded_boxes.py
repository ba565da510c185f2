"""Two boxes of two ranks: FSDP shards the model inside of each, one bit a value crosses between them.

torchrun --nproc-per-node 4 examples/sharded_boxes.py        both boxes are this machine
torchrun --nnodes 2 --nproc-per-node 8 ... examples/sharded_boxes.py --box 8        a machine each

- mesh = init_device_mesh(...);  fully_shard(model, mesh=mesh);  optimizer = AdamW(model.parameters(), lr=2e-3)
+ fully_shard(model, mesh=mesh["shard"])
+ optimizer = OneBitAdam(model.parameters(), model=model, group=mesh["replicate"].get_group(), lr=2e-3, warmup=40)
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from thinwire.optim import OneBitAdam

STEPS = 120

arguments = argparse.ArgumentParser()
arguments.add_argument("--box", type=int, default=2, help="ranks of a box")
ranks_of_a_box = arguments.parse_args().box

on_gpus = torch.cuda.is_available()
if on_gpus:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl" if on_gpus else "gloo")
device, rank, size = "cuda" if on_gpus else "cpu", dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh(device, (size // ranks_of_a_box, ranks_of_a_box), mesh_dim_names=("replicate", "shard"))

torch.manual_seed(0)
layers = [torch.nn.Linear(64, 512), torch.nn.GELU(), torch.nn.Linear(512, 64)]
model = torch.nn.Sequential(*layers).to(device)
teacher = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 64)).to(device)
teacher.requires_grad_(False)
for layer in (model[0], model[2], model):
    fully_shard(layer, mesh=mesh["shard"])
group = mesh["replicate"].get_group()  # the ranks that hold the same shard, one of each box
optimizer = OneBitAdam(model.parameters(), model=model, group=group, lr=2e-3, warmup=40)

torch.manual_seed(1 + rank)  # every rank has data of its own
sent = [optimizer.stats()["sent_bytes"]]
for step in range(1, STEPS + 1):
    x = torch.randn(64, 64, device=device)
    optimizer.zero_grad()
    loss = (model(x) - teacher(x)).square().mean()
    loss.backward()  # FSDP averages gradients over the box; between boxes nothing is sent yet
    optimizer.step()
    sent.append(optimizer.stats()["sent_bytes"])
    if rank == 0 and (step == 1 or step % 40 == 0):
        phase = optimizer.stats()["phase"]
        print(f"step {step:3d}  next phase {phase:10s}  loss {loss.item():.4f}  sent between boxes {sent[-1]:,} bytes")

if rank == 0 and optimizer.frozen_at is not None:
    frozen = optimizer.frozen_at
    warmup, compressed = (sent[frozen] - sent[0]) / frozen, (sent[-1] - sent[frozen]) / (STEPS - frozen)
    print(f"bytes a step of this rank, between boxes: {warmup:,.0f} in warm-up, {compressed:,.0f} compressed")
dist.destroy_process_group()
