"""Where is the momentum of the compressed phase? In the rows that all ranks have received; as floats when asked for.

After a compressed exchange m is what the rows say, a bit and a bit an element. The next step forms its momentum from
them, and the parameters descend along them, so that float m is neither read nor written in a step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.comm.exchange.kept_sums import KeptSums
from thinwire.comm.layout import VectorLayout
from thinwire.comm.protocol import BucketedReducer
from thinwire.optim.engine.hyperparameters import AdamHyper


class Momentum:
    """M of all ranks: float[N], or the last result of the reducer where that is newer.

    reduce, slot: whose results; None where nothing is exchanged by bucket: then m is always the floats.
    """

    def __init__(self, like_N: Tensor, reduce: BucketedReducer | None, slot: KeptSums | None) -> None:
        self._reduce = reduce
        self._slot = slot
        self._m_N = torch.zeros_like(like_N)
        self._decoded = True

    @property
    def in_rows(self) -> bool:
        """Do the reducer's rows say what m is, so that the next exchange may begin from them?"""
        return self._reduce is not None and self._slot is not None and self._reduce.has_momentum(self._slot)

    @property
    def buffer_N(self) -> Tensor:
        """The memory of the floats, for views; true after floats()."""
        return self._m_N

    def received(self) -> None:
        """The reducer has a new result: the floats are old."""
        self._decoded = False

    def floats(self) -> Tensor:
        """M as float[N], brought up to date. May be written in warm-up and by who restores the slot.

        Call it before slot.restore(), after which rows are no momentum any more.
        """
        if not self._decoded and self._reduce is not None and self._slot is not None:
            self._reduce.momentum_(self._slot, self._m_N)
            self._decoded = True
        return self._m_N


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
    """Z <- m + (1 - beta1) (g - m), rounded as the fused kernels do it: without a fused multiply-add."""
    torch.sub(g_N, m_N, out=z_N)
    z_N.mul_(1 - beta1).add_(m_N)
