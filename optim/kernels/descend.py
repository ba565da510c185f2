"""Parameters move along the momentum that received rows say, which is not written as floats.

In one pass on the CPU, and on GPUs that have the kernels; elsewhere as a chain of torch operations: equal to the last
bit, so that replicas stay equal.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.comm.kernels.blocks import BlockTable, RowMemory
from thinwire.comm.kernels.fused_reference import decoded, root
from thinwire.optim.engine.hyperparameters import AdamHyper
from thinwire.optim.kernels import updates

PIECE = 1 << 20
"""Elements for which there is scratch, where a pass is a chain of operations."""


class Descent:
    """x <- x - lr (m / (sqrt v + eps) + wd x) along a received m, in one pass over what was received. A Reader.

    p: float[N], modified where it is read. v: float[N].  Source: Tang et al. 2021, Alg. 1, l. 13.

    The root of v is taken anew in each step. It could be kept in place of v, but v is saved, and goes on in a second
    warm-up: two values of it have one root, so that it could not be had back. The pass waits for memory anyway.
    """

    def __init__(self, p_N: Tensor, v_N: Tensor, h: AdamHyper) -> None:
        self._p_N, self._v_N = p_N, v_N
        self._lr, self._decay, self._eps = h.lr, h.lr * h.weight_decay, h.eps

    def rows(self, at: slice, rows: RowMemory, table: BlockTable) -> None:
        """m as rows of signs."""
        descend_(self._p_N[at], self._v_N[at], rows, self._lr, self._decay, self._eps, table)

    def values(self, at: slice, values: Tensor) -> None:
        """m as floats, 0 where dead."""
        for start in range(at.start, at.stop, PIECE):
            part = slice(start, min(start + PIECE, at.stop))
            step = torch.sqrt(self._v_N[part].to(self._p_N.dtype)).add_(self._eps).reciprocal_()
            step.mul_(values[start - at.start : part.stop - at.start]).mul_(self._lr)
            p = self._p_N[part]
            if self._decay:
                p.mul_(1 - self._decay)
            p.sub_(step)


def descend_(p_c: Tensor, v_c: Tensor, rows: RowMemory, lr: float, decay: float, eps: float, table: BlockTable) -> None:
    """p <- p (1 - decay) - lr (m / (sqrt v + eps)), m being what the rows say; 0 where dead.

    p: float[c], modified. v: float[c], or bfloat16[c] beside float32. decay: lr x weight decay. table: where in the
    rows the blocks of these elements are. Source: Tang et al. 2021, Alg. 1, l. 13.
    """
    if updates.in_one_pass(p_c):
        updates.descend_(p_c, v_c, rows, lr, decay, eps, table)
    else:
        in_torch_(p_c, v_c, rows, lr, decay, eps, table)


def in_torch_(
    p_c: Tensor, v_c: Tensor, rows: RowMemory, lr: float, decay: float, eps: float, table: BlockTable
) -> None:
    """descend_ as a chain of torch operations, on any device and in any float dtype: the definition."""
    step_c = decoded(rows, table).mul_(root(v_c.to(p_c.dtype)).add_(eps).reciprocal_()).mul_(lr)
    if decay:
        p_c.mul_(1 - decay)
    p_c.sub_(step_c)
    p_c[table.dead] = 0
