"""What can be trained. A recipe is a function of its part of the spec and a seed; the model it builds knows nothing
of distribution, and draws nothing while it trains: no dropout, which every rank would draw for itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from thinwire.workers.recipes import bert, gpt, resnet

REGISTRY: dict[str, Callable[[Any, int], nn.Module]] = {"gpt": gpt.build, "bert": bert.build, "resnet": resnet.build}
"""By `recipe.name` of the spec. A model called with (inputs, targets) answers its mean loss in nats, in float32; with
inputs alone its logits, f[..., classes]."""
