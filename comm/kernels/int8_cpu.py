"""The kernels of 8-bit values for vectors on the CPU: the loops of int8_loops on views of torch's memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.comm.kernels import int8_loops


def encode(x_c: Tensor, scale_b: Tensor, q_c: Tensor, block: int) -> Tensor:
    """As int8_reference.encode."""
    arrays = x_c.numpy(), _bits(x_c).numpy(), scale_b.numpy(), q_c.numpy()
    return torch.tensor(int8_loops.encode(0, scale_b.numel(), *arrays, block))


def encode_left(x_c: Tensor, error_c: Tensor, left_c: Tensor, scale_b: Tensor, q_c: Tensor, block: int) -> Tensor:
    """As int8_reference.encode_left."""
    arrays = x_c.numpy(), error_c.numpy(), left_c.numpy(), _bits(left_c).numpy(), scale_b.numpy(), q_c.numpy()
    return torch.tensor(int8_loops.encode_left(0, scale_b.numel(), *arrays, block))


def mean_left(
    rows: Sequence[tuple[Tensor, Tensor]],
    error_c: Tensor | None,
    left_c: Tensor,
    scale_b: Tensor,
    q_c: Tensor,
    block: int,
) -> Tensor:
    """As int8_reference.mean_left. rows: views of one tensor uint8[n, row_bytes], contiguous."""
    (scales, numbers), length = rows[0], 0
    if len(rows) > 1:
        length = rows[-1][1].data_ptr() - numbers.data_ptr()
    every = scales.as_strided((length // 4 + len(scales),), (1,)), numbers.as_strided((length + len(numbers),), (1,))
    apart = length // max(len(rows) - 1, 1)
    error = left_c[:0] if error_c is None else error_c
    finite = int8_loops.mean_left(
        0,
        len(scale_b),
        every[0].numpy(),
        every[1].numpy(),
        len(rows),
        apart,
        error.numpy(),
        left_c.numpy(),
        _bits(left_c).numpy(),
        scale_b.numpy(),
        q_c.numpy(),
        block,
    )
    return torch.tensor(finite)


def decode(scale_b: Tensor, q_c: Tensor, out_c: Tensor, block: int) -> None:
    """As int8_reference.decode."""
    int8_loops.decode(0, scale_b.numel(), scale_b.numpy(), q_c.numpy(), out_c.numpy(), block)


def _bits(x_c: Tensor) -> Tensor:
    """The same memory as whole numbers."""
    return x_c.view(torch.int32 if x_c.element_size() == 4 else torch.int64)
