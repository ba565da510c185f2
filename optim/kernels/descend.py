"""Parameters move along the momentum that received rows say, which is not written as floats.

In one pass on the CPU, elsewhere as a chain of torch operations: equal to the last bit, so that replicas stay equal.
"""

from __future__ import annotations

from torch import Tensor

from thinwire.comm.kernels.blocks import BlockTable, RowMemory
from thinwire.comm.kernels.fused_reference import decoded
from thinwire.optim.kernels import updates


def descend_(p_c: Tensor, divisor_c: Tensor, rows: RowMemory, lr: float, decay: float, table: BlockTable) -> None:
    """p <- p (1 - decay) - lr (m D), m being what the rows say and D the divisor, 0 where dead.

    p: float[c], modified. divisor: float[c], 1 / (sqrt v + eps). decay: lr x weight decay. table: where in the rows
    the blocks of these elements are.
    Source: Tang et al. 2021, Alg. 1, l. 13.
    """
    if updates.fits(p_c):
        updates.descend_(p_c, divisor_c, rows, lr, decay, table)
    else:
        in_torch_(p_c, divisor_c, rows, lr, decay, table)


def in_torch_(p_c: Tensor, divisor_c: Tensor, rows: RowMemory, lr: float, decay: float, table: BlockTable) -> None:
    """descend_ as a chain of torch operations, on any device and in any float dtype: the definition."""
    step_c = decoded(rows, table).mul_(divisor_c).mul_(lr)
    if decay:
        p_c.mul_(1 - decay)
    p_c.sub_(step_c)
