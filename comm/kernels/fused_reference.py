"""The fused kernels in plain torch: what each computes, to the last bit, on any device and in any float dtype.

Kept sums: per element c, per block the scale s that was sent for it; the compression error is e = c - s sgn(c), never
stored. sgn(0) = sgn(-0) = +1: the bit is (c >= 0). s = 0 means that nothing was sent and the error is c.

    encode      c' = e + z           s' = sqrt(sum c'^2 / live)    bits' = (c' >= 0)       z: what is added
    advanced    z = keep u + rate (m + w (x - m))
    scaled      z = f (m + w (x - m)), f a factor for each live run, m what the last rows say, over f
    serve       the same with z = the mean of the decoded rows, on the server's chunk

Kept sums may be bfloat16 beside everything else in float32. Then c' = rounded(e + z), which is e + z on average, and
the rows say what is sent of that (bf16.py).

A block whose sum of squares is not finite is not written (c and s stay as they were); its scale in the row is NaN.
Its bits in the row are those of c' all the same. A row's flag says whether all of its scales are finite.

A call is for all rows of a table at once; blocks.py says what a row is. Only their flags, scales and signs are written.

Legend: c elements of a bucket or of one chunk, b their blocks. All tensors are contiguous, and none overlap. Dead
elements stay zero whatever z holds there. Every sum and product is rounded for itself: no fused multiply-add, which
torch uses in add(alpha=...), addcmul and lerp.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from thinwire.comm.kernels import bf16
from thinwire.comm.kernels.added import Added, Advanced, Lerp, MeanOfRows, ScaledLerp, Vector
from thinwire.comm.kernels.bf16 import NONE, Noise
from thinwire.comm.kernels.blocks import BlockTable, Pieces, RowMemory
from thinwire.comm.kernels.reference import pack_signs
from thinwire.comm.layout import BYTE

LANES = 64
"""Partial sums of a sum of squares: enough for 8 registers of 8 floats, and so for adds that do not wait."""


class Kernels:
    """The fused kernels, each called once for a bucket or a chunk: here in plain torch, in subclasses compiled.

    advances: is Advanced formed in the pass that encodes it? Else it takes as much as to form it before.
    """

    advances = False

    def encode(
        self, c_c: Tensor, scale_b: Tensor, z: Added, table: BlockTable, out: RowMemory, noise: Noise = NONE
    ) -> None:
        """c <- e + z; write the rows of it. Their flags may stay as they are, for flag() to write; not those of a mean.

        c, scale: float[c], float[b], modified where finite. out: modified; a row without blocks is left alone.
        noise: what is drawn where c is bfloat16.
        Source of the mean of rows: Tang et al. 2021, Alg. 1, l. 9-10.
        """
        _encode(c_c, scale_b, sum_of(z, table), table, out, noise)
        self.flag(table, out)

    def flag(self, table: BlockTable, out: RowMemory) -> None:
        """Of each row of `out` that has blocks: 1 where all of its scales are finite, else 0. out: modified."""
        bad_b = ~torch.isfinite(out.values_V[table.scale_at])
        before = torch.nn.functional.pad(bad_b.cumsum(0), (1, 0))
        bad_r, blocks_r = before[table.row_starts].diff(), table.row_starts.diff()
        out.bytes_B[table.flag_at] = torch.where(blocks_r > 0, (bad_r == 0).to(torch.uint8), out.bytes_B[table.flag_at])

    def decode(self, rows: RowMemory, table: BlockTable, out_c: Tensor) -> None:
        """out <- s sgn, 0 where dead. out: float[c], modified."""
        out_c.copy_(decoded(rows, table))
        out_c[table.dead] = 0


PLAIN = Kernels()


def decoded(rows: RowMemory, table: BlockTable) -> Tensor:
    """s sgn, float[c], dead elements included."""
    shifts = torch.arange(BYTE - 1, -1, -1, dtype=torch.uint8, device=rows.bytes_B.device)
    bits_B = rows.bytes_B[_bytes_at(table)]
    positive_c = (bits_B.unsqueeze(1) >> shifts).bitwise_and_(1).bool().view(-1)
    return _signed(_per_element(rows.values_V[table.scale_at], table), positive_c)


def require_cover(parts: Sequence[Tensor], table: BlockTable) -> None:
    """Raises: ValueError where the parts hold more or less than the table's elements."""
    if sum(map(Tensor.numel, parts)) != table.numel:
        raise ValueError(f"parts of {[part.numel() for part in parts]} values must cover {table.numel} elements")


def require_factors(factor_r: Tensor, pieces: Pieces, table: BlockTable) -> None:
    """Raises: ValueError where these are not the factors of the layout's live runs, or the pieces of another table."""
    if factor_r.shape != (pieces.num_runs,) or factor_r.dtype != table.live.dtype or not factor_r.is_contiguous():
        raise ValueError(
            f"factors of {factor_r.dtype}{list(factor_r.shape)} must be contiguous {table.live.dtype}"
            f"[{pieces.num_runs}], one for each live run"
        )
    if len(pieces.first) != table.num_blocks + 1:
        raise ValueError(f"pieces of {len(pieces.first) - 1} blocks, of a table with {table.num_blocks}")


def require_rows(rows: RowMemory, num_rows: int, table: BlockTable) -> None:
    """Raises: ValueError where these are not this many rows of the table's one chunk."""
    if table.flag_at.numel() != 1 or rows.bytes_B.numel() != num_rows * table.row_bytes:
        raise ValueError(
            f"{num_rows} rows in {rows.bytes_B.numel()} bytes, of a table with {table.flag_at.numel()} rows of "
            f"{table.row_bytes}: must be that many bytes each, and the table of one chunk in one row"
        )


