"""The fused kernels for vectors on the CPU: loops over the blocks [first, stop) of a table, compiled by numba.

fused_reference says what each computes; the loops are equal to it bit for bit, for nothing is contracted or
reassociated. They take float32 and float64, as views of torch's memory. Kept sums may be bfloat16 beside vectors of
float32, as arrays of uint16 (vectors.py). Then they are rounded by `noise` (bf16.py), and the row says what is kept.

A block is read from memory once. Its new sums are formed in `new`, scratch that stays in the cache, because whether
they may be written is known only when all of them have been squared and added; then they are packed, and copied.

The blocks of a call are split over threads; a block is the work of one, so the result does not depend on their number.
Nothing is allocated by torch, and scratch only by a thread's first call.

Behind these are the loops of what is asked of kept sums now and then: kept.py and choose.narrow.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.comm.kernels.added import Added, Advanced, Lerp, MeanOfRows, ScaledLerp, Vector
from thinwire.comm.kernels.arrays import (
    Blocks,
    Collected,
    Cut,
    Rows,
    addresses_of,
    blocks_of,
    collected_of,
    cut_of,
    rows_of,
    scales_of,
    sums_of,
    values_of,
    written_rows_of,
)
from thinwire.comm.kernels.bf16 import NONE, Noise
from thinwire.comm.kernels.blocks import BlockTable, RowMemory
from thinwire.comm.kernels.compiled import Array, compiled
from thinwire.comm.kernels.fused_reference import Kernels, sum_of
from thinwire.comm.kernels.threads import MIN_BLOCKS, Threads
from thinwire.comm.kernels.vectors import (
    BYTE,
    QUAD,
    WORD,
    folded,
    load8,
    load8_from,
    load64,
    load_bits,
    rounded8,
    rounded8_any,
    signed_as,
    signed_by_bits,
    signed_by_word,
    splat8,
    store,
    store_signs,
    zeros64,
)

_of_thread = threading.local()


class CpuKernels(Kernels):
    """Kernels for contiguous vectors of float32 or float64, kept sums of bfloat16 beside float32 too.

    threads: cores that one call may use.
    """

    def __init__(self, threads: int = 1) -> None:
        self._threads = Threads(threads)

    def encode(
        self, c_c: Tensor, scale_b: Tensor, z: Added, table: BlockTable, out: RowMemory, noise: Noise = NONE
    ) -> None:
        """As Kernels.encode, and the flags of all rows that it wrote."""
        if isinstance(z, Advanced):
            z = Vector(sum_of(z, table))
        c, scale, loop = sums_of(c_c, table), scales_of(scale_b, table), _LOOPS[type(z)]
        parts: Sequence[Tensor] = ()  # held here: loops read them by address
        given: tuple[Any, ...]
        match z:
            case Vector(x_c):
                given = (values_of(x_c, table),)
            case Lerp(x_parts, weight, last):
                parts = _widened(x_parts, scale_b)
                given = addresses_of(parts, table), scale.dtype.type(weight), rows_of(last, table)
            case ScaledLerp(x_parts, weight, last, factor_r, pieces):
                parts, cut = _widened(x_parts, scale_b), cut_of(factor_r, pieces, table)
                given = addresses_of(parts, table), scale.dtype.type(weight), rows_of(last, table), cut
            case MeanOfRows(rows, num_rows):
                given = (collected_of(rows, num_rows, table),)
        blocks, written = blocks_of(table), written_rows_of(out, table)
        tail = blocks, written, noise
        self._split(table, lambda first, stop: loop(first, stop, c, scale, *given, *tail, _scratch(table, scale)))
        write_flags(blocks, written)

    def flag(self, table: BlockTable, out: RowMemory) -> None:
        """As Kernels.flag."""
        write_flags(blocks_of(table), written_rows_of(out, table))

    def decode(self, rows: RowMemory, table: BlockTable, out_c: Tensor) -> None:
        """As Kernels.decode."""
        given = rows_of(rows, table), blocks_of(table), values_of(out_c, table)
        self._split(table, lambda first, stop: decode(first, stop, *given))

    def _split(self, table: BlockTable, loop: Callable[[int, int], None]) -> None:
        """Run the loop over all blocks: a share a thread, one of them this thread's."""
        self._threads.split(table.num_blocks, MIN_BLOCKS, loop)


