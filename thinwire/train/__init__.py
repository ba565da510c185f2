"""Train with a loop of your own that goes on when workers die, come and leave: see docs/your-script.md.

    from thinwire.train import session

    with session() as run:
        optimizer = OneBitAdam(model.parameters(), lr=1e-3, group=run.group)
        run.register(model=model, optimizer=optimizer)
        for batch in run.batches(dataset, global_batch=64, steps=1000):
            run.step(loss_of(model, batch))

Or with a Recipe, a class that says what the model, the data and the loss are: train(recipe).
A dataset with random transforms: seeded(dataset).
Importing it imports no torch; calling any of the three does.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from thinwire.workers.recipe import Recipe

if TYPE_CHECKING:
    from torch import nn

    from thinwire.workers.data.seeded import Seeded
    from thinwire.workers.session.session import Session

__all__ = ["Recipe", "seeded", "session", "train"]


def session(folder: str | os.PathLike[str] | None = None, *, save_every: int = 500, keep: int = 2) -> Session:
    """The run that this process has a part in, as a context manager: under python, torchrun, or in a job.

    folder: where checkpoints are written and gone on from, one run a folder, and the same one for all ranks; None:
    nothing is kept. save_every: steps between two of them. keep: how many. In a job these three are ignored: the job's
    file says them.
    Raises: TypeError, ValueError for numbers or a folder that cannot be; OSError for one that cannot be made.
    """
    from thinwire.workers.session.session import begin

    return begin(folder, save_every, keep)


def train(recipe: Recipe, folder: str | os.PathLike[str] | None = None) -> nn.Module:
    """Train it to its last step, and return the model. folder: as of session()."""
    from thinwire.workers.session import job

    with session(folder) as run:
        return job.train(recipe, run)


def seeded(dataset: Any, seed: int = 0) -> Seeded:
    """The dataset, whose [i] draws at random, so that what it draws follows from the sample's number in the run.

    For transforms that draw from torch, random or numpy, as torchvision's do. Each epoch draws anew, and a run that is
    resumed or has lost a worker gives each sample as it would have been. seed: of the drawing alone.
    Raises: TypeError for a dataset that has no len() or no [i].
    """
    from thinwire.workers.data.seeded import Seeded

    return Seeded(dataset, seed)
