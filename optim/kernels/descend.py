"""Parameters move along the momentum that received rows say, which is not written as floats.

In one pass on the CPU, and on GPUs that have the kernels; elsewhere as a chain of torch operations: equal to the last
bit, so that replicas stay equal.
"""

from __future__ import annotations

from torch import Tensor

from thinwire.comm.kernels.blocks import BlockTable, RowMemory
from thinwire.comm.kernels.fused_reference import decoded, root
from thinwire.optim.kernels import updates


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
