"""Signs to bits and back, and the scale of a block, in plain torch: what every faster kernel must equal.

Bit order is big-endian in the byte, as numpy.packbits has it; bit 1 is +1. Zero and negative zero are +1: there is
one bit a value and no symbol for zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

Scale = Literal["l2", "l1"]
"""What the scale of a block keeps of it: its 2-norm, as in the papers, or its 1-norm."""


def pack_signs(x: Tensor, out: Tensor) -> None:
    """out[k] <- the signs of x[8k .. 8k+7]. x: float[c], c a multiple of 8; out: uint8[c/8], modified."""
    bits = (x >= 0).view(-1, 8).to(torch.uint8).bitwise_left_shift_(_shifts(x.device))
    torch.sum(bits, dim=1, dtype=torch.uint8, out=out)


def unpack_signs(bits: Tensor, out: Tensor) -> None:
    """out[8k .. 8k+7] <- +1 or -1 as the bits of bits[k] say. bits: uint8[c/8]; out: float[c], modified."""
    out.view(-1, 8).copy_((bits.unsqueeze(1) >> _shifts(bits.device)).bitwise_and_(1))
    out.mul_(2).sub_(1)


def block_rms(x: Tensor, bytes_per_block: Tensor, live_per_block: Tensor) -> Tensor:
    """s_b = ||x_b||_2 / sqrt(live elements of b), the scale that keeps the 2-norm.  [Tang et al. 2021, sec. 4]

    x: float[c], zero where dead; bytes_per_block: int64[b], in bytes of signs; live_per_block: float[b].
    Not finite exactly where a block holds a value that is not, or whose squares overflow.
    """
    return block_sums(x.square(), bytes_per_block).div_(live_per_block).sqrt_()


def block_mean_abs(x: Tensor, bytes_per_block: Tensor, live_per_block: Tensor) -> Tensor:
    """s_b = ||x_b||_1 / live elements of b, the scale that leaves out least: ||x_b||_2^2 (1 - rho^2), rho <= 1.

    Shapes as in block_rms. Not finite exactly where a block holds a value that is not, or whose sum overflows.
    """
    return block_sums(x.abs(), bytes_per_block).div_(live_per_block)


BLOCK_SCALES: dict[Scale, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"l2": block_rms, "l1": block_mean_abs}
"""By the name of what they keep."""


def block_sums(x: Tensor, bytes_per_block: Tensor) -> Tensor:
    """The sum of each block of x. x: float[c]; bytes_per_block: int64[b], adding up to c/8."""
    return torch.segment_reduce(x.view(-1, 8).sum(dim=1), "sum", lengths=bytes_per_block, unsafe=True)


def expand_scales(scales: Tensor, bytes_per_block: Tensor, num_bytes: int) -> Tensor:
    """One scale a byte of signs: float[c/8, 1], to be multiplied into a view of [c/8, 8]."""
    return torch.repeat_interleave(scales, bytes_per_block, output_size=num_bytes).unsqueeze(1)


def _shifts(device: torch.device) -> Tensor:
    """7, 6, ... 0: made on the device, for a copy from the host would wait for it."""
    return torch.arange(7, -1, -1, dtype=torch.uint8, device=device)
