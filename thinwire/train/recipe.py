"""The shortest way to train: a class that says what the model, the data and the loss are."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from thinwire.train.run import session
from thinwire.workers.recipe import Recipe, moved

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Recipe", "train"]


def train(recipe: Recipe, folder: str | os.PathLike[str] | None = None) -> nn.Module:
    """Train it to its last step, and return the model. folder: as of session()."""
    with session(folder) as run:
        from thinwire.workers.step import part_of_validation, set_rate

        model = recipe.model().to(run.device)
        optimizer = recipe.optimizer(model.parameters(), run.group)
        run.register(model=model, optimizer=optimizer)
        samples = recipe.validation()
        if samples is not None:
            run.evaluate_every(
                recipe.evaluate_every, lambda: part_of_validation(recipe, model, samples, run.group, run.device)
            )
        for batch in run.batches(
            recipe.dataset(), global_batch=recipe.global_batch, steps=recipe.steps, seed=recipe.seed
        ):
            set_rate(optimizer, recipe.lr(run.step_number + 1))
            run.step(recipe.loss(model, moved(batch, run.device)))
    return model
