"""A model that FSDP2 shards over the processes of a box: sharded.py FOLDER STEPS EVERY; evaluated every EVERY steps.

Whoever comes to the end keeps its shards, what it has of the optimizer, and the losses of its steps.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from thinwire.optim import OneBitAdam
from thinwire.train import session

torch.set_num_threads(1)
folder, steps, every = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
inputs = torch.randn(96, 11, generator=torch.Generator().manual_seed(1))
samples = list(zip(inputs, inputs[:, :1] * 2 + inputs[:, 1:2], strict=True))
timeout_s, losses, gate, breaks = None, [], folder / "gate", folder / "breaks"


def loss_of(batch):
    return (model(batch[0]) - batch[1]).square().mean()


@torch.no_grad()
def evaluated(part):
    run.look()
    return float(loss_of(torch.utils.data.default_collate([part[i] for i in range(len(part))])))


with session() as run:
    box = init_device_mesh(run.device.type, (dist.get_world_size(),))
    torch.manual_seed(os.getpid())  # a newcomer is given what the others have
    model = nn.Sequential(nn.Linear(11, 24), nn.ReLU(), nn.Linear(24, 10), nn.LayerNorm(10), nn.Linear(10, 1))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=box)
    optimizer = OneBitAdam(model.parameters(), lr=1e-2, group=run.group, warmup=4, max_grad_norm=1.0, total_steps=steps)
    run.register(model=model, optimizer=optimizer)
    if every:
        run.evaluate_every(every, evaluated, data=samples[:24])
    for batch in run.batches(samples, global_batch=24, steps=steps):
        while gate.exists() and run.step_number >= int(gate.read_text() or 0):
            (folder / f"at-{run.step_number}").touch()
            time.sleep(0.02)
        if run.world_size > 1:
            timeout_s = run.group._timeout_s(run.group.process_group)
        loss = loss_of(batch)
        if dist.get_rank() == 1 and run.step_number >= 5 and breaks.exists():
            how, once = breaks.read_text(), breaks.rename(folder / f"broken-{os.getpid()}")
            if how == "raise":
                raise ValueError(f"what {once.name} is of")
            os._exit(0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.report(loss=loss)
        losses.append((run.step_number, float(loss.detach())))

shards = [p.to_local().detach().clone() for p in model.parameters()]
kept = {"rank": dist.get_rank(), "shards": shards, "vectors": optimizer.rank_state_dict()["vectors"], "losses": losses}
kept["timeout_s"] = timeout_s
torch.save(kept, folder / f"final-{dist.get_rank()}-{os.getpid()}")
