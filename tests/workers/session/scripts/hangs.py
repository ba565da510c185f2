"""A plain loop that hangs from the step on that the test says: `hangs.py FOLDER STEPS`."""

import sys
import time
from pathlib import Path

import torch

from thinwire.optim import Adam
from thinwire.train import session

FOLDER, STEPS = Path(sys.argv[1]), int(sys.argv[2])


def locked_from(rank):
    return int((FOLDER / f"locked-{rank}").read_text() or STEPS)


def wait_for_the_lock(rank, step):
    while step >= locked_from(rank):
        time.sleep(0.01)


with session() as run:
    model = torch.nn.Linear(6, 1)
    optimizer = Adam(model.parameters(), lr=0.1, group=run.group)
    run.register(model=model, optimizer=optimizer)
    for x in run.batches([torch.ones(6)] * 20, global_batch=8, steps=STEPS):
        time.sleep(0.02)
        wait_for_the_lock(run.rank, run.step_number + 1)
        run.step(model(x).mean())
