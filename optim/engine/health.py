"""How an optimizer is doing, in a few numbers for people: taken on demand, so that no step pays for them.

    error_to_momentum   ||R|| / ||out||: what waits in error memory, in units of what an exchange gives (comm)
    sign_density_*      rho of what was encoded: 1 where all sizes are equal, 0.80 for Gaussian values
    max_step            max |m / (sqrt(v) + eps)|: the largest step, in units of lr, before LAMB's coefficients

What is normal and what is not: docs/operations.md. Watch the trend of error_to_momentum; rho alone is no alarm.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from thinwire.comm.kernels.peak import peak
from thinwire.optim.engine.optimizer import FlatOptimizer
from thinwire.optim.engine.state import error_memories

PIECE = 1 << 22
"""Elements looked at at a time: 16 MB of scratch in fp32, whatever the model."""

FROM_STATS = (
    "floored_elements",
    "rounds_skipped",
    "num_uploads",
    "possible_uploads",
    "lamb_coeff_min",
    "lamb_coeff_median",
    "lamb_coeff_max",
)
"""What an optimizer's stats() say that belongs to its health."""


@torch.no_grad()
def health(optimizer: FlatOptimizer[Any]) -> dict[str, float]:
    """The numbers above, and those of stats() that belong here; what is not known is left out. The same on every rank.

    Collective where anything was compressed: one mean of 16 kB. Waits for the device, reads every vector once. Call it
    where the optimizer is at_sync. Kept with its step as evidence["health"], which stats() and a checkpoint show;
    nothing else is modified. Raises: PeerLost.
    """
    found: dict[str, float | None] = {}
    with optimizer.calling(f"health() after step {optimizer.num_steps}"):
        for memory in error_memories(optimizer.vectors).values():
            fidelity = optimizer.reduce.fidelity(memory)
            if fidelity is not None:
                found["error_to_momentum"] = fidelity.residual_ratio
                found["sign_density_worker"] = fidelity.worker_density
                found["sign_density_server"] = fidelity.server_density
    found["max_step"] = _max_step(optimizer)
    stats = optimizer.stats()
    found.update({name: stats.get(name) for name in FROM_STATS})
    ratios = stats.get("variance_ratios")
    found["variance_ratio"] = ratios[-1][1] if ratios and optimizer.frozen_at is None else None
    known = {name: value for name, value in found.items() if value is not None}
    optimizer.evidence["health"] = {"step": optimizer.num_steps, **known}
    return known


def _max_step(optimizer: FlatOptimizer[Any]) -> float | None:
    """max |m_hat / d| over all elements, d as the next step would divide; None before the first step.

    None too where the momentum is each rank's own (1-bit Muon).

    Of an optimizer without a variance the largest |m|; of one that says itself what it divides by, that d.
    """
    if optimizer.num_steps == 0 or "m_N" not in optimizer.common_vectors():
        return None
    s, plan = optimizer.vectors, optimizer.plan(optimizer.num_steps)
    v_N, divisor = getattr(s, "v_N", None), getattr(optimizer, "divisor", None)
    peaks = []
    for run in optimizer.runs:
        group, span, t = optimizer.param_groups[run.group], run.span, plan.bias_of(run.seen(optimizer.num_updates))
        beta1, beta2 = group.get("betas", (0.0, 0.0))
        corrections = (1.0, 1.0) if t is None else (1 - beta1**t, 1 - beta2**t)
        for start in range(span.start, span.stop, PIECE):
            at = slice(start, min(start + PIECE, span.stop))
            step = s.m_N[at] / corrections[0]
            if divisor is not None and (d := divisor(at)) is not None:
                step.div_(d)
            elif v_N is not None:
                step.div_(_divisor(v_N[at], corrections[1], group["eps"]))
            peaks.append(peak(step))
    return float(torch.stack(peaks).max())


def _divisor(v: Tensor, correction: float, eps: float) -> Tensor:
    return (v / correction).sqrt_().add_(eps)
