"""The kernels of 8-bit values for vectors on the CPU: the loops of int8_loops on views of torch's memory."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.comm.kernels import int8_loops


def encode(x_c: Tensor, scale_b: Tensor, q_c: Tensor, block: int) -> Tensor:
    """As int8_reference.encode."""
    bits_c = x_c.view(torch.int32 if x_c.element_size() == 4 else torch.int64)
    arrays = x_c.numpy(), bits_c.numpy(), scale_b.numpy(), q_c.numpy()
    return torch.tensor(int8_loops.encode(0, scale_b.numel(), *arrays, block))


def decode(scale_b: Tensor, q_c: Tensor, out_c: Tensor, block: int) -> None:
    """As int8_reference.decode."""
    int8_loops.decode(0, scale_b.numel(), scale_b.numpy(), q_c.numpy(), out_c.numpy(), block)


def add(scale_b: Tensor, q_c: Tensor, out_c: Tensor, block: int) -> None:
    """As int8_reference.add."""
    int8_loops.add(0, scale_b.numel(), scale_b.numpy(), q_c.numpy(), out_c.numpy(), block)


def left_out(scale_b: Tensor, q_c: Tensor, x_c: Tensor, out_c: Tensor, block: int) -> None:
    """As int8_reference.left_out."""
    int8_loops.left_out(0, scale_b.numel(), scale_b.numpy(), q_c.numpy(), x_c.numpy(), out_c.numpy(), block)
