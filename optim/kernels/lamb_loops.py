"""The loops of 1-bit LAMB's compressed step over tiles of tensors, compiled by numba: float32 and float64.

What they compute is said in optim.onebit_lamb; every vector is read and written once a loop. A tile lies in one tensor
and begins at a multiple of 8. Rounding is as written, without a fused multiply-add. m is what was received over k, a
number for each tensor: as rows a sign an element and a size a block, so that what depends on sizes alone is found once.
"""

from __future__ import annotations

import numpy as np

from thinwire.comm.kernels.arrays import Blocks, Rows
from thinwire.comm.kernels.compiled import Array, compiled
from thinwire.comm.kernels.vectors import (
    BYTE,
    chosen_by_bits,
    folded,
    lane,
    larger,
    load8,
    root,
    signed_by_bits,
    splat8,
    store,
)


@compiled
def lamb_measure_rows(
    first: int,
    stop: int,
    starts: Array,
    stops: Array,
    tensors: Array,
    block_of: Array,
    p: Array,
    v: Array,
    fresh_v: Array,
    scaling: Array,
    scaling_before: Array,
    now: Rows,
    before: Rows,
    blocks: Blocks,
    beta1: float,
    weight1: float,
    beta2: float,
    weight2: float,
    eps: float,
    decay: float,
    found: Array,
) -> None:
    """v_fresh, and what LAMB's factors need, of the tiles [first, stop), m before and now being in rows.

    found: float[4, tiles]: the largest ratio of roots, and the sums of squares of the direction u_0 = m / (sqrt(v) +
    eps), of u = u_0 + decay p and of p. block_of: of each tile, the number of the block that it begins in.
    """
    zero = beta1 - beta1
    betas2, all_eps, decays, zeros = splat8(beta2), splat8(eps), splat8(decay), splat8(zero)
    for tile in range(first, stop):
        end, at, block = stops[tile], starts[tile], block_of[tile]
        most, direction, update, size = zeros, zeros, zeros, zeros
        last = last_direction = last_update = last_size = zero
        while at < end:
            k, k_before = scaling[tensors[tile]], scaling_before[tensors[tile]]
            m, m_before = now.values[blocks.scale_at[block]] / k, before.values[blocks.scale_at[block]] / k_before
            agreed, turned = (m - beta1 * m_before) / weight1, (m + beta1 * m_before) / weight1
            steady, moving = splat8(weight2 * agreed * agreed), splat8(weight2 * turned * turned)
            sizes, shift = splat8(m), blocks.bits_at[block] - blocks.starts[block] // BYTE
            high = min(blocks.starts[block + 1], end)
            whole = high // BYTE * BYTE
            while at < whole:
                said, said_before = now.bytes[shift + at // BYTE], before.bytes[shift + at // BYTE]
                p8 = load8(p, at)
                d8 = root(load8(v, at)) + all_eps
                fresh = betas2 * load8(fresh_v, at) + chosen_by_bits(np.uint8(said ^ said_before), moving, steady)
                store(fresh_v, at, fresh)
                u0 = signed_by_bits(said, sizes) / d8
                u8 = u0 + decays * p8
                most = larger(most, d8 / (root(fresh) + all_eps))
                direction, update, size = direction + u0 * u0, update + u8 * u8, size + p8 * p8
                at += BYTE
            if at < high:  # of the dead elements behind a tensor nothing is counted, and they stay 0
                said, said_before = now.bytes[shift + at // BYTE], before.bytes[shift + at // BYTE]
                p8 = load8(p, at)
                d8 = root(load8(v, at)) + all_eps
                fresh = betas2 * load8(fresh_v, at) + chosen_by_bits(np.uint8(said ^ said_before), moving, steady)
                store(fresh_v, at, fresh)
                u0 = signed_by_bits(said, sizes) / d8
                u8 = u0 + decays * p8
                ratio = d8 / (root(fresh) + all_eps)
                for index in range(high - at):
                    last = max(last, lane(ratio, index))
                    last_direction += lane(u0, index) * lane(u0, index)
                    last_update += lane(u8, index) * lane(u8, index)
                    last_size += lane(p8, index) * lane(p8, index)
                for index in range(high, at + BYTE):
                    fresh_v[index] = 0
                at = high
            block += 1
        for index in range(BYTE):
            last = max(last, lane(most, index))
        found[0, tile], found[1, tile] = last, folded(direction) + last_direction
        found[2, tile], found[3, tile] = folded(update) + last_update, folded(size) + last_size


@compiled
def lamb_move_rows(
    first: int,
    stop: int,
    starts: Array,
    stops: Array,
    tensors: Array,
    block_of: Array,
    p: Array,
    v: Array,
    scaling: Array,
    now: Rows,
    blocks: Blocks,
    eps: float,
    decay: float,
    rates: Array,
) -> None:
    """p <- p - rate (m / (sqrt(v) + eps) + decay p), with each tensor's rate, of the tiles [first, stop)."""
    all_eps, decays = splat8(eps), splat8(decay)
    for tile in range(first, stop):
        rate, k = splat8(rates[tensors[tile]]), scaling[tensors[tile]]
        end, at, block = stops[tile], starts[tile], block_of[tile]
        while at < end:
            sizes, shift = (
                splat8(now.values[blocks.scale_at[block]] / k),
                blocks.bits_at[block] - blocks.starts[block] // BYTE,
            )
            high = min(blocks.starts[block + 1], end)
            while at < high:
                m8, p8 = signed_by_bits(now.bytes[shift + at // BYTE], sizes), load8(p, at)
                store(p, at, p8 - rate * (m8 / (root(load8(v, at)) + all_eps) + decays * p8))
                at += BYTE
            block += 1
        for index in range(end, at):
            p[index] = 0


@compiled
def lamb_measure(
    first: int,
    stop: int,
    starts: Array,
    stops: Array,
    tensors: Array,
    p: Array,
    z: Array,
    before: Array,
    v: Array,
    fresh_v: Array,
    scaling: Array,
    scaling_before: Array,
    beta1: float,
    weight1: float,
    beta2: float,
    weight2: float,
    eps: float,
    decay: float,
    found: Array,
) -> None:
    """As lamb_measure_rows, of floats: m is z over its k, m before is `before` over its own."""
    zero = beta1 - beta1
    betas1, weights1, betas2, weights2 = splat8(beta1), splat8(weight1), splat8(beta2), splat8(weight2)
    all_eps, decays, zeros = splat8(eps), splat8(decay), splat8(zero)
    for tile in range(first, stop):
        k, k_before = splat8(scaling[tensors[tile]]), splat8(scaling_before[tensors[tile]])
        most, direction, update, size = zeros, zeros, zeros, zeros
        last = last_direction = last_update = last_size = zero
        for at in range(starts[tile], stops[tile], BYTE):
            m8, p8 = load8(z, at) / k, load8(p, at)
            implied = (m8 - betas1 * (load8(before, at) / k_before)) / weights1
            fresh = betas2 * load8(fresh_v, at) + weights2 * implied * implied
            d8 = root(load8(v, at)) + all_eps
            store(fresh_v, at, fresh)
            ratio = d8 / (root(fresh) + all_eps)
            u0 = m8 / d8
            u8 = u0 + decays * p8
            if at + BYTE <= stops[tile]:
                most = larger(most, ratio)
                direction, update, size = direction + u0 * u0, update + u8 * u8, size + p8 * p8
            else:  # of the dead elements behind a tensor nothing is counted
                for index in range(stops[tile] - at):
                    last = max(last, lane(ratio, index))
                    last_direction += lane(u0, index) * lane(u0, index)
                    last_update += lane(u8, index) * lane(u8, index)
                    last_size += lane(p8, index) * lane(p8, index)
        for index in range(BYTE):
            last = max(last, lane(most, index))
        found[0, tile], found[1, tile] = last, folded(direction) + last_direction
        found[2, tile], found[3, tile] = folded(update) + last_update, folded(size) + last_size


@compiled
def lamb_move(
    first: int,
    stop: int,
    starts: Array,
    stops: Array,
    tensors: Array,
    p: Array,
    z: Array,
    v: Array,
    scaling: Array,
    eps: float,
    decay: float,
    rates: Array,
) -> None:
    """As lamb_move_rows, of floats: m is z over its k."""
    all_eps, decays = splat8(eps), splat8(decay)
    for tile in range(first, stop):
        rate, k = splat8(rates[tensors[tile]]), splat8(scaling[tensors[tile]])
        for at in range(starts[tile], stops[tile], BYTE):
            p8 = load8(p, at)
            store(p, at, p8 - rate * (load8(z, at) / k / (root(load8(v, at)) + all_eps) + decays * p8))
