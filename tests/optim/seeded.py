"""The same model from the same seed, also when several ranks build theirs at once: torch's global rng is one for all."""

import threading
from collections.abc import Callable

import torch

_LOCK = threading.Lock()


def seeded(seed: int, build: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    with _LOCK:
        torch.manual_seed(seed)
        return build()
