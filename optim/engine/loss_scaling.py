"""torch.amp.GradScaler beside a collective step: no rank may skip a step alone, for its peers would wait for it.

To an optimizer with `_step_supports_amp_scaling` the scaler leaves the decision: it sets two attributes, calls step()
and removes them. grad_scale: what the gradient is to be divided by; None where scaler.unscale_() has done it.
found_inf: above 0 where this rank's gradient is not finite. A rank divides its own gradient, so scales may differ; one
that is not finite travels as NaN, all ranks learn of it in the exchange, and all leave the step out.

scaler.update() then looks at what the scaler itself has found, on this rank alone. If only the rank that overflowed
halved its scale, each rank would try a larger one at a time of its own, and with n ranks n times as many steps would be
left out as under DDP. So what all have decided is written where update() looks.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler


def is_scaled(optimizer: object) -> bool:
    """Is a GradScaler calling step() now?"""
    return hasattr(optimizer, "found_inf")


def unscale_(g_N: Tensor, optimizer: object, first: slice) -> None:
    """g <- the gradient as it is without a scaler, not finite where the scaler has found so. Does not wait.

    found_inf counts even where clipping by hand has made the gradient finite again. first: an element that is live.
    """
    scale, found_inf = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
    if scale is not None:
        g_N.mul_(scale.to(g_N.device, non_blocking=True).double().reciprocal().to(g_N.dtype))
    if found_inf is not None:
        g_N[first].masked_fill_(found_inf.to(g_N.device, non_blocking=True) > 0, torch.nan)


def tell_scaler(optimizer: object, *, left_out: bool) -> None:
    """Let the scaler that is calling step() lower its scale where all ranks leave the step out, and only
    there. It gives the optimizer a copy of what it has found and not itself, so it is looked for among the callers. A
    scaler that is not torch's keeps what it has found. Does not wait.
    """
    frame = sys._getframe()
    while frame.f_code is not GradScaler.step.__code__:
        if frame.f_back is None:
            return
        frame = frame.f_back
    scaler: GradScaler = frame.f_locals["self"]
    for found_inf in scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
        found_inf.fill_(float(left_out))


def forget_scaler(optimizer: object) -> None:
    """Remove what a scaler has left when step() raised: it would have removed it after the call, and adds to it."""
    for name in ("grad_scale", "found_inf"):
        optimizer.__dict__.pop(name, None)
