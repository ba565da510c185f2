"""1-bit Adam.  [Tang et al. 2021, arXiv 2102.02888]

    warm-up, t <= T:      g = mean_i g_i;  Adam on g, bias-corrected
    after step T:         v <- max(v / (1 - beta2^T), floor), for good
    compressed, t > T:    m <- compressed_mean_i(beta1 m + (1 - beta1) g_i);  x <- x - lr (m / (sqrt(v) + eps) + wd x)

With v fixed the update is linear in the momentum, so error feedback loses nothing: what one step leaves out a later
one sends. Deviations from the paper, with their reasons: docs/algorithms.md.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, Unpack, get_args

from torch import Tensor
from torch.optim.optimizer import ParamsT

from thinwire.comm.kernels.blocks import BlockTable, RowMemory
from thinwire.comm.kernels.fused_reference import root
from thinwire.contract.hyperparameters import BETAS, EPS, LR, WEIGHT_DECAY
from thinwire.optim import adam_math
from thinwire.optim.engine.hyperparameters import AdamHyper, adam_defaults
from thinwire.optim.engine.momentum import Momentum
from thinwire.optim.engine.options import checked_narrow
from thinwire.optim.engine.schedule import StepPlan, Wire
from thinwire.optim.engine.state import Replicated, Residual
from thinwire.optim.kernels import updates
from thinwire.optim.variance.freezing import FreezingOptimizer, OneBitOptions
from thinwire.optim.variance.rare import give_touches_

Narrow = Literal["variance", "error_memory"]
"""What may be kept in bfloat16: the variance once it is frozen, and what compression leaves out."""
PIECE = 1 << 20
"""Elements for which there is scratch, where a pass is a chain of operations."""


@dataclass(slots=True)
class OneBitAdamState:
    """Momentum, variance (frozen after warm-up), and the error memory of the momentum.

    An element in fp32 takes 8 bytes as parameter and gradient, 4 as v, 4 + 4 / ranks of error memory, and half a byte
    as rows of signs, which hold m in the compressed phase: 4 more where m is in floats, in warm-up and from a load or
    state_dict() to the end of the next step. In bfloat16 v, once frozen, and error memory take half of that. With
    overlap 4 more from backward to zero_grad(): the gradient that backward made, which compressed steps read there.
    """

    momentum: Momentum
    v_N: Replicated
    momentum_error: Residual

    @property
    def m_N(self) -> Replicated:
        """The momentum of all ranks, decoded where it is in received rows."""
        return self.momentum.floats()

    def holder(self, name: str) -> Momentum:
        """What holds a vector that is not a field: m."""
        return self.momentum


class Descent:
    """x <- x - lr (m / (sqrt v + eps) + wd x) along a received m, in one pass over what was received. A Reader.

    Of one rank m is made in that pass (comm.exchange.alone).

    p: float[N], modified where it is read. v: float[N].  Source: Tang et al. 2021, Alg. 1, l. 13.

    The root of v is taken anew in each step. It could be kept in place of v, but v is saved, and goes on in a second
    warm-up: two values of it have one root, so that it could not be had back. The pass waits for memory anyway.
    """

    def __init__(self, p_N: Tensor, v_N: Tensor, h: AdamHyper) -> None:
        self._p_N, self._v_N = p_N, v_N
        self._h, self._lr, self._decay, self._eps = h, h.lr, h.lr * h.weight_decay, h.eps

    def rows(self, at: slice, rows: RowMemory, table: BlockTable) -> None:
        """m as rows of signs."""
        updates.descend_(self._p_N[at], self._v_N[at], rows, self._lr, self._decay, self._eps, table)

    def make(self, at: slice, x: Tensor, last: Tensor | None, weight: float | None) -> None:
        """m <- last + weight (x - last), in the place of the last."""
        assert last is not None
        assert weight is not None
        p, v = self._p_N[at], self._v_N[at]
        if updates.fits(p) and x.dtype == v.dtype == p.dtype:
            updates.mix_and_descend_(p, x, last, v, self._h, weight)
            return
        for start in range(0, len(x), PIECE):
            part = slice(start, start + PIECE)
            last[part].add_(x[part].to(last.dtype).sub(last[part]).mul_(weight))
        self.values(at, last)

    def values(self, at: slice, values: Tensor) -> None:
        """m as floats, 0 where dead."""
        for start in range(at.start, at.stop, PIECE):
            part = slice(start, min(start + PIECE, at.stop))
            step = root(self._v_N[part].to(self._p_N.dtype)).add_(self._eps).reciprocal_()  # as the loop rounds it
            step.mul_(values[start - at.start : part.stop - at.start]).mul_(self._lr)
            p = self._p_N[part]
            if self._decay:
                p.mul_(1 - self._decay)
            p.sub_(step)


class OneBitAdam(FreezingOptimizer[OneBitAdamState]):
    """1-bit Adam as a torch.optim.Optimizer: Adam for `warmup` steps, then 1/32 of fp32's bytes on the wire.

    params: parameters or groups, as torch.optim takes them. betas, eps, weight_decay (decoupled): as in AdamW.
    warmup: uncompressed steps, at least 1; the step after them is the first compressed one. "auto" ends the warm-up
    when the variance has become stable (variance/when_to_freeze.py); total_steps and lr_warmup_steps of the run sharpen
    it.
    refresh: the part of its age after which a frozen variance is brought up to date (variance/refresh.py), or None.
    group: the ranks (None: torch.distributed's default group, or this process alone). model, overlap, max_grad_norm,
    non_finite, full_exchange, topology: as in CheckedOptions (optim.engine.options).
    narrow: which of "variance" and "error_memory" take half of float32's memory, in bfloat16 (docs/algorithms.md,
    "Error memory and variance in bfloat16"); with topology "flat".
    The constructor is collective: it sends rank 0's parameters to all. Raises: ValueError; PeerLost, WireMismatch.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = LR.default,
        betas: tuple[float, float] = BETAS,
        eps: float = EPS.default,
        weight_decay: float = WEIGHT_DECAY.default,
        *,
        narrow: Collection[Narrow] = (),
        **options: Unpack[OneBitOptions],
    ) -> None:
        self.narrow = checked_narrow(narrow, get_args(Narrow))
        super().__init__(params, adam_defaults(lr, betas, eps, weight_decay), **options)

    def make_state(self) -> OneBitAdamState:
        """Empty vectors and error memory."""
        memory = self.reduce.new_memory()
        return OneBitAdamState(
            momentum=Momentum(self.new_vector(), self.reduce, memory),
            v_N=self.new_vector(self.dtype_of("v_N", self.frozen_at)),
            momentum_error=memory,
        )

    def on_freeze(self, floored_N: Tensor, seen: Sequence[int | None]) -> None:
        """As FreezingOptimizer.on_freeze: what a row of few gradients is frozen as."""
        give_touches_(self.vectors.v_N, self.space.g_N, self.space.layout.live, self.hypers(self.num_steps + 1))

    def advance(self, plan: StepPlan, groups: Sequence[AdamHyper]) -> None:
        """One step on this rank, in place.  [Tang et al. 2021, Alg. 1]"""
        s, p_N, g_N = self.vectors, self.space.p_N, self.space.g_N
        if plan.gradient is Wire.FULL:
            self.mean_gradient_()  # g <- mean_i g_i
            seen_N = self.seen_at_refresh()
            m_N = s.momentum.written()
            for h in groups:  # Adam on g
                p, g, m, v = (x[h.span] for x in (p_N, g_N, m_N, s.v_N))
                seen = None if seen_N is None else seen_N[h.span]
                if v.dtype == p.dtype:
                    adam_math.step_(p, g, m, v, h, plan.bias_of(h.seen), seen)
                else:  # a refresh
                    noise = self.variance_noise.at(h.span.start)
                    adam_math.step_narrow_(p, g, m, v, h, plan.bias_of(h.seen), noise, seen)
            return
        self.exchange_(plan)  # m <- compressed_mean_i(beta1 m + (1 - beta1) g_i)
        for h in groups:  # x <- x - lr (m / (sqrt(v) + eps) + wd x)
            self.reduce.result.read(Descent(p_N, s.v_N, h), h.span.start, h.span.stop)
        self.reduce.commit()
        s.momentum.received()
