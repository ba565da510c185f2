"""One round of 0/1 Adam on flat vectors, in place: local steps, and the sync that ends it. Nothing here communicates.

Shapes: N elements of the flat vectors, b of one bucket. The algorithm, with its symbols and its source, is in
zero_one_adam.py. d is nowhere kept: it is formed from v, as that is used, in the pass that divides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from thinwire.comm.kernels.added import Advanced
from thinwire.comm.kernels.blocks import BlockTable, RowMemory
from thinwire.comm.kernels.fused_reference import decoded
from thinwire.comm.kernels.peak import witness
from thinwire.optim import adam_math
from thinwire.optim.engine.hyperparameters import AdamHyper
from thinwire.optim.engine.state import Local, Replicated, Residual, Scratch
from thinwire.optim.kernels import updates

PIECE = 1 << 22
"""Elements for which there is scratch, where a pass is a chain of operations."""
SMALL_PIECE = 1 << 18
"""Elements for which there is scratch where a round ends otherwise than by a sync."""


@dataclass(slots=True)
class ZeroOneAdamState:
    """Vectors of 0/1 Adam. m is a rank's own between syncs and common at each.

    used_N: v as it is used, corrected and floored; None where that is v itself, as from the freeze on.
    lost: bool, a local gradient of this rank since the last sync was not finite and counted as zero.
    u, x_s: None until the first step without communication; at a sync they are worth nothing. x_s stays None where no
    other rank has to have it bit for bit: then it is what u has left of x (begun).

    An element in fp32 takes 8 bytes as parameter and gradient, 4 each as m and v, 4 + 4 / ranks of error memory, half a
    byte as rows of signs; between the dense start and the freeze 4 more (used), and from the first step without
    communication on 8 more (u, x_s), one rank alone 4 (u).
    """

    m_N: Replicated
    v_N: Replicated
    update_error: Residual
    lost: Local
    used_N: Scratch | None = None
    u_N: Local | None = None
    x_s_N: Local | None = None

    @property
    def used(self) -> Tensor:
        """v as it is used."""
        return self.v_N if self.used_N is None else self.used_N

    def begin_round(self, *, keeps_start: bool) -> None:
        """Make memory for u, and for x_s where it is kept."""
        self.u_N = torch.empty_like(self.m_N) if self.u_N is None else self.u_N
        if not keeps_start:
            self.x_s_N = None
        elif self.x_s_N is None:
            self.x_s_N = torch.empty_like(self.m_N)

    def of_round(self) -> tuple[Tensor, ...]:
        """u, and x_s where it is kept."""
        return tuple(x_N for x_N in (self.u_N, self.x_s_N) if x_N is not None)


@dataclass(frozen=True, slots=True)
class Round:
    """What the steps of one group since the last sync add up to: K and S above. The same on every rank."""

    kept: float = 1.0
    weight: float = 0.0

    def after(self, h: AdamHyper) -> Round:
        """One step more."""
        keep = kept_by(h)
        return Round(self.kept * keep, self.weight * keep + h.lr)

    @property
    def is_new(self) -> bool:
        """Has nothing moved since the last sync? Then u and x_s are worth nothing."""
        return self.weight == 0


def units_of(rounds: Sequence[Round], steps: int) -> list[float]:
    """What sums are over what is sent, as many momenta: the mean rate of the round that ends.

    rounds: of each group, with the step that ends them. steps: in them. Of a group whose rates were all 0: what a
    momentum is over what is sent.
    """
    return [(done.weight or 1.0) / steps for done in rounds]


def local_step(
    p_N: Tensor,
    g_N: Tensor,
    s: ZeroOneAdamState,
    groups: Sequence[AdamHyper],
    rounds: Sequence[Round],
) -> None:
    """A step without communication, in place, after begin_round. p, s: modified. rounds: so far.

    Does not wait for the device.

    A gradient that is not finite counts as zero, and without kernels g becomes zero. It is reported to all at the
    next sync: to raise here would leave the peers alone in their next collective. A step with lr = 0 leaves m as it is,
    for u could not carry it to the others.
    """
    lost = ~torch.isfinite(witness(g_N))
    s.lost.logical_or_(lost)
    in_kernels = updates.in_one_pass(g_N) and not updates.fits(g_N) and all(h.lr for h in groups)
    if not in_kernels:
        _fill_where_(g_N, lost, 0.0)
    assert s.u_N is not None
    # Where x_s is not kept u takes its place in the loop, which writes u last.
    vectors = p_N, g_N, s.m_N, s.used, s.u_N, s.u_N if s.x_s_N is None else s.x_s_N
    for h, done in zip(groups, rounds, strict=True):
        p, g, m, v, u, x_s = (x[h.span] for x in vectors)
        if h.lr and updates.in_one_pass(p):
            if done.is_new:
                updates.first_local_(p, g, m, u, x_s, v, h, kept_by(h), lost)
            else:
                updates.local_(p, g, m, u, v, h, kept_by(h), lost)
            continue
        if done.is_new:
            x_s.copy_(p)
            u.zero_()
        if h.lr:
            adam_math.momentum_(m, g, h.beta1)
            for low in range(0, len(p), PIECE):
                at = slice(low, low + PIECE)
                _move_(p[at], m[at], v[at], u[at], h)


def _move_(p: Tensor, m: Tensor, v: Tensor, u: Tensor, h: AdamHyper) -> None:
    divisor = adam_math.divisor(v, h.eps)
    if h.weight_decay:
        u.mul_(kept_by(h))
        p.mul_(kept_by(h))
    p.addcdiv_(m, divisor, value=-h.lr)
    u.add_(m, alpha=h.lr)


def propose_(
    z_s: Tensor,
    g_s: Tensor,
    s: ZeroOneAdamState,
    at: slice,
    h: AdamHyper,
    done: Round,
    unit: float = 1.0,
) -> None:
    """z <- what u_i will be after this step, over unit, of elements `at` of one group. z: modified. done: so far."""
    m, u = s.m_N[at], None if s.u_N is None or done.is_new else s.u_N[at]
    if h.lr == 0:
        if u is None:
            z_s.zero_()
        else:
            torch.mul(u, 1 / unit, out=z_s)
        return
    keep = kept_by(h) / unit
    h = replace(h, lr=h.lr / unit)
    if updates.in_one_pass(z_s):
        if u is None:
            updates.first_proposal_(z_s, g_s, m, h)
        else:
            updates.propose_(z_s, g_s, m, u, h, keep)
        return
    adam_math.momentum_into(z_s, m, g_s, h.beta1)
    z_s.mul_(h.lr)
    if u is not None:
        z_s.add_(u, alpha=keep)


def proposed(g_s: Tensor, s: ZeroOneAdamState, at: slice, h: AdamHyper, done: Round, unit: float) -> Advanced | None:
    """What propose_ and mark_lost_ give together, as the exchange can form it; None at a rate of 0."""
    if h.lr == 0:
        return None
    u = None if s.u_N is None or done.is_new else s.u_N[at]
    return Advanced([g_s], s.m_N[at], u, 1 - h.beta1, h.lr / unit, kept_by(h) / unit, s.lost)


def mark_lost_(z_b: Tensor, s: ZeroOneAdamState) -> Tensor:
    """z <- NaN where this rank has lost a gradient since the last sync, for all to learn. Does not wait. Returns z."""
    _fill_where_(z_b, s.lost, torch.nan)
    return z_b


@dataclass(frozen=True, slots=True, eq=False)
class Receipt:
    """One group takes the sum z that all ranks have received: the end of a round, in one pass over what came. A Reader.

    z <- cut(unit z, longest d);  m <- z / S;  x <- K x_s - z / d.    weight: S. unit: what z has to be multiplied by.
    kept: K. Where S is 0, what came is of R alone, and counts at a rate of 0: x <- x_s, and m <- m + unit z, so that it
    is not lost.
    before: the round so far. p, s.m: modified where they are read.
    """

    p_N: Tensor
    s: ZeroOneAdamState
    h: AdamHyper
    weight: float
    unit: float
    longest: float
    kept: float
    before: Round

    def parts(self) -> Iterator[tuple[int, int]]:
        """The bounds of this group's elements as they are to be read: in pieces where there is scratch for each."""
        start, stop = self.h.span.start, self.h.span.stop
        step = stop - start if self._has_loop else PIECE
        for low in range(start, stop, max(step, 1)):
            yield low, min(low + step, stop)

    def rows(self, at: slice, rows: RowMemory, table: BlockTable) -> None:
        """z as rows of signs."""
        if not self._has_loop:
            z = decoded(rows, table)
            z[table.dead] = 0
            self._take(at, z)
            return
        p, v, m = (x[at] for x in (self.p_N, self.s.used, self.s.m_N))
        start = begun(p, self.s, at, self.h, self.before)
        numbers = self.unit, self.weight, self.longest, self.kept
        updates.receive_rows_(p, start, v, m, rows, numbers, self.h.eps, table)

    def values(self, at: slice, values: Tensor) -> None:
        """z as floats, 0 where dead."""
        if not self._has_loop:
            self._take(at, values.clone())
            return
        p, v, m = (x[at] for x in (self.p_N, self.s.used, self.s.m_N))
        start = begun(p, self.s, at, self.h, self.before)
        numbers = self.unit, self.weight, self.longest, self.kept
        updates.receive_(p, start, values, v, m, numbers, self.h.eps)

    @property
    def _has_loop(self) -> bool:
        return self.weight != 0 and updates.in_one_pass(self.p_N)

    def _take(self, at: slice, z: Tensor) -> None:
        z.mul_(self.unit)
        start = begun(self.p_N[at], self.s, at, self.h, self.before)
        if not self.weight:
            self.s.m_N[at].add_(z)
            self.p_N[at].copy_(start)
            return
        divisor = adam_math.divisor(self.s.used[at], self.h.eps)
        cut_(z, divisor, self.longest)
        torch.div(z, self.weight, out=self.s.m_N[at])
        agree_(self.p_N[at], start, z, divisor, self.kept)


