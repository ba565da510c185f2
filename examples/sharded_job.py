"""A job whose workers are boxes: FSDP2 shards the model over the processes of each, one bit crosses between them.

Submit it with `thinwire submit examples/sharded-job.yaml --watch`, in which workers.per_box says how many processes a
box has. Kill one of them: its box is gone, the others go on in a moment, and a new box joins them.
"""

import argparse

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from thinwire.optim import OneBitAdam
from thinwire.train import session

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
STEPS = parser.parse_args().steps


class Teacher(torch.utils.data.Dataset):
    """What a small net says of random numbers. Sample i follows from i, whoever draws it."""

    def __init__(self) -> None:
        self._matrix = torch.randn(32, 8, generator=torch.Generator().manual_seed(0)) / 32**0.5

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(32, generator=torch.Generator().manual_seed(1 + i))
        return x, torch.tanh(x @ self._matrix)


with session() as run:
    box = init_device_mesh(run.device.type, (dist.get_world_size(),))  # the default group of a process is its box
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.GELU(), torch.nn.Linear(256, 8)).to(run.device)
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=box)
    optimizer = OneBitAdam(model.parameters(), lr=2e-3, warmup=20, total_steps=STEPS, group=run.group)
    run.register(model=model, optimizer=optimizer)
    for x, y in run.batches(Teacher(), global_batch=48, steps=STEPS):
        loss = (model(x.to(run.device)) - y.to(run.device)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.report(loss=loss)
