"""What a kernel adds to kept sums, z: c <- e + z. Each kind has a loop, and a CUDA kernel, of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from thinwire.comm.kernels.blocks import Pieces, RowMemory


class Vector(NamedTuple):
    """z = x.  x: float[c]."""

    x_c: Tensor


class Lerp(NamedTuple):
    """z = m + weight (x - m), m being the values that the rows in `last` say.

    x_parts: float[c] in vectors that lie end to end, each of whole blocks, in the dtype of the scales or in bfloat16.
    last: rows of the same table.
    """

    x_parts: Sequence[Tensor]
    weight: float
    last: RowMemory


class ScaledLerp(NamedTuple):
    """z = f (m + weight (x - m)), f m being the values that the rows in `last` say.

    The first three as in Lerp. factor: float[live runs], each f. pieces: of the same table.
    """

    x_parts: Sequence[Tensor]
    weight: float
    last: RowMemory
    factor_r: Tensor
    pieces: Pieces


class Advanced(NamedTuple):
    """z = rate (m + weight (x - m)), + keep u where u is not None; NaN where `lost` holds, a bool of no dimension.

    x_parts: as in Lerp. m, u: float[c].
    """

    x_parts: Sequence[Tensor]
    m_c: Tensor
    u_c: Tensor | None
    weight: float
    rate: float
    keep: float
    lost: Tensor


class MeanOfRows(NamedTuple):
    """z = the mean of the decoded rows, in rank order.

    rows: just them, row r at byte r * table.row_bytes of a table that is one chunk in one row and begins at byte 0.
    """

    rows: RowMemory
    num_rows: int


Added = Vector | Lerp | ScaledLerp | Advanced | MeanOfRows
