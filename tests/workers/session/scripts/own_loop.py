"""A loop that draws its own data and keeps its own checkpoints: own_loop.py FOLDER STEPS."""

import os
import sys
import time
from pathlib import Path

import torch

from thinwire.optim import OneBitAdam
from thinwire.train import session

FOLDER, STEPS = Path(sys.argv[1]), int(sys.argv[2])

with session() as run:
    torch.manual_seed(0)
    model, teacher = torch.nn.Linear(16, 4), torch.nn.Linear(16, 4).requires_grad_(False)
    optimizer = OneBitAdam(model.parameters(), lr=3e-2, warmup=6, group=run.group)
    run.register(optimizer=optimizer)
    newest, step = run.folder / "newest.pt", 0
    if newest.exists():
        saved = torch.load(newest)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    while step < STEPS:
        with (FOLDER / f"steps-{run.rank}").open("a") as file:
            file.write(f"{step + 1}\n")
        while step + 1 > int((FOLDER / "allowed").read_text() or 0):
            time.sleep(0.005)
        x = torch.randn(12, 16, generator=torch.Generator().manual_seed(step))[run.rank :: run.world_size]
        loss = (model(x) - teacher(x)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        run.report(loss=loss)
        if step % 5 == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}  # collective
            if run.rank == 0:
                torch.save(state, newest.with_suffix(".new"))
                os.replace(newest.with_suffix(".new"), newest)
