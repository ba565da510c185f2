"""The variance of 0/1 Adam as it is used: corrected by the number of its updates, floored; its root divides steps.

    d = sqrt(v_used) + eps     or    sqrt(v_used + eps);    v_used = floor(v / (1 - beta2^updates))

On flat vectors, in place. Which of it is done is a ZeroOneSettings.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from thinwire.comm.layout import Span
from thinwire.optim import adam_math
from thinwire.optim.adam_math import AdamHyper
from thinwire.optim.variance_floor import floor_variance_
from thinwire.optim.zero_one_settings import ZeroOneSettings


def use_variance_(
    v_N: Tensor,
    groups: Sequence[AdamHyper],
    updates: int,
    settings: ZeroOneSettings,
    tensors: Sequence[Span],
    blocks: Sequence[Span],
) -> int:
    """V <- v as it is used before the freeze. Returns how many elements the floor raised; waits for the device then.

    v: modified. updates: made so far, above 0. tensors, blocks: as in floor_variance_.
    """
    if settings.bias_correction:
        for h in groups:
            adam_math.unbias_variance_(v_N[h.span], h.beta2, updates)
    return int(floor_variance_(v_N, tensors, blocks).sum()) if settings.floor else 0


def root_(v_N: Tensor, groups: Sequence[AdamHyper], settings: ZeroOneSettings) -> None:
    """V <- d, what steps are divided by."""
    if settings.eps_outside:
        v_N.sqrt_()
    for h in groups:
        v_N[h.span].add_(h.eps)
    if not settings.eps_outside:
        v_N.sqrt_()
