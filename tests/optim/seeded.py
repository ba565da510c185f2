"""The same model from the same seed, also when ranks build theirs at once: the rng of torch is one for all threads."""

import threading
from collections.abc import Callable

import torch

_LOCK = threading.Lock()


def seeded(seed: int, build: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    with _LOCK:
        torch.manual_seed(seed)
        return build()
