"""The shortest way to train: a class that says what the model, the data and the loss are."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from thinwire.train.run import session
from thinwire.workers.recipe import Recipe

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Recipe", "train"]


def train(recipe: Recipe, folder: str | os.PathLike[str] | None = None) -> nn.Module:
    """Train it to its last step, and return the model. folder: as of session()."""
    from thinwire.workers.session import recipe_loop

    with session(folder) as run:
        return recipe_loop.train(recipe, run)
