"""One round of 0/1 Adam on flat vectors, in place: local steps, and the sync that ends it. Nothing here communicates.

Shapes: N elements of the flat vectors. The algorithm, with its symbols and its source, is in zero_one_adam.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from thinwire.optim import adam_math
from thinwire.optim.engine.hyperparameters import AdamHyper
from thinwire.optim.engine.state import Local, Replicated, Residual, Scratch
from thinwire.optim.kernels import updates
from thinwire.optim.zero_one_settings import Decay


@dataclass(slots=True)
class ZeroOneAdamState:
    """Vectors of 0/1 Adam. m is a rank's own between syncs and common at each; divisor is derived from v.

    lost: bool, a local gradient of this rank since the last sync was not finite and counted as zero.
    """

    m_N: Replicated
    v_N: Replicated
    update_error: Residual
    u_N: Local
    x_s_N: Local
    lost: Local
    divisor_N: Scratch
    z_N: Scratch


@dataclass(frozen=True, slots=True)
class Round:
    """What the steps of one group since the last sync add up to: K and S above. The same on every rank."""

    kept: float = 1.0
    weight: float = 0.0

    def after(self, h: AdamHyper, decay: Decay) -> Round:
        """One step more."""
        keep = kept_by(h) if decay is Decay.OF_SUM else 1.0
        return Round(self.kept * keep, self.weight * keep + h.lr)


def local_step(p_N: Tensor, g_N: Tensor, s: ZeroOneAdamState, groups: Sequence[AdamHyper], decay: Decay) -> None:
    """A step without communication, in place. p, s, g: modified. Does not wait for the device.

    A gradient that is not finite counts as zero, and is told to all at the next sync: to raise here would leave the
    peers alone in their next collective. A step with lr = 0 leaves m as it is, for u could not carry it to the others.
    """
    finite = torch.isfinite(torch.linalg.vector_norm(g_N))
    s.lost.logical_or_(~finite)
    _fill_where_(g_N, ~finite, 0.0)
    for h in groups:
        if h.lr == 0:
            continue
        p, g, m, u, divisor = (x[h.span] for x in (p_N, g_N, s.m_N, s.u_N, s.divisor_N))
        if decay is Decay.OF_SUM and updates.fits(p):
            updates.local_(p, g, m, u, divisor, h, kept_by(h))
            continue
        adam_math.momentum_(m, g, h.beta1)
        if h.weight_decay:
            if decay is Decay.OF_SUM:
                u.mul_(kept_by(h))
            else:
                u.addcmul_(divisor, p, value=h.lr * h.weight_decay)
            p.mul_(kept_by(h))
        p.addcdiv_(m, divisor, value=-h.lr)
        u.add_(m, alpha=h.lr)


def propose_(g_N: Tensor, s: ZeroOneAdamState, groups: Sequence[AdamHyper], decay: Decay) -> None:
    """z <- what u_i will be after this step. z: modified; NaN where this rank has lost a gradient, for all to learn.

    With Decay.IN_SUM its decay is still to be added, by add_decay_: it needs the divisor of this step.
    """
    for h in groups:
        z, g, m, u = (x[h.span] for x in (s.z_N, g_N, s.m_N, s.u_N))
        keep = kept_by(h) if decay is Decay.OF_SUM else 1.0
        if h.lr == 0:
            z.copy_(u)
        elif updates.fits(z):
            updates.propose_(z, g, m, u, h, keep)
        else:
            adam_math.momentum_into(z, m, g, h.beta1)
            z.mul_(h.lr).add_(u, alpha=keep)
    _fill_where_(s.z_N, s.lost, torch.nan)


def add_decay_(p_N: Tensor, s: ZeroOneAdamState, groups: Sequence[AdamHyper]) -> None:
    """z <- z + lr wd d x: this step's decay as a part of the sum. z: modified."""
    for h in groups:
        if h.lr and h.weight_decay:
            s.z_N[h.span].addcmul_(s.divisor_N[h.span], p_N[h.span], value=h.lr * h.weight_decay)


def receive_(
    p_N: Tensor, start_N: Tensor, s: ZeroOneAdamState, span: slice, weight: float, longest: float, kept: float
) -> None:
    """One group takes the sum that all ranks have received, z: the end of a round.

    z <- cut(z, longest d);  m <- z / S;  x <- K x_s - z / d;  u_i <- 0.    start: x_s, may be p. p, s: modified.
    """
    p, start, z, divisor, m, u = (x[span] for x in (p_N, start_N, s.z_N, s.divisor_N, s.m_N, s.u_N))
    if updates.fits(p):
        updates.receive_(p, start, z, divisor, m, u, weight, longest, kept)
        return
    if isfinite(longest):
        cut_(z, divisor, longest, scratch_N=u)
    torch.div(z, weight, out=m)
    _agree_(p, start, z, divisor, kept)
    u.zero_()


def cut_(u_N: Tensor, divisor_N: Tensor, longest: float, scratch_N: Tensor) -> None:
    """u <- u where |u / d| <= longest, else +-longest d. u, scratch: modified. NaN stays."""
    torch.mul(divisor_N, longest, out=scratch_N)
    torch.minimum(u_N, scratch_N, out=u_N)
    torch.maximum(u_N, scratch_N.neg_(), out=u_N)


def agree_(
    p_N: Tensor, start_N: Tensor, u_N: Tensor, s: ZeroOneAdamState, spans: Iterable[slice], kept: Iterable[float]
) -> None:
    """x <- K x_s - u / d, bit-equal on every rank; u_i <- 0.  start: x_s, may be p. p, s.u: modified."""
    for span, factor in zip(spans, kept, strict=True):
        _agree_(p_N[span], start_N[span], u_N[span], s.divisor_N[span], factor)
    s.u_N.zero_()


def kept_by(h: AdamHyper) -> float:
    """What one step's decay leaves of x: 1 - a."""
    return 1 - h.lr * h.weight_decay


def _agree_(p_s: Tensor, start_s: Tensor, u_s: Tensor, divisor_s: Tensor, kept: float) -> None:
    torch.mul(start_s, kept, out=p_s)
    p_s.addcdiv_(u_s, divisor_s, value=-1)


def _fill_where_(x_N: Tensor, condition: Tensor, value: float) -> None:
    """x <- value where the condition, one bool, holds. Does not wait for the device."""
    if x_N.device.type != "cpu":
        x_N.masked_fill_(condition, value)
    elif bool(condition):  # a pass over x is saved
        x_N.fill_(value)
