"""Train with a loop of your own that goes on when workers die, come and leave: see docs/your-script.md.

    from thinwire.train import session

    with session() as run:
        optimizer = OneBitAdam(model.parameters(), lr=1e-3, group=run.group)
        run.register(model=model, optimizer=optimizer)
        for batch in run.batches(dataset, global_batch=64, steps=1000):
            run.step(loss_of(model, batch))

Importing it imports no torch; calling session() does.
"""

from __future__ import annotations

from thinwire.train.recipe import Recipe, train
from thinwire.train.run import session

__all__ = ["Recipe", "session", "train"]
