"""A plain loop whose result does not depend on who computed what: exact.py FOLDER STEPS LOADERS."""

import os
import sys
from pathlib import Path

import torch

from thinwire.optim import Adam
from thinwire.train import session

FOLDER, STEPS, WIDTH = Path(sys.argv[1]), int(sys.argv[2]), 6


class Exact(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.values = torch.nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.seen += 1
        return (self.values * x).sum(dim=1).mean()


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, i):
        return torch.randint(-9, 9, (WIDTH,), generator=torch.Generator().manual_seed(i)) * 2.0**6


with session() as run:
    model = Exact()
    optimizer = Adam(model.parameters(), lr=0.1, group=run.group)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, STEPS)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    counters = {"steps": 0}
    run.register(model=model, optimizer=optimizer, scheduler=scheduler, ema=average, counters=counters)
    for x in run.batches(Samples(), global_batch=8, steps=STEPS, loader={"num_workers": int(sys.argv[3])}):
        loss = model(x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        average.update_parameters(model)
        counters["steps"] += 1
        run.report(loss=loss, steps=counters["steps"])

state = [model.state_dict(), average.state_dict(), scheduler.state_dict(), counters, optimizer.state_dict()["vectors"]]
torch.save(state, FOLDER / f"final-{os.getpid()}")
