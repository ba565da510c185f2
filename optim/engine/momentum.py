"""Where is the momentum of the compressed phase? In what all ranks have received; as floats when asked for.

After a compressed exchange m is what the rows say: a sign an element, a scale a block. The next step forms its momentum
from that, and the parameters descend along it, so that float m is neither read nor written in a step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.comm.kernels.blocks import BlockTable, RowMemory
from thinwire.comm.layout import VectorLayout
from thinwire.comm.protocol import ErrorMemory, Reducer
from thinwire.optim.engine.hyperparameters import AdamHyper
from thinwire.optim.kernels.descend import descend_


class Momentum:
    """m of all ranks: float[N], or the last result of the reducer where that is newer. memory: of its exchanges."""

    def __init__(self, like_N: Tensor, reduce: Reducer, memory: ErrorMemory) -> None:
        self._reduce = reduce
        self._memory = memory
        self._m_N = torch.zeros_like(like_N)
        self._decoded = True
        self._version = -1
        """Of the floats when they were decoded."""

    @property
    def is_last_result(self) -> bool:
        """Does the reducer hold what m is, so that the next exchange may begin from that?"""
        return self._reduce.last(self._memory) is not None

    @property
    def buffer_N(self) -> Tensor:
        """The memory of the floats, for views; true after floats()."""
        return self._m_N

    def refuse_written(self) -> None:
        """Raises: RuntimeError where the floats were written, and the next exchange begins from what was received."""
        if self._decoded and self.is_last_result and self._m_N._version != self._version:
            raise RuntimeError(
                "optimizer.state[p]['exp_avg'] was written after the warm-up, where the momentum is what all ranks "
                "have received, and the state only shows it. Do not write to it; to begin moments anew, make the "
                "optimizer anew"
            )

    def received(self) -> None:
        """The reducer has a new result: the floats are old."""
        self._decoded = False

    def floats(self) -> Tensor:
        """m as float[N], brought up to date. May be written in warm-up and by who restores the error memory.

        Call it before memory.restore(), after which a result is no momentum any more.
        """
        if not self._decoded:
            last = self._reduce.last(self._memory)
            if last is None:
                raise RuntimeError("the momentum was in rows that no longer count: read it before memory.restore()")
            last.decode_(self._m_N)
            self._decoded, self._version = True, self._m_N._version
        return self._m_N


class Descent:
    """x <- x - lr (m D + wd x) along a received m, in one pass over what was received. A Reader.

    p: float[N], modified where it is read. divisor: D, float[N].  Source: Tang et al. 2021, Alg. 1, l. 13.
    """

    def __init__(self, p_N: Tensor, divisor_N: Tensor, h: AdamHyper) -> None:
        self._p_N, self._divisor_N = p_N, divisor_N
        self._lr, self._decay = h.lr, h.lr * h.weight_decay

    def rows(self, at: slice, rows: RowMemory, table: BlockTable) -> None:
        """m as rows of signs."""
        descend_(self._p_N[at], self._divisor_N[at], rows, self._lr, self._decay, table)

    def values(self, at: slice, values: Tensor) -> None:
        """m as floats."""
        p = self._p_N[at]
        if self._decay:
            p.mul_(1 - self._decay)
        p.sub_(torch.mul(values, self._divisor_N[at]).mul_(self._lr))


class Divisor:
    """D = 1 / (sqrt v + eps) of a frozen v, 0 where dead; made when v or eps have changed.

    memory: float[N], its own while v stays as it is.
    """

    def __init__(self, layout: VectorLayout, memory_N: Tensor) -> None:
        self._dead = torch.tensor(layout.dead(0, layout.numel), dtype=torch.int64, device=memory_N.device)
        self._divisor_N = memory_N
        self._made_of: tuple[int, tuple[float, ...]] | None = None

    def of(self, v_N: Tensor, groups: Sequence[AdamHyper]) -> Tensor:
        """D, float[N]. v: float[N], always the same tensor."""
        made_of = v_N._version, tuple(h.eps for h in groups)
        if made_of != self._made_of:
            for h in groups:
                torch.sqrt(v_N[h.span], out=self._divisor_N[h.span])
                self._divisor_N[h.span].add_(h.eps).reciprocal_()
            self._divisor_N[self._dead] = 0
            self._made_of = made_of
        return self._divisor_N


def next_momentum_(z_N: Tensor, m_N: Tensor, g_N: Tensor, beta1: float) -> None:
    """z <- m + (1 - beta1) (g - m), rounded as the fused kernels do it: without a fused multiply-add."""
    torch.sub(g_N, m_N, out=z_N)
    z_N.mul_(1 - beta1).add_(m_N)
