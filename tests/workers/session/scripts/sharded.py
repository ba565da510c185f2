"""A model that FSDP2 shards over the processes of a box: sharded.py FOLDER STEPS EVERY; evaluated every EVERY steps.

Whoever comes to the end keeps its shards, what it has of the optimizer, and the losses of its steps. FOLDER/muon: by
1-bit Muon. FOLDER/dies: a line each of a box, a process of it and a moment at which that kills itself, once three
boxes have made DIES_AFTER steps.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from thinwire.optim import OneBitAdam, OneBitMuon, muon
from thinwire.optim.engine.local import local
from thinwire.train import session

DIES_AFTER = 6

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


def die(*_, **__):
    (folder / f"died-{os.getpid()}").touch()
    os.kill(os.getpid(), signal.SIGKILL)


def gathers_once(here, param, gather=muon.whole):
    muon.whole = die
    return gather(here, param)


def die_at(moment):
    match moment:
        case "backward":  # behind layers whose gradients FSDP has reduced
            model[2].register_full_backward_pre_hook(die)
        case "gather":  # of the second matrix, which the others of its box wait for
            muon.whole = gathers_once
        case "exchange":  # all of it is sent, and may have been served
            optimizer.reduce.finish = die
        case "save":  # as momenta become their mean
            optimizer.reduce.means("fp32").finish = die
        case "regroup":  # after another death
            optimizer.synced_vectors = die


with session() as run:
    process = dist.get_rank() if dist.is_initialized() else 0  # workers.per_box = 1: no box, and no shards
    torch.manual_seed(os.getpid())  # a newcomer is given what the others have
    model = nn.Sequential(nn.Linear(11, 24), nn.ReLU(), nn.Linear(24, 10), nn.LayerNorm(10), nn.Linear(10, 1))
    if dist.is_initialized():
        box = init_device_mesh(run.device.type, (dist.get_world_size(),))
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=box)
    kind, more = (OneBitMuon, {}) if (folder / "muon").exists() else (OneBitAdam, {"warmup": 4, "total_steps": steps})
    optimizer = kind(model.parameters(), lr=1e-2, group=run.group, max_grad_norm=1.0, **more)
    run.register(model=model, optimizer=optimizer)
    if every:
        run.evaluate_every(every, evaluated, data=samples[:24])
    for batch in run.batches(samples, global_batch=24, steps=steps):
        while gate.exists() and run.step_number >= int(gate.read_text() or 0):
            (folder / f"at-{run.step_number}").touch()
            time.sleep(0.02)
        if run.world_size == 3 and run.step_number == DIES_AFTER and (folder / "dies").exists():
            for line in (folder / "dies").read_text().splitlines():
                *who, moment = line.split()
                if who == [str(run.rank), str(process)]:
                    die_at(moment)
        if run.world_size > 1:
            timeout_s = run.group._timeout_s(run.group.process_group)
        loss = loss_of(batch)
        if process == 1 and run.step_number >= 5 and breaks.exists():
            how, once = breaks.read_text(), breaks.rename(folder / f"broken-{os.getpid()}")
            if how == "raise":
                raise ValueError(f"what {once.name} is of")
            os._exit(0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.report(loss=loss)
        losses.append((run.step_number, float(loss.detach())))

shards = [local(p.detach()).clone() for p in model.parameters()]
kept = {"rank": process, "shards": shards, "vectors": optimizer.rank_state_dict()["vectors"], "losses": losses}
kept["timeout_s"] = timeout_s
torch.save(kept, folder / f"final-{process}-{os.getpid()}")
