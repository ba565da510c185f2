"""The fused kernels as loops over the blocks [first, stop) of a chunk, compiled by numba: float32 and float64.

fused_reference says what each computes; these are equal to it bit for bit, for nothing is contracted or reassociated.

A block is read from memory once. Its new sums are formed in `new`, scratch that stays in the cache, because whether
they may be written is known only when all of them have been squared and added; then they are packed, and copied.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from thinwire.comm.kernels.compiled import Array, compiled
from thinwire.comm.kernels.vectors import (
    BYTE,
    QUAD,
    WORD,
    folded,
    load8,
    load8_from,
    load64,
    load_bits,
    signed_as,
    signed_by_bits,
    signed_by_word,
    splat8,
    store,
    store_signs,
    zeros64,
)


class Blocks(NamedTuple):
    """A BlockTable as arrays."""

    starts: Array
    live: Array
    dead: Array
    dead_starts: Array


class Rows(NamedTuple):
    """The received rows, scales and bits each as one vector that has a row every `*_stride` numbers."""

    scales: Array
    scale_stride: int
    bits: Array
    bits_stride: int
    num_rows: int


@compiled
def encode_sum(
    first: int,
    stop: int,
    c: Array,
    scale: Array,
    x: Array,
    blocks: Blocks,
    out_scale: Array,
    out_bits: Array,
    new: Array,
) -> None:
    """C <- e + x. new: scratch, float[largest + 64]."""
    for block in range(first, stop):
        low, high = blocks.starts[block], blocks.starts[block + 1]
        sent = splat8(scale[block])
        for at in range(low, high, BYTE):
            kept = load8(c, at)
            store(new, at - low, kept - signed_as(kept, sent) + load8(x, at))
        _finish(block, new, blocks, c, scale, out_scale, out_bits)


@compiled
def encode_momentum(
    first: int,
    stop: int,
    c: Array,
    scale: Array,
    g: Array,
    weight: float,
    m_scale: Array,
    m_bits: Array,
    blocks: Blocks,
    out_scale: Array,
    out_bits: Array,
    new: Array,
) -> None:
    """C <- e + m + weight (g - m). g: int64[b], where in memory each block of it begins."""
    weights = splat8(weight)
    for block in range(first, stop):
        low, high = blocks.starts[block], blocks.starts[block + 1]
        sent, m_size, minus = splat8(scale[block]), splat8(m_scale[block]), splat8(-m_scale[block])
        whole = low + (high - low) // QUAD * QUAD
        for quad in range(low, whole, QUAD):
            word = load_bits(m_bits, quad // BYTE)
            for byte in range(QUAD // BYTE):
                at = quad + byte * BYTE
                kept = load8(c, at)
                z = _momentum(load8_from(g[block], at - low, c), weights, signed_by_word(word, byte, minus))
                store(new, at - low, kept - signed_as(kept, sent) + z)
        for at in range(whole, high, BYTE):
            kept = load8(c, at)
            z = _momentum(load8_from(g[block], at - low, c), weights, signed_by_bits(m_bits[at // BYTE], m_size))
            store(new, at - low, kept - signed_as(kept, sent) + z)
        _finish(block, new, blocks, c, scale, out_scale, out_bits)


@compiled
def serve(
    first: int,
    stop: int,
    b: Array,
    scale: Array,
    rows: Rows,
    blocks: Blocks,
    out_scale: Array,
    out_bits: Array,
    new: Array,
) -> None:
    """B <- e + mean of the rows."""
    num_rows, share = splat8(scale.dtype.type(rows.num_rows)), splat8(scale.dtype.type(1 / max(rows.num_rows, 1)))
    halves = rows.num_rows & (rows.num_rows - 1) == 0
    for block in range(first, stop):
        low, high = blocks.starts[block], blocks.starts[block + 1]
        sent = splat8(scale[block])
        _add_up(rows, block, low, high, new)
        if halves:  # the share is exact, so the product is the quotient, bit for bit, and cheaper
            for at in range(low, high, BYTE):
                kept = load8(b, at)
                store(new, at - low, kept - signed_as(kept, sent) + load8(new, at - low) * share)
        else:
            for at in range(low, high, BYTE):
                kept = load8(b, at)
                store(new, at - low, kept - signed_as(kept, sent) + load8(new, at - low) / num_rows)
        _finish(block, new, blocks, b, scale, out_scale, out_bits)


@compiled
def decode(first: int, stop: int, scale: Array, bits: Array, blocks: Blocks, out: Array) -> None:
    """Out <- s sgn."""
    for block in range(first, stop):
        size = splat8(scale[block])
        for at in range(blocks.starts[block], blocks.starts[block + 1], BYTE):
            store(out, at, signed_by_bits(bits[at // BYTE], size))
        _zero_dead(block, blocks, out)


@compiled
def descend(
    first: int,
    stop: int,
    p: Array,
    divisor: Array,
    scale: Array,
    bits: Array,
    rate: float,
    keep: float,
    blocks: Blocks,
) -> None:
    """P <- p keep - rate (m D); p x 1 is p, so there is no case without decay."""
    rates, keeps = splat8(rate), splat8(keep)
    for block in range(first, stop):
        size = splat8(scale[block])
        for at in range(blocks.starts[block], blocks.starts[block + 1], BYTE):
            step = signed_by_bits(bits[at // BYTE], size) * load8(divisor, at) * rates
            store(p, at, load8(p, at) * keeps - step)


@compiled
def undo_sum(first: int, stop: int, c: Array, scale: Array, x: Array, written_scale: Array, blocks: Blocks) -> None:
    """C <- c - x where written."""
    for block in range(first, stop):
        if not np.isnan(written_scale[block]):
            for at in range(blocks.starts[block], blocks.starts[block + 1], BYTE):
                store(c, at, load8(c, at) - load8(x, at))
            scale[block] = 0
            _zero_dead(block, blocks, c)


@compiled
def undo_momentum(
    first: int,
    stop: int,
    c: Array,
    scale: Array,
    g: Array,
    weight: float,
    m_scale: Array,
    m_bits: Array,
    written_scale: Array,
    blocks: Blocks,
) -> None:
    """C <- c - (m + weight (g - m)) where written."""
    weights = splat8(weight)
    for block in range(first, stop):
        if not np.isnan(written_scale[block]):
            m_size = splat8(m_scale[block])
            low, high = blocks.starts[block], blocks.starts[block + 1]
            for at in range(low, high, BYTE):
                z = _momentum(load8_from(g[block], at - low, c), weights, signed_by_bits(m_bits[at // BYTE], m_size))
                store(c, at, load8(c, at) - z)
            scale[block] = 0
            _zero_dead(block, blocks, c)


@compiled
def undo_serve(
    first: int, stop: int, b: Array, scale: Array, rows: Rows, written_scale: Array, blocks: Blocks, new: Array
) -> None:
    """B <- b - mean of the rows where written. new: scratch as above."""
    num_rows = splat8(scale.dtype.type(rows.num_rows))
    for block in range(first, stop):
        if not np.isnan(written_scale[block]):
            low, high = blocks.starts[block], blocks.starts[block + 1]
            _add_up(rows, block, low, high, new)
            for at in range(low, high, BYTE):
                store(b, at, load8(b, at) - load8(new, at - low) / num_rows)
            scale[block] = 0
            _zero_dead(block, blocks, b)


@compiled
def all_finite(scale: Array) -> bool:
    """Whether no scale is NaN or infinite."""
    finite = True
    for block in range(scale.size):
        finite &= np.isfinite(scale[block])
    return finite


@compiled
def _momentum(g: Any, weight: Any, m: Any) -> Any:
    """Of 8 values."""
    return m + weight * (g - m)


@compiled
def _add_up(rows: Rows, block: int, low: int, high: int, total: Array) -> None:
    """Total <- the sum of the rows' blocks, in their order. Two rows a pass, whose scales stay in registers."""
    begin = rows.num_rows % 2
    for k in range(high - low if begin or not rows.num_rows else 0):
        total[k] = 0
    if begin:
        _add_row(rows, 0, block, low, high, total)
    zeros = splat8(total.dtype.type(0))
    for row in range(begin, rows.num_rows, 2):
        one, two = rows.scales[row * rows.scale_stride + block], rows.scales[(row + 1) * rows.scale_stride + block]
        plus_one, plus_two, minus_one, minus_two = splat8(one), splat8(two), splat8(-one), splat8(-two)
        at_one, at_two = row * rows.bits_stride + low // BYTE, (row + 1) * rows.bits_stride + low // BYTE
        whole = (high - low) // QUAD * QUAD
        for quad in range(0, whole, QUAD):
            word_one, word_two = (
                load_bits(rows.bits, at_one + quad // BYTE),
                load_bits(rows.bits, at_two + quad // BYTE),
            )
            for byte in range(QUAD // BYTE):
                at = quad + byte * BYTE
                before = zeros if row == 0 else load8(total, at)
                store(
                    total,
                    at,
                    before + signed_by_word(word_one, byte, minus_one) + signed_by_word(word_two, byte, minus_two),
                )
        for at in range(whole, high - low, BYTE):
            before = zeros if row == 0 else load8(total, at)
            before = before + signed_by_bits(rows.bits[at_one + at // BYTE], plus_one)
            store(total, at, before + signed_by_bits(rows.bits[at_two + at // BYTE], plus_two))


@compiled
def _add_row(rows: Rows, row: int, block: int, low: int, high: int, total: Array) -> None:
    size = splat8(rows.scales[row * rows.scale_stride + block])
    bits = rows.bits[row * rows.bits_stride + low // BYTE : row * rows.bits_stride + high // BYTE]
    for byte in range(bits.size):
        store(total, byte * BYTE, load8(total, byte * BYTE) + signed_by_bits(bits[byte], size))


@compiled
def _finish(block: int, new: Array, blocks: Blocks, c: Array, scale: Array, out_scale: Array, out_bits: Array) -> None:
    """Write the row of a block's new sums; keep them, and their scale, where the sum of their squares is finite."""
    low, high = blocks.starts[block], blocks.starts[block + 1]
    for k in range(blocks.dead_starts[block], blocks.dead_starts[block + 1]):
        new[blocks.dead[k] - low] = 0
    mean_square = _pack(new, high - low, low // BYTE, out_bits) / blocks.live[block]
    if np.isfinite(mean_square):
        for at in range(low, high, BYTE):
            store(c, at, load8(new, at - low))
        scale[block] = out_scale[block] = np.sqrt(mean_square)
    else:
        out_scale[block] = np.nan


@compiled
def _pack(new: Array, size: int, byte: int, out_bits: Array) -> float:
    """Write the bits of `size` sums from out_bits[byte] on; return the sum of their squares."""
    whole = size // WORD * WORD
    for k in range(size, whole + WORD):
        new[k] = 0
    lanes = zeros64(new)
    for k in range(0, whole, WORD):
        values = load64(new, k)
        lanes = lanes + values * values
        store_signs(out_bits, byte + k // BYTE, values)
    for k in range(whole, size, BYTE):
        store_signs(out_bits, byte + k // BYTE, load8(new, k))
    last = load64(new, whole)
    return folded(lanes + last * last)  # type: ignore[no-any-return]


@compiled
def _zero_dead(block: int, blocks: Blocks, out: Array) -> None:
    for k in range(blocks.dead_starts[block], blocks.dead_starts[block + 1]):
        out[blocks.dead[k]] = 0
