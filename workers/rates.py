"""The learning rate of a job file by its step. Nothing is imported but math: what plans a run needs no torch."""

from __future__ import annotations

import math


def risen_and_fallen(step: int, steps: int, warmup: int, floor: float, *, peak: float = 1.0) -> float:
    """Linear to the peak over `warmup` steps, then a cosine to `floor` of it at the last; a floor of 1: constant."""
    if step <= warmup:
        return peak * step / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))
