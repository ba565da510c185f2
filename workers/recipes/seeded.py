"""Values for a model that was made on the meta device: a function of its shapes and a seed, of nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

Model = TypeVar("Model", bound=nn.Module)


def seeded_normal(model: Model, seed: int, std: Callable[[str, Tensor], float]) -> Model:
    """The model on the CPU: biases 0, scales of norms 1, all else normal(0, std(name, parameter)).

    Names that end in "bias" are biases, names with "norm" belong to norms. The global rng is not used.
    """
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif "norm" in name:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, std(name, parameter), generator=generator)
    return model
