"""The kernels of 8-bit values for vectors on the CPU: loops over the runs [first, stop) of a chunk, compiled by numba.

float32 and float64, on views of torch's memory. int8_reference says what each computes; these are equal to it bit for
bit. Each value is read from memory once: a run stays in the cache between the search for its largest value and its
encoding. The largest is looked for among the bits of |x|, which are ordered as the values are, with infinities and NaN
above all numbers. Loops run over views of a run that begin at 0: where an index might be negative the compiler makes
one element at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic
from torch import Tensor

from thinwire.comm.kernels.compiled import Array, compiled

_LEVELS = 127
_LEAST = 2.0**-100
_MAGIC_32 = 12582912.0  # 1.5 2^23: adding it rounds a float32 to a whole number, ties to even
_MAGIC_64 = 6755399441055744.0  # 1.5 2^52


def encode(x_c: Tensor, scale_b: Tensor, q_c: Tensor, block: int) -> Tensor:
    """As int8_reference.encode."""
    arrays = x_c.numpy(), _bits(x_c).numpy(), scale_b.numpy(), q_c.numpy()
    return torch.tensor(_encode_runs(0, scale_b.numel(), *arrays, block), dtype=torch.bool, device="cpu")


def encode_left(x_c: Tensor, error_c: Tensor, left_c: Tensor, scale_b: Tensor, q_c: Tensor, block: int) -> Tensor:
    """As int8_reference.encode_left."""
    arrays = x_c.numpy(), error_c.numpy(), left_c.numpy(), _bits(left_c).numpy(), scale_b.numpy(), q_c.numpy()
    return torch.tensor(_encode_left_runs(0, scale_b.numel(), *arrays, block), dtype=torch.bool, device="cpu")


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
    finite = _mean_left_runs(
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
    return torch.tensor(finite, dtype=torch.bool, device="cpu")


def decode(scale_b: Tensor, q_c: Tensor, out_c: Tensor, block: int) -> None:
    """As int8_reference.decode."""
    _decode_runs(0, scale_b.numel(), scale_b.numpy(), q_c.numpy(), out_c.numpy(), block)


def _bits(x_c: Tensor) -> Tensor:
    """The same memory as whole numbers."""
    return x_c.view(torch.int32 if x_c.element_size() == 4 else torch.int64)


@intrinsic  # type: ignore[untyped-decorator]
def _as_float(typingctx: Any, bits: Any, like: Any) -> Any:
    """The number of the dtype of the array `like` that has these bits, a whole number of 64."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        own = builder.trunc(args[0], ir.IntType(like.dtype.bitwidth)) if like.dtype.bitwidth < 64 else args[0]
        return builder.bitcast(own, context.get_value_type(like.dtype))

    return like.dtype(types.int64, like), codegen


@compiled
def _encode_runs(first: int, stop: int, x: Array, x_bits: Array, scale: Array, q: Array, block: int) -> bool:
    """Write scales and whole numbers. x_bits: the memory of x as whole numbers of its width. Returns if all finite."""
    magic = x.dtype.type(_MAGIC_32 if x.itemsize == 4 else _MAGIC_64)
    below = x_bits.dtype.type(0x7FFFFFFF if x.itemsize == 4 else 0x7FFFFFFFFFFFFFFF)
    finite = True
    for run in range(first, stop):
        low, high = run * block, (run + 1) * block
        of_x, bits, numbers = x[low:high], x_bits[low:high], q[low:high]
        most = x_bits.dtype.type(0)
        for at in range(bits.size):
            most = max(most, bits[at] & below)
        peak = _as_float(np.int64(most), x)
        if peak >= _LEAST:  # NaN is not
            by = x.dtype.type(_LEVELS) / peak
            scale[run] = peak / x.dtype.type(_LEVELS)
            finite &= np.isfinite(scale[run])
            for at in range(of_x.size):
                numbers[at] = np.int8(np.int32((of_x[at] * by + magic) - magic))
        else:
            finite &= peak < _LEAST
            scale[run] = 0
            numbers[:] = 0
    return finite


@compiled
def _encode_left_runs(
    first: int,
    stop: int,
    x: Array,
    error: Array,
    left: Array,
    left_bits: Array,
    scale: Array,
    q: Array,
    block: int,
) -> bool:
    """As _encode_runs of x + error; left <- x + error - s q. left_bits: the memory of left, as x_bits."""
    finite = True
    for run in range(first, stop):
        low, high = run * block, (run + 1) * block
        of_x, of_error, to = x[low:high], error[low:high], left[low:high]
        for at in range(to.size):
            to[at] = of_x[at] + of_error[at]
        finite &= _encode_runs(run, run + 1, left, left_bits, scale, q, block)
        s, numbers = left.dtype.type(scale[run]), q[low:high]
        for at in range(to.size):
            to[at] -= s * left.dtype.type(numbers[at])
    return finite


@compiled
def _mean_left_runs(
    first: int,
    stop: int,
    scales: Array,
    numbers: Array,
    num_rows: int,
    row_bytes: int,
    error: Array,
    left: Array,
    left_bits: Array,
    scale: Array,
    q: Array,
    block: int,
) -> bool:
    """As _encode_runs of the mean of rows + error; left <- mean + error - s q. Without an error: mean.

    scales, numbers: from the first row's on to the end of all rows, which are row_bytes apart. error: empty for none.
    """
    finite, has_error = True, error.size > 0
    count = left.dtype.type(num_rows)
    for run in range(first, stop):
        low, high = run * block, min((run + 1) * block, left.size)
        to = left[low:high]
        to[:] = 0
        for row in range(num_rows):
            at_row = row * row_bytes
            s, of_row = left.dtype.type(scales[at_row // 4 + run]), numbers[at_row + low : at_row + high]
            for at in range(to.size):
                to[at] += s * left.dtype.type(of_row[at])
        for at in range(to.size):
            to[at] /= count
        if has_error:
            of_error = error[low:high]
            for at in range(to.size):
                to[at] += of_error[at]
        finite &= _encode_runs(run, run + 1, left, left_bits, scale, q, block)
        if has_error:
            s, served = left.dtype.type(scale[run]), q[low:high]
            for at in range(to.size):
                to[at] -= s * left.dtype.type(served[at])
    return finite


@compiled
def _decode_runs(first: int, stop: int, scale: Array, q: Array, out: Array, block: int) -> None:
    """out <- s q."""
    for run in range(first, stop):
        low, high = run * block, (run + 1) * block
        s, to, numbers = out.dtype.type(scale[run]), out[low:high], q[low:high]
        for at in range(to.size):
            to[at] = s * out.dtype.type(numbers[at])