def _widened(x_parts: Sequence[Tensor], like: Tensor) -> Sequence[Tensor]:
    """Parts in bfloat16 as copies in the vector's dtype; the rest as it is."""
    if all(part.dtype != torch.bfloat16 for part in x_parts):
        return x_parts
    return [part.to(like.dtype) if part.dtype == torch.bfloat16 else part for part in x_parts]


def _scratch(table: BlockTable, like: Array) -> Array:
    """Of this thread, kept for its next call: room for the new sums of a block."""
    kept: dict[np.dtype[Any], Array] = _of_thread.__dict__.setdefault("kept", {})
    found = kept.get(like.dtype)
    if found is None or found.size < table.largest + WORD:
        found = kept[like.dtype] = np.zeros(table.largest + WORD, like.dtype)
    return found


@compiled
def encode_sum(
    first: int,
    stop: int,
    c: Array,
    scale: Array,
    x: Array,
    blocks: Blocks,
    out: Rows,
    noise: Noise,
    new: Array,
) -> None:
    """c <- e + x. new: scratch, float[largest + 64]."""
    for block in range(first, stop):
        low, high = blocks.starts[block], blocks.starts[block + 1]
        sent = splat8(scale[block])
        for at in range(low, high, BYTE):
            kept = load8(c, at)
            store(new, at - low, rounded8(kept - signed_as(kept, sent) + load8(x, at), c, noise, at))
        _finish(block, new, blocks, c, scale, out)


