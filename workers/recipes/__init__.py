"""What can be trained. A recipe is a function of its part of the spec and a seed; the model it builds knows nothing
of distribution.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from thinwire.workers.recipes import gpt
from thinwire.workers.spec import GptRecipe

REGISTRY: dict[str, Callable[[GptRecipe, int], nn.Module]] = {"gpt": gpt.build}
"""By `recipe.name` of the spec. A model called with (inputs, targets) answers its mean loss in nats."""
