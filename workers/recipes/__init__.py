"""What a job file can name: recipes (workers/recipe.py) made of a spec.

A model knows nothing of distribution, and draws nothing while it trains: no dropout, which every rank would draw for
itself.
"""

from __future__ import annotations

from collections.abc import Callable

from thinwire.contract.spec import TrainSpec
from thinwire.workers.recipes.bert import BertOverText
from thinwire.workers.recipes.gpt import GptOverText
from thinwire.workers.recipes.of_job import OfJob
from thinwire.workers.recipes.resnet import ResnetOnDigits

REGISTRY: dict[str, Callable[[TrainSpec], OfJob]] = {"gpt": GptOverText, "bert": BertOverText, "resnet": ResnetOnDigits}
"""By `recipe.name` of the spec."""


def recipe_of(spec: TrainSpec) -> OfJob:
    """The recipe that a job file names."""
    return REGISTRY[spec.recipe.name](spec)