@compiled
def encode_lerp(
    first: int,
    stop: int,
    c: Array,
    scale: Array,
    x: Array,
    weight: float,
    last: Rows,
    blocks: Blocks,
    out: Rows,
    noise: Noise,
    new: Array,
) -> None:
    """c <- e + m + weight (x - m). x: int64[b], where in memory each block of it begins."""
    weights = splat8(weight)
    for block in range(first, stop):
        low, high = blocks.starts[block], blocks.starts[block + 1]
        said, bits = last.values[blocks.scale_at[block]], blocks.bits_at[block]
        sent, m_size, minus = splat8(scale[block]), splat8(said), splat8(-said)
        whole = low + (high - low) // QUAD * QUAD
        for quad in range(low, whole, QUAD):
            word = load_bits(last.bytes, bits + (quad - low) // BYTE)
            for byte in range(QUAD // BYTE):
                at = quad + byte * BYTE
                kept = load8(c, at)
                z = _lerp(load8_from(x[block], at - low, scale), weights, signed_by_word(word, byte, minus))
                store(new, at - low, rounded8(kept - signed_as(kept, sent) + z, c, noise, at))
        for at in range(whole, high, BYTE):
            kept = load8(c, at)
            m = signed_by_bits(last.bytes[bits + (at - low) // BYTE], m_size)
            z = _lerp(load8_from(x[block], at - low, scale), weights, m)
            store(new, at - low, rounded8(kept - signed_as(kept, sent) + z, c, noise, at))
        _finish(block, new, blocks, c, scale, out)


@compiled
def serve(
    first: int,
    stop: int,
    b: Array,
    scale: Array,
    rows: Collected,
    blocks: Blocks,
    out: Rows,
    noise: Noise,
    new: Array,
) -> None:
    """b <- e + mean of the rows."""
    num_rows, share = splat8(scale.dtype.type(rows.num_rows)), splat8(scale.dtype.type(1 / max(rows.num_rows, 1)))
    halves = rows.num_rows & (rows.num_rows - 1) == 0
    for block in range(first, stop):
        low, high = blocks.starts[block], blocks.starts[block + 1]
        sent = splat8(scale[block])
        _add_up(rows, block, blocks, new)
        if halves:  # the share is exact, so the product is the quotient, bit for bit, and cheaper
            for at in range(low, high, BYTE):
                kept = load8(b, at)
                z = load8(new, at - low) * share
                store(new, at - low, rounded8(kept - signed_as(kept, sent) + z, b, noise, at))
        else:
            for at in range(low, high, BYTE):
                kept = load8(b, at)
                z = load8(new, at - low) / num_rows
                store(new, at - low, rounded8(kept - signed_as(kept, sent) + z, b, noise, at))
        _finish(block, new, blocks, b, scale, out)


@compiled
def decode(first: int, stop: int, rows: Rows, blocks: Blocks, out: Array) -> None:
    """out <- s sgn."""
    for block in range(first, stop):
        low, high = blocks.starts[block], blocks.starts[block + 1]
        size, bits = splat8(rows.values[blocks.scale_at[block]]), blocks.bits_at[block]
        for at in range(low, high, BYTE):
            store(out, at, signed_by_bits(rows.bytes[bits + (at - low) // BYTE], size))
        _zero_dead(block, blocks, out)


@compiled
def encode_scaled(
    first: int,
    stop: int,
    c: Array,
    scale: Array,
    x: Array,
    weight: float,
    last: Rows,
    cut: Cut,
    blocks: Blocks,
    out: Rows,
    noise: Noise,
    new: Array,
) -> None:
    """c <- e + f (m + weight (x - m)), f m being what was received. x: int64[b], as in encode_lerp."""
    weights = splat8(weight)
    for block in range(first, stop):
        low, bits, sent = blocks.starts[block], blocks.bits_at[block], splat8(scale[block])
        for piece in range(cut.first[block], cut.first[block + 1]):
            begin, end, factor = cut.starts[piece], cut.starts[piece + 1], cut.factor[cut.run[piece]]
            said = last.values[blocks.scale_at[block]] / factor
            factors, m_size, minus = splat8(factor), splat8(said), splat8(-said)
            whole = begin + (end - begin) // QUAD * QUAD
            for quad in range(begin, whole, QUAD):
                word = load_bits(last.bytes, bits + (quad - low) // BYTE)
                for byte in range(QUAD // BYTE):
                    at = quad + byte * BYTE
                    kept = load8(c, at)
                    m = signed_by_word(word, byte, minus)
                    z = factors * _lerp(load8_from(x[block], at - low, scale), weights, m)
                    store(new, at - low, rounded8(kept - signed_as(kept, sent) + z, c, noise, at))
            for at in range(whole, end, BYTE):
                kept = load8(c, at)
                m = signed_by_bits(last.bytes[bits + (at - low) // BYTE], m_size)
                z = factors * _lerp(load8_from(x[block], at - low, scale), weights, m)
                store(new, at - low, rounded8(kept - signed_as(kept, sent) + z, c, noise, at))
        _finish(block, new, blocks, c, scale, out)


@compiled
def write_flags(blocks: Blocks, out: Rows) -> None:
    """Of each row that has blocks: 1 where all of its scales are finite, else 0."""
    for row in range(blocks.flag_at.size):
        first, stop = blocks.row_starts[row], blocks.row_starts[row + 1]
        if first < stop:
            finite = True
            for block in range(first, stop):
                finite &= np.isfinite(out.values[blocks.scale_at[block]])
            out.bytes[blocks.flag_at[row]] = finite


@compiled
def narrow(x: Array, noise: Noise, out: Array) -> None:
    """out <- bf16.rounded(x)."""
    for at in range(0, x.size, BYTE):
        store(out, at, rounded8_any(load8(x, at), noise, at))


@compiled
def pick(c: Array, scale: Array, starts: Array, bound: float, at: Array, error: Array) -> int:
    """Write positions and errors of those that reach the bound, while there is room; how many they are."""
    found = 0
    for block in range(scale.size):
        s = scale[block]
        for i in range(starts[block], starts[block + 1]):
            size = abs(c[i]) - s
            if abs(size) >= bound and c[i] != 0:
                if found == at.size:
                    return found
                at[found] = i
                error[found] = size if c[i] > 0 else -size
                found += 1
    return found


@compiled
def left_out(c: Array, scale: Array, starts: Array, dead: Array, out: Array) -> None:
    """out <- c - s sgn(c), and c where dead. out may be c."""
    kept = c[dead]
    for block in range(scale.size):
        s = scale[block]
        for i in range(starts[block], starts[block + 1]):
            out[i] = c[i] - s if c[i] >= 0 else c[i] + s
    for k in range(dead.size):
        out[dead[k]] = kept[k]


@compiled
def _lerp(x: Any, weight: Any, m: Any) -> Any:
    """Of 8 values."""
    return m + weight * (x - m)


@compiled
def _add_up(rows: Collected, block: int, blocks: Blocks, total: Array) -> None:
    """total <- the sum of the rows' blocks, in their order. Two rows a pass, whose scales stay in registers."""
    size = blocks.starts[block + 1] - blocks.starts[block]
    scale_at, bits_at = blocks.scale_at[block], blocks.bits_at[block]
    begin = rows.num_rows % 2
    for k in range(size if begin or not rows.num_rows else 0):
        total[k] = 0
    if begin:
        _add_first(rows, scale_at, bits_at, size, total)
    zeros = splat8(total.dtype.type(0))
    for row in range(begin, rows.num_rows, 2):
        one, two = rows.values[row * rows.row_values + scale_at], rows.values[(row + 1) * rows.row_values + scale_at]
        plus_one, plus_two, minus_one, minus_two = splat8(one), splat8(two), splat8(-one), splat8(-two)
        at_one, at_two = row * rows.row_bytes + bits_at, (row + 1) * rows.row_bytes + bits_at
        whole = size // QUAD * QUAD
        for quad in range(0, whole, QUAD):
            word_one, word_two = (
                load_bits(rows.bytes, at_one + quad // BYTE),
                load_bits(rows.bytes, at_two + quad // BYTE),
            )
            for byte in range(QUAD // BYTE):
                at = quad + byte * BYTE
                before = zeros if row == 0 else load8(total, at)
                store(
                    total,
                    at,
                    before + signed_by_word(word_one, byte, minus_one) + signed_by_word(word_two, byte, minus_two),
                )
        for at in range(whole, size, BYTE):
            before = zeros if row == 0 else load8(total, at)
            before = before + signed_by_bits(rows.bytes[at_one + at // BYTE], plus_one)
            store(total, at, before + signed_by_bits(rows.bytes[at_two + at // BYTE], plus_two))


@compiled
def _add_first(rows: Collected, scale_at: int, bits_at: int, size: int, total: Array) -> None:
    said = splat8(rows.values[scale_at])
    bits = rows.bytes[bits_at : bits_at + size // BYTE]
    for byte in range(bits.size):
        store(total, byte * BYTE, load8(total, byte * BYTE) + signed_by_bits(bits[byte], said))


@compiled
def _finish(block: int, new: Array, blocks: Blocks, c: Array, scale: Array, out: Rows) -> None:
    """Write the row of a block's new sums; keep them, and their scale, where the sum of their squares is finite."""
    low, high, scale_at = blocks.starts[block], blocks.starts[block + 1], blocks.scale_at[block]
    for k in range(blocks.dead_starts[block], blocks.dead_starts[block + 1]):
        new[blocks.dead[k] - low] = 0
    mean_square = _pack(new, high - low, blocks.bits_at[block], out.bytes) / blocks.live[block]
    if np.isfinite(mean_square):
        whole = low + (high - low) // WORD * WORD
        for at in range(low, whole, WORD):
            store(c, at, load64(new, at - low))
        for at in range(whole, high, BYTE):
            store(c, at, load8(new, at - low))
        scale[block] = out.values[scale_at] = np.sqrt(mean_square)
    else:
        out.values[scale_at] = np.nan


@compiled
def _pack(new: Array, size: int, byte: int, out: Array) -> float:
    """Write the bits of `size` sums from out[byte] on; return the sum of their squares."""
    whole = size // WORD * WORD
    for k in range(size, whole + WORD):
        new[k] = 0
    lanes = zeros64(new)
    for k in range(0, whole, WORD):
        values = load64(new, k)
        lanes = lanes + values * values
        store_signs(out, byte + k // BYTE, values)
    for k in range(whole, size, BYTE):
        store_signs(out, byte + k // BYTE, load8(new, k))
    last = load64(new, whole)
    return folded(lanes + last * last)  # type: ignore[no-any-return]


@compiled
def _zero_dead(block: int, blocks: Blocks, out: Array) -> None:
    for k in range(blocks.dead_starts[block], blocks.dead_starts[block + 1]):
        out[blocks.dead[k]] = 0


_LOOPS: dict[type[Added], Callable[..., None]] = {
    Vector: encode_sum,
    Lerp: encode_lerp,
    ScaledLerp: encode_scaled,
    MeanOfRows: serve,
}
