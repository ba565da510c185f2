"""The fused kernels in plain torch: what each computes, to the last bit, on any device and in any float dtype.

Kept sums: per element c, per block the scale s that was sent for it; the compression error is e = c - s sgn(c), never
stored. sgn(0) = sgn(-0) = +1: the bit is (c >= 0). s = 0 means that nothing was sent and the error is c.

    encode      c' = e + z           s' = sqrt(sum c'^2 / live)    bits' = (c' >= 0)       z: what a worker adds
    serve       the same with z = the mean of the decoded rows, on the server's chunk
    undo        c = c' - z, s = 0    exact to rounding

A block whose sum of squares is not finite is not written (c and s stay as they were); its scale in the row is NaN.
Its bits in the row are those of c' all the same.

Legend: c elements of a chunk, b its blocks, B = c/8 bytes of signs, n ranks. All tensors are contiguous but in_*_nb,
whose rows are, and none overlap. Dead elements stay zero whatever z holds there. Every sum and product is rounded for
itself: no fused multiply-add, which torch uses in add(alpha=...), addcmul and lerp.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from thinwire.comm.kernels.blocks import BlockTable
from thinwire.comm.kernels.reference import pack_signs
from thinwire.comm.layout import BYTE

LANES = 64
"""Partial sums of a sum of squares: enough for 8 registers of 8 floats, and so for adds that do not wait."""


def encode_sum(
    c_c: Tensor, scale_b: Tensor, x_c: Tensor, table: BlockTable, out_scale_b: Tensor, out_bits_B: Tensor
) -> None:
    """c <- e + x; write the row of it.

    c, scale: float[c], float[b], modified where finite. x: float[c]. out_scale: float[b], out_bits: uint8[B], modified.
    """
    _encode(c_c, scale_b, x_c, table, out_scale_b, out_bits_B)


def encode_momentum(
    c_c: Tensor,
    scale_b: Tensor,
    g_parts: Sequence[Tensor],
    beta1: float,
    m_scale_b: Tensor,
    m_bits_B: Tensor,
    m_table: BlockTable,
    table: BlockTable,
    out_scale_b: Tensor,
    out_bits_B: Tensor,
) -> None:
    """c <- e + beta1 m + (1 - beta1) g, m being the last received row of this chunk; write the row of it.

    The new momentum is rounded as m + (1 - beta1) (g - m). m_table is table: an owner's row has the chunk's blocks.
    Shapes as in encode_sum; g_parts: float[c] in vectors that lie end to end, each of whole blocks; m_scale: float[b],
    m_bits: uint8[B]. Source: Tang et al. 2021, Alg. 1, l. 6-8.
    """
    require_same(m_table, table)
    g_c = _joined(g_parts, table)
    _encode(c_c, scale_b, _momentum(g_c, beta1, m_scale_b, m_bits_B, table), table, out_scale_b, out_bits_B)


def serve(
    b_c: Tensor,
    scale_b: Tensor,
    in_scale_nb: Tensor,
    in_bits_nB: Tensor,
    table: BlockTable,
    out_scale_b: Tensor,
    out_bits_B: Tensor,
) -> None:
    """b <- mean of the n decoded rows, in rank order, + e; write the row of it.

    b, scale: the server's kept sums, modified where finite. in_scale: float[n, b], in_bits: uint8[n, B]: views of the
    received rows. out_scale: float[b], out_bits: uint8[B], modified. Source: Tang et al. 2021, Alg. 1, l. 9-10.
    """
    _encode(b_c, scale_b, _mean(in_scale_nb, in_bits_nB, table), table, out_scale_b, out_bits_B)


def decode(scale_b: Tensor, bits_B: Tensor, table: BlockTable, out_c: Tensor) -> None:
    """out <- s sgn, 0 where dead. scale: float[b]; bits: uint8[B]; out: float[c], modified."""
    out_c.copy_(_decoded(scale_b, bits_B, table))
    out_c[table.dead] = 0


def descend(
    p_c: Tensor, divisor_c: Tensor, scale_b: Tensor, bits_B: Tensor, lr: float, decay: float, table: BlockTable
) -> None:
    """p <- p (1 - decay) - lr (m D), m being the received row and D the divisor, 0 where dead.

    p: float[c], modified. divisor: float[c], 1 / (sqrt v + eps). decay: lr x weight decay.
    Source: Tang et al. 2021, Alg. 1, l. 13.
    """
    step_c = _decoded(scale_b, bits_B, table).mul_(divisor_c).mul_(lr)
    if decay:
        p_c.mul_(1 - decay)
    p_c.sub_(step_c)


def undo_sum(c_c: Tensor, scale_b: Tensor, x_c: Tensor, written_scale_b: Tensor, table: BlockTable) -> None:
    """Take an encode_sum back, where the row's scale says that a block was written: c <- c - x, s <- 0."""
    _undo(c_c, scale_b, x_c, written_scale_b, table)


def undo_momentum(
    c_c: Tensor,
    scale_b: Tensor,
    g_parts: Sequence[Tensor],
    beta1: float,
    m_scale_b: Tensor,
    m_bits_B: Tensor,
    written_scale_b: Tensor,
    table: BlockTable,
) -> None:
    """Take an encode_momentum back; m and g as they were then."""
    g_c = _joined(g_parts, table)
    _undo(c_c, scale_b, _momentum(g_c, beta1, m_scale_b, m_bits_B, table), written_scale_b, table)