class OwnReceipt(Receipt):
    """As Receipt. Of one rank z is made in that pass (comm.exchange.alone), and x_s need not be known:

    x <- (1 - a) x - (z - (1 - a) u) / d      of x and u before this step
    """

    def make(self, at: slice, x: Tensor, last: Tensor | None, weight: float | None) -> None:
        """z is what propose_ gives of the gradient x."""
        p, v, m = (y[at] for y in (self.p_N, self.s.used, self.s.m_N))
        numbers = self.unit, self.weight, self.longest, kept_by(self.h)
        if self.before.is_new:
            updates.receive_own_(p, x, v, m, self.h, self.unit, numbers)
        else:
            assert self.s.u_N is not None
            updates.receive_own_round_(p, x, v, m, self.s.u_N[at], self.h, self.unit, numbers)


def begun(p_s: Tensor, s: ZeroOneAdamState, at: slice, h: AdamHyper, done: Round) -> Tensor:
    """x_s of these elements, where the round began: kept, or p itself, or new: (x + u / d) / K. done: the round so far.

    p: theirs. Equal to rounding only where it is not kept, so not for ranks that are to agree.
    """
    if done.is_new:
        return p_s
    if s.x_s_N is not None:
        return s.x_s_N[at]
    assert s.u_N is not None
    return (s.u_N[at] / adam_math.divisor(s.used[at], h.eps)).add_(p_s).div_(done.kept)


def cut_(u_N: Tensor, divisor_N: Tensor, longest: float) -> None:
    """u <- u where |u / d| <= longest, else +-longest d. u: modified. NaN stays."""
    bound_N = divisor_N * longest
    torch.minimum(u_N, bound_N, out=u_N)
    torch.maximum(u_N, bound_N.neg_(), out=u_N)


def agree_(p_s: Tensor, start_s: Tensor, u_s: Tensor, divisor_s: Tensor, kept: float) -> None:
    """x <- K x_s - u / d, bit-equal on every rank. start: x_s; it or u may be p. p: modified."""
    moved_s = u_s / divisor_s
    torch.mul(start_s, kept, out=p_s).sub_(moved_s)


def kept_by(h: AdamHyper) -> float:
    """What one step's decay leaves of x: 1 - a."""
    return 1 - h.lr * h.weight_decay


def _fill_where_(x_N: Tensor, condition: Tensor, value: float) -> None:
    """x <- value where the condition, one bool, holds. Does not wait for the device."""
    if x_N.device.type != "cpu":
        x_N.masked_fill_(condition, value)
    elif bool(condition):  # a pass over x is saved
        x_N.fill_(value)
