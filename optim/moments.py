"""Moments that another optimizer has gathered, taken over: of torch.optim's AdamW, of DeepSpeed's engine.

What state_dict() has is of flat vectors, and theirs is by parameter, with a step count and without error memory. So a
state_dict of theirs is made for the optimizer that is to go on, and loaded as any other: what that refuses is refused.
The law: a run that goes on from these moments is, bit for bit, the run that had gathered them itself, but for what its
error memory held (tests/optim/test_moments.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.optim.engine import saving
from thinwire.optim.engine.optimizer import FlatOptimizer
from thinwire.optim.engine.parameters import LOW_PRECISION
from thinwire.optim.engine.places import FlatTensor
from thinwire.optim.engine.state import MASTER, error_memories, sizes
from thinwire.optim.engine.tensor_states import order_of
from thinwire.optim.variance.floor import floor_variance_
from thinwire.optim.variance.freezing import FreezingOptimizer

MOMENTS = {"exp_avg": "m_N", "exp_avg_sq": "v_N"}
"""What torch.optim calls them, and what they are called here."""
COEFFICIENT = "coeff_T"
"""What 1-bit LAMB keeps of the trust ratios of its warm-up."""
FROM_FREEZE = {"fresh_v_N", "scaling_T", "factor_T"}
"""What it has from the freeze on, and finds there."""


@dataclass(frozen=True, slots=True)
class Moments:
    """Of one parameter, each in its shape, in any floating dtype. steps: that it was in, at least 1.

    exp_avg, exp_avg_sq: m and v as sums that began at zero, so not corrected for that. updates: of v, where they are
    fewer than steps. coefficient: of LAMB alone, the average of its trust ratios, a sum that began at zero too.
    master: the parameter in float32, of one that is in low precision; None: the parameter itself.
    """

    steps: int
    exp_avg: Tensor
    exp_avg_sq: Tensor
    updates: int | None = None
    coefficient: float | None = None
    master: Tensor | None = None


def take_over(
    optimizer: FlatOptimizer[Any],
    moments: Mapping[Tensor, Moments],
    *,
    frozen_at: int | None = None,
    has_floor: bool = False,
) -> None:
    """The optimizer goes on from these moments, those of each of its parameters. Local: call it on every rank alike.

    optimizer: Adam, Lamb, OneBitAdam, OneBitLamb or ZeroOneAdam that has made no step; modified. Its own settings say
    when its warm-up ends. moments: by parameter. frozen_at: of OneBitAdam alone: the variance is that of an update
    before, kept since, and is used as it is; the next step is a compressed one. It is given the floor that a freeze
    gives (variance/floor.py), but where it has one: has_floor, for a floor of a floor is another. Error memory begins
    empty: what it held elsewhere is lost once, as when ranks die.

    Raises: ValueError saying what does not fit; then nothing has changed.
    """
    _refuse(optimizer, frozen_at)
    order, space = order_of(optimizer), optimizer.space
    absent = [tensor.name for tensor in order.tensors if tensor.param not in moments]
    if absent:
        raise ValueError(f"moments of the parameters {absent} are missing: give those of all that the optimizer has")
    found = [_checked(tensor, moments[tensor.param]) for tensor in order.tensors]
    vectors = _vectors(optimizer, order.tensors, found)
    if isinstance(optimizer, FreezingOptimizer) and frozen_at is not None and not has_floor:
        floor_variance_(vectors["v_N"], space.layout.live, space.layout.blocks(optimizer.floor_block))
    steps, plain = max(one.steps for one in found), saving.plain(optimizer)
    saved = {**plain["saved"], **({"last_sync": steps} if "last_sync" in plain["saved"] else {})}
    if "variance_updates" in saved:
        saved["variance_updates"] = max(_updates(one) for one in found)
    masters = [_master(tensor.param, one) for tensor, one in zip(order.tensors, found, strict=True)]
    optimizer.load_state_dict(
        {
            **plain,
            "state": {},
            "num_steps": steps,
            "frozen_at": frozen_at,
            "saved": saved,
            "entries": [
                [tensor.name, one.steps, None if frozen_at else _updates(one)]
                for tensor, one in zip(order.tensors, found, strict=True)
            ],
            "vectors": vectors,
            "residuals": {name: torch.zeros_like(space.p_N) for name in error_memories(optimizer.vectors)},
            **({MASTER: torch.cat(kept)} if (kept := [one for one in masters if one is not None]) else {}),
        }
    )


def _updates(one: Moments) -> int:
    return one.steps if one.updates is None else one.updates


def _checked(tensor: FlatTensor, one: Moments) -> Moments:
    """Raises: ValueError naming the parameter."""
    if one.steps < 1 or not 1 <= _updates(one) <= one.steps:
        raise ValueError(
            f"moments of parameter {tensor.name} have seen {one.steps} steps and {_updates(one)} updates: must be at "
            "least 1, and not more updates than steps"
        )
    for name in MOMENTS:
        value = getattr(one, name)
        if value.shape != tensor.shape or not value.dtype.is_floating_point:
            raise ValueError(
                f"{name} of parameter {tensor.name} is {value.dtype} of shape {list(value.shape)}: must be floating, "
                f"of shape {list(tensor.shape)}, that of the parameter"
            )
    damaged = int((~one.exp_avg.isfinite()).count_nonzero() + (~one.exp_avg_sq.isfinite()).count_nonzero())
    if damaged:
        raise ValueError(f"moments of parameter {tensor.name} have {damaged} values that are not finite: load others")
    return one


def _vectors(
    optimizer: FlatOptimizer[Any], tensors: Sequence[FlatTensor], moments: Sequence[Moments]
) -> dict[str, Tensor]:
    """Each replicated vector, new: moments where they belong, all else as a fresh run has it."""
    p_N, wide = optimizer.space.p_N, optimizer.space.p_N.numel()
    found = {
        name: p_N.new_full((size,), optimizer.fresh.get(name, 0.0))
        for name, size in sizes(optimizer.vectors, wide).items()
    }
    for tensor, one in zip(tensors, moments, strict=True):
        for theirs, name in MOMENTS.items():
            found[name][tensor.start : tensor.stop] = getattr(one, theirs).reshape(-1)
    if COEFFICIENT in found:
        if any(one.coefficient is None for one in moments):
            raise ValueError(
                f"{type(optimizer).__name__} needs the average trust ratio of each parameter (coefficient), which "
                "moments of another optimizer have not: begin with the weights alone, or with Lamb"
            )
        found[COEFFICIENT].copy_(torch.tensor([one.coefficient for one in moments], dtype=torch.float64, device="cpu"))
    return found


def _refuse(optimizer: FlatOptimizer[Any], frozen_at: int | None) -> None:
    kind = type(optimizer).__name__
    needed = set(sizes(optimizer.vectors, 0)) - {COEFFICIENT} - FROM_FREEZE
    if needed != set(MOMENTS.values()):
        raise ValueError(
            f"{kind} goes on from {sorted(needed) or 'no moments'}, not from first and second moments alone: take "
            "Adam, Lamb, OneBitAdam, OneBitLamb or ZeroOneAdam"
        )
    if optimizer.num_steps:
        raise ValueError(
            f"{kind} has made {optimizer.num_steps} steps of its own: moments are taken over before the first"
        )
    if frozen_at is None:
        return
    if not isinstance(optimizer, FreezingOptimizer) or kind != "OneBitAdam":
        raise ValueError(f"frozen_at = {frozen_at} for {kind}: only OneBitAdam goes on from a variance that was frozen")


def _master(param: Tensor, one: Moments) -> Tensor | None:
    if param.dtype not in LOW_PRECISION:
        return None
    value = param.detach() if one.master is None else one.master
    return value.to(torch.float32, copy=True).reshape(-1)