def undo_serve(
    b_c: Tensor, scale_b: Tensor, in_scale_nb: Tensor, in_bits_nB: Tensor, written_scale_b: Tensor, table: BlockTable
) -> None:
    """Take a serve back; the received rows as they were then."""
    _undo(b_c, scale_b, _mean(in_scale_nb, in_bits_nB, table), written_scale_b, table)


def all_finite(scale_b: Tensor) -> Tensor:
    """Whether every block was written: a 0-dim bool on the device, for the flag of the row."""
    return torch.isfinite(scale_b).all()


def require_cover(parts: Sequence[Tensor], table: BlockTable) -> None:
    """Raises: ValueError where the parts hold more or less than the chunk."""
    if sum(part.numel() for part in parts) != table.numel:
        raise ValueError(f"parts of {[part.numel() for part in parts]} values must cover a chunk of {table.numel}")


def require_same(m_table: BlockTable, table: BlockTable) -> None:
    """Raises: ValueError where the momentum's row is cut otherwise than the chunk."""
    if m_table is not table:
        raise ValueError(f"m_table has {m_table.num_blocks} blocks and is not table: pass the table of the chunk twice")


def _encode(
    c_c: Tensor, scale_b: Tensor, z_c: Tensor, table: BlockTable, out_scale_b: Tensor, out_bits_B: Tensor
) -> None:
    new_c = (c_c - _signed(_per_element(scale_b, table), c_c >= 0)) + z_c
    new_c[table.dead] = 0
    sum_b = _sums_of_squares(new_c, table)
    finite_b = torch.isfinite(sum_b)
    new_scale_b = _root(sum_b / table.live)
    pack_signs(new_c, out_bits_B)
    out_scale_b.copy_(new_scale_b.masked_fill(~finite_b, torch.nan))
    scale_b.copy_(torch.where(finite_b, new_scale_b, scale_b))
    c_c.copy_(torch.where(_per_element(finite_b, table), new_c, c_c))


def _undo(c_c: Tensor, scale_b: Tensor, z_c: Tensor, written_scale_b: Tensor, table: BlockTable) -> None:
    written_b = ~torch.isnan(written_scale_b)
    c_c.copy_(torch.where(_per_element(written_b, table), c_c - z_c, c_c))
    c_c[table.dead] = 0
    scale_b.masked_fill_(written_b, 0)


def _joined(parts: Sequence[Tensor], table: BlockTable) -> Tensor:
    require_cover(parts, table)
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _momentum(g_c: Tensor, beta1: float, m_scale_b: Tensor, m_bits_B: Tensor, table: BlockTable) -> Tensor:
    m_c = _decoded(m_scale_b, m_bits_B, table)
    return (g_c - m_c).mul_(1 - beta1).add_(m_c)


def _mean(in_scale_nb: Tensor, in_bits_nB: Tensor, table: BlockTable) -> Tensor:
    mean_c = torch.zeros(in_bits_nB.shape[1] * BYTE, dtype=in_scale_nb.dtype, device=in_scale_nb.device)
    for scale_b, bits_B in zip(in_scale_nb, in_bits_nB, strict=True):
        mean_c += _decoded(scale_b, bits_B, table)
    return mean_c.div_(in_scale_nb.shape[0])


def _decoded(scale_b: Tensor, bits_B: Tensor, table: BlockTable) -> Tensor:
    """S sgn, dead elements included."""
    shifts = torch.arange(BYTE - 1, -1, -1, dtype=torch.uint8, device=bits_B.device)
    positive_c = (bits_B.unsqueeze(1) >> shifts).bitwise_and_(1).bool().view(-1)
    return _signed(_per_element(scale_b, table), positive_c)


def _signed(size_c: Tensor, positive_c: Tensor) -> Tensor:
    return torch.where(positive_c, size_c, -size_c)


def _per_element(value_b: Tensor, table: BlockTable) -> Tensor:
    per_byte_B = torch.repeat_interleave(value_b, table.starts.diff() // BYTE, output_size=table.numel // BYTE)
    return per_byte_B.unsqueeze(1).expand(-1, BYTE).reshape(-1)


def _sums_of_squares(x_c: Tensor, table: BlockTable) -> Tensor:
    """The sum of each block: lane l adds x[64 k + l]^2 over k, then lanes fold in halves: 32 + 32, 16 + 16, ... 1 + 1.

    A block's end is padded with zeros, which change nothing. All blocks are padded to the largest.
    """
    steps = -(-table.largest // LANES)
    at = table.starts[:-1, None] + torch.arange(steps * LANES, device=x_c.device)
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


def _root(x_b: Tensor) -> Tensor:
    """The square root, rounded as IEEE 754 asks: on CPUs torch calls MKL, whose last bit is wrong one time in seven."""
    if x_b.device.type != "cpu":
        return x_b.sqrt()
    wide_b = x_b if x_b.dtype == torch.float64 else x_b.float()
    return torch.from_numpy(np.sqrt(wide_b.numpy())).to(x_b.dtype)