def root(x_b: Tensor) -> Tensor:
    """The square root, rounded as IEEE 754 asks: on CPUs torch calls MKL, whose last bit is wrong one time in seven."""
    if x_b.device.type != "cpu":
        return x_b.sqrt()
    wide_b = x_b if x_b.dtype == torch.float64 else x_b.float()
    return torch.from_numpy(np.sqrt(wide_b.numpy())).to(x_b.dtype)


def sum_of(z: Added, table: BlockTable) -> Tensor:
    """z, float[c]. Not to be modified."""
    match z:
        case Vector(x_c):
            return x_c
        case MeanOfRows(rows, num_rows):
            return _mean(rows, num_rows, table)
        case Lerp(x_parts, weight, last):
            require_cover(x_parts, table)
            m_c = decoded(last, table)
            return (_joined(x_parts, m_c) - m_c).mul_(weight).add_(m_c)
        case ScaledLerp(x_parts, weight, last, factor_r, pieces):
            require_cover(x_parts, table)
            require_factors(factor_r, pieces, table)
            factor_c = pieces.spread(factor_r)
            m_c = decoded(last, table).div_(factor_c)
            return (_joined(x_parts, m_c) - m_c).mul_(weight).add_(m_c).mul_(factor_c)

        case Advanced(x_parts, m_c, u_c, weight, rate, keep, lost):
            require_cover(x_parts, table)
            z_c = (_joined(x_parts, m_c) - m_c).mul_(weight).add_(m_c).mul_(rate)
            return torch.where(lost, torch.nan, z_c if u_c is None else z_c.add_(u_c * keep))


def _encode(c_c: Tensor, scale_b: Tensor, z_c: Tensor, table: BlockTable, out: RowMemory, noise: Noise) -> None:
    new_c = (c_c - _signed(_per_element(scale_b, table), c_c >= 0)) + z_c
    if _is_narrowed(c_c, table):
        new_c = bf16.rounded(new_c, noise)
    new_c[table.dead] = 0
    sum_b = _sums_of_squares(new_c, table)
    finite_b = torch.isfinite(sum_b)
    new_scale_b = root(sum_b / table.live)
    bits_B = torch.empty(table.numel // BYTE, dtype=torch.uint8, device=c_c.device)
    pack_signs(new_c, bits_B)
    out.bytes_B[_bytes_at(table)] = bits_B
    out.values_V[table.scale_at] = new_scale_b.masked_fill(~finite_b, torch.nan)
    scale_b.copy_(torch.where(finite_b, new_scale_b, scale_b))
    c_c.copy_(torch.where(_per_element(finite_b, table), new_c, c_c))


def _is_narrowed(c_c: Tensor, table: BlockTable) -> bool:
    return c_c.dtype == torch.bfloat16 and table.live.dtype == torch.float32


def _joined(x_parts: Sequence[Tensor], like: Tensor) -> Tensor:
    """float[c] of all parts; from bfloat16 that is exact."""
    wide = [x_c.to(like.dtype) for x_c in x_parts]
    return wide[0] if len(wide) == 1 else torch.cat(wide)


def _mean(rows: RowMemory, num_rows: int, table: BlockTable) -> Tensor:
    require_rows(rows, num_rows, table)
    mean_c = torch.zeros(table.numel, dtype=rows.values_V.dtype, device=rows.values_V.device)
    for begin in range(0, num_rows * table.row_bytes, table.row_bytes):
        row = RowMemory.of(rows.bytes_B[begin : begin + table.row_bytes], mean_c.dtype)
        mean_c += decoded(row, table)
    return mean_c.div_(mean_c.new_full((1,), num_rows))  # by a number, CUDA takes the reciprocal: another last bit


def _bytes_at(table: BlockTable) -> Tensor:
    """Where in RowMemory.bytes_B the signs of each 8 elements are: int64[c/8]."""
    shift_b = table.bits_at - table.starts[:-1] // BYTE
    return _per_byte(shift_b, table) + torch.arange(table.numel // BYTE, dtype=torch.int64, device=table.starts.device)


def _signed(size_c: Tensor, positive_c: Tensor) -> Tensor:
    return torch.where(positive_c, size_c, -size_c)


def _per_byte(value_b: Tensor, table: BlockTable) -> Tensor:
    return torch.repeat_interleave(value_b, table.starts.diff() // BYTE, output_size=table.numel // BYTE)


def _per_element(value_b: Tensor, table: BlockTable) -> Tensor:
    return _per_byte(value_b, table).unsqueeze(1).expand(-1, BYTE).reshape(-1)


def _sums_of_squares(x_c: Tensor, table: BlockTable) -> Tensor:
    """The sum of each block: lane l adds x[64 k + l]^2 over k, then lanes fold in halves: 32 + 32, 16 + 16, ... 1 + 1.

    A block's end is padded with zeros, which change nothing. All blocks are padded to the largest.
    """
    steps = -(-table.largest // LANES)
    at = table.starts[:-1, None] + torch.arange(steps * LANES, dtype=torch.int64, device=x_c.device)
    inside = at < table.starts[1:, None]
    padded = torch.where(inside, x_c[at.clamp_(max=max(table.numel - 1, 0))], 0)
    lanes_bl = torch.zeros((table.num_blocks, LANES), dtype=x_c.dtype, device=x_c.device)
    for x_bl in padded.square_().view(table.num_blocks, steps, LANES).unbind(1):
        lanes_bl += x_bl
    half = LANES // 2
    while half:
        lanes_bl = lanes_bl[:, :half] + lanes_bl[:, half:]
        half //= 2
    return lanes_bl.squeeze(1)
