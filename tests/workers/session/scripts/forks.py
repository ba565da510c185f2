"""Rank 1 forks, and the children end as people let them: by sys.exit(), by an error, in the loop. forks.py FOLDER."""

import os
import sys
from pathlib import Path

import torch

from thinwire.optim import Adam
from thinwire.train import session

ENDS = {2: 7, 3: 1, 4: 1, 5: 0}
"""The step before which it forks, and the status with which the child ends."""

with session() as run:
    model = torch.nn.Linear(2, 1)
    optimizer = Adam(model.parameters(), group=run.group)
    run.register(model=model, optimizer=optimizer)
    for x in run.batches([torch.ones(2)] * 8, global_batch=4, steps=8):
        kind = run.step_number + 1
        if run.rank == 1 and kind in ENDS:
            child = os.fork()
            if child:
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == ENDS[kind], kind
            elif kind == 2:
                sys.exit(7)
            elif kind == 3:
                raise ValueError("in the child")
            elif kind == 5:
                break
        run.step(model(x).mean())  # the fourth child comes here: refused

if run.has_finished:
    torch.save(run.step_number, Path(sys.argv[1]) / f"final-{os.getpid()}")
