"""The loops of LAMB's step and of 1-bit LAMB's compressed one over tiles of tensors, compiled: float32 and float64.

What they compute is said in optim.lamb_math and optim.onebit_lamb; every vector is read and written once a loop. A
tile lies in one tensor and begins at a multiple of 8. Rounding is as written, without a fused multiply-add. In 1-bit
LAMB's m is what was received over k, a number for each tensor: as rows a sign an element and a size a block, so that
what depends on sizes alone is found once.
"""

from __future__ import annotations

import numpy as np

from thinwire.comm.kernels.arrays import Blocks, Rows
from thinwire.comm.kernels.compiled import Array, compiled
from thinwire.comm.kernels.vectors import (
    BYTE,
    any_below,
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

SLACK = 1e-5
"""A ratio d / (sqrt(f) + eps) is worked out where it may be the largest so far, r: where f < (d / r - eps)^2, with so
much slack for rounding. Elsewhere a root and a quotient are saved, half of all, and no bit changes."""
LEAST_EPS = 1e-12
"""With less the squares would underflow: then every ratio is worked out."""
LEAST_LEFT, MOST_LEFT = 8.0**-2, 0.5**-2
"""1 / q^2 lies between them: MOST and LEAST of optim.lamb_math."""


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
    sums: bool,
    found: Array,
    u: Array,
    u_start: int,
) -> None:
    """v_fresh, and what LAMB's factors need, of the tiles [first, stop), m before and now being in rows.

    sums: v_fresh is A instead: it takes in m - beta1 m_before, and no ratio is looked for.
    found: float[4, tiles]: the largest ratio of roots, and the sums of squares of the direction u_0 = m / (sqrt(v) +
    eps), of u = u_0 + decay p and of p. block_of: of each tile, the number of the block that it begins in. u: modified
    where it has room: it begins with element u_start.
    """
    zero = beta1 - beta1
    one_above, infinite = p.dtype.type(1 + SLACK), p.dtype.type(np.inf)
    betas2, all_eps, decays, zeros = splat8(beta2), splat8(eps), splat8(decay), splat8(zero)
    keeps_u, tensor, most, above = u.size > 0, -1, zero, splat8(infinite)
    for tile in range(first, stop):
        if tensors[tile] != tensor:  # a tile's largest is that of what comes before it, too
            tensor, most, above = tensors[tile], zero, splat8(infinite)
        end, at, block = stops[tile], starts[tile], block_of[tile]
        whole = end // BYTE * BYTE
        direction, update, size = zeros, zeros, zeros
        last_direction = last_update = last_size = zero
        k, k_before = scaling[tensors[tile]], scaling_before[tensors[tile]]
        while at < end:
            m, m_before = now.values[blocks.scale_at[block]] / k, before.values[blocks.scale_at[block]] / k_before
            agreed, turned = (m - beta1 * m_before) / weight1, (m + beta1 * m_before) / weight1
            steady, moving = splat8(weight2 * agreed * agreed), splat8(weight2 * turned * turned)
            same, other = splat8(m - beta1 * m_before), splat8(m + beta1 * m_before)
            sizes, shift = splat8(m), blocks.bits_at[block] - blocks.starts[block] // BYTE
            high = min(blocks.starts[block + 1], end)
            while at < high:
                said, said_before = now.bytes[shift + at // BYTE], before.bytes[shift + at // BYTE]
                p8 = load8(p, at)
                d8 = root(load8(v, at)) + all_eps
                if sums:
                    given = chosen_by_bits(np.uint8(said ^ said_before), other, same)
                    fresh = load8(fresh_v, at) + signed_by_bits(said, given)
                else:
                    fresh = betas2 * load8(fresh_v, at) + chosen_by_bits(np.uint8(said ^ said_before), moving, steady)
                store(fresh_v, at, fresh)
                u0 = signed_by_bits(said, sizes) / d8
                u8 = u0 + decays * p8
                if keeps_u:
                    store(u, at - u_start, u8)
                bound = d8 * above - all_eps
                exceeds = not sums and any_below(fresh, bound * bound)
                if at < whole:
                    direction, update, size = direction + u0 * u0, update + u8 * u8, size + p8 * p8
                    if exceeds:
                        ratio = d8 / (root(fresh) + all_eps)
                        for index in range(BYTE):
                            most = max(most, lane(ratio, index))
                        above = splat8(one_above / most) if eps > LEAST_EPS else above
                else:  # of the dead elements behind a tensor nothing is counted, and they stay 0
                    ratio = d8 / (root(fresh) + all_eps)
                    for index in range(end - at):
                        most = most if sums else max(most, lane(ratio, index))
                        last_direction += lane(u0, index) * lane(u0, index)
                        last_update += lane(u8, index) * lane(u8, index)
                        last_size += lane(p8, index) * lane(p8, index)
                    for index in range(end, at + BYTE):
                        fresh_v[index] = 0
                        if keeps_u:
                            u[index - u_start] = 0
                at += BYTE
            block += 1
        found[0, tile], found[1, tile] = most, folded(direction) + last_direction
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
    sums: bool,
    found: Array,
    u: Array,
    u_start: int,
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
            given = m8 - betas1 * (load8(before, at) / k_before)
            implied = given / weights1
            fresh = load8(fresh_v, at) + given if sums else betas2 * load8(fresh_v, at) + weights2 * implied * implied
            d8 = root(load8(v, at)) + all_eps
            store(fresh_v, at, fresh)
            ratio = zeros if sums else d8 / (root(fresh) + all_eps)
            u0 = m8 / d8
            u8 = u0 + decays * p8
            if u.size > 0:
                store(u, at - u_start, u8)
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


@compiled
def lamb_step(
    first: int,
    stop: int,
    starts: Array,
    stops: Array,
    p: Array,
    g: Array,
    m: Array,
    v: Array,
    weight1: float,
    beta2: float,
    weight2: float,
    eps: float,
    decay: float,
    found: Array,
    u: Array,
    u_start: int,
) -> None:
    """m and v as Adam's of the tiles [first, stop), and the sums of squares of u = m / (sqrt(v) + eps) + decay p and p.

    found: its last two rows, as of lamb_measure_rows; u too.
    """
    zero = beta2 - beta2
    weights1, betas2, weights2 = splat8(weight1), splat8(beta2), splat8(weight2)
    all_eps, decays, zeros = splat8(eps), splat8(decay), splat8(zero)
    for tile in range(first, stop):
        update, size = zeros, zeros
        last_update = last_size = zero
        for at in range(starts[tile], stops[tile], BYTE):
            g8, m8, p8 = load8(g, at), load8(m, at), load8(p, at)
            m8 = m8 + weights1 * (g8 - m8)
            v8 = betas2 * load8(v, at) + weights2 * g8 * g8
            store(m, at, m8)
            store(v, at, v8)
            u8 = m8 / (root(v8) + all_eps) + decays * p8
            if u.size > 0:
                store(u, at - u_start, u8)
            if at + BYTE <= stops[tile]:
                update, size = update + u8 * u8, size + p8 * p8
            else:  # of the dead elements behind a tensor nothing is counted
                for index in range(stops[tile] - at):
                    last_update += lane(u8, index) * lane(u8, index)
                    last_size += lane(p8, index) * lane(p8, index)
        found[2, tile], found[3, tile] = folded(update) + last_update, folded(size) + last_size


@compiled
def lamb_descend(
    first: int,
    stop: int,
    starts: Array,
    stops: Array,
    tensors: Array,
    p: Array,
    m: Array,
    v: Array,
    eps: float,
    decay: float,
    rates: Array,
) -> None:
    """p <- p - rate u of lamb_step, of the tiles [first, stop)."""
    all_eps, decays = splat8(eps), splat8(decay)
    for tile in range(first, stop):
        rate = splat8(rates[tensors[tile]])
        for at in range(starts[tile], stops[tile], BYTE):
            p8 = load8(p, at)
            store(p, at, p8 - rate * (load8(m, at) / (root(load8(v, at)) + all_eps) + decays * p8))


@compiled
def lamb_move_along(
    first: int, stop: int, starts: Array, stops: Array, tensors: Array, p: Array, u: Array, u_start: int, rates: Array
) -> None:
    """p <- p - rate u, as lamb_move_rows, u being what was measured; it begins with element u_start."""
    for tile in range(first, stop):
        rate = splat8(rates[tensors[tile]])
        for at in range(starts[tile], stops[tile], BYTE):
            store(p, at, load8(p, at) - rate * load8(u, at - u_start))


@compiled
def lamb_trust(
    tensors: Array,
    found: Array,
    k: float,
    least_coeff: float,
    most_coeff: float,
    lr: float,
    coeff: Array,
    rates: Array,
) -> None:
    """coeff <- c, rates <- lr c / k of each tensor, from what lamb_step found of its tiles.

    That was k times u. Sums are formed in float64, as k is.
    """
    number = coeff.dtype.type
    one, narrow_k, sums = number(1), number(k), np.zeros((2, coeff.size))
    for tile in range(tensors.size):
        for row in range(2):
            sums[row, tensors[tile]] += found[2 + row, tile]
    for at in range(coeff.size):
        update, size = number(np.sqrt(sums[0, at]) / k), number(np.sqrt(sums[1, at]))
        trust = one
        if size > 0 and update > 0:
            trust = size / update
            trust = trust if not trust < least_coeff else least_coeff
            trust = trust if not trust > most_coeff else most_coeff
        coeff[at] = trust
        rates[at] = trust * lr / narrow_k


@compiled
def lamb_rates(
    tensors: Array,
    found: Array,
    coeff: Array,
    factor: Array,
    least_factor: float,
    most_factor: float,
    slower: float,
    faster: float,
    least_coeff: float,
    most_coeff: float,
    longest: float,
    lr: float,
    weighs: bool,
    follows: bool,
    sums: Array,
    rates: Array,
) -> None:
    """rates <- lr min(c_avg r, longest c) of each tensor, from what was found of its tiles; r is written to `factor`.

    longest: infinite: no bound. weighs: r counts for the part of the update that is not decay. follows: `factor` is
    |u_0|^2 of exact momenta, and is not written; rates <- lr q c where it is known (optim.lamb_math.are_known,
    lengthened), else with c_avg in place of c_avg r. sums: scratch.
    """
    zero, one = lr - lr, factor.dtype.type(1)
    least_left, most_left = factor.dtype.type(LEAST_LEFT), factor.dtype.type(MOST_LEFT)
    sums[:] = 0
    for tile in range(tensors.size):
        at = tensors[tile]
        sums[0, at] = max(sums[0, at], found[0, tile])
        for row in range(1, 4):
            sums[row, at] += found[row, tile]
    for at in range(rates.size):
        r = sums[0, at] if sums[0, at] > zero else one  # 0: every element was floored
        direction, update, size = np.sqrt(sums[1, at]), np.sqrt(sums[2, at]), np.sqrt(sums[3, at])
        if weighs:
            part = direction / update
            part = part if part < one else one
            r = r * part + (one - part)
        r = min(max(r, least_factor), most_factor)
        r = min(max(r, factor[at] * slower), factor[at] * faster)
        trust = min(max(size / update, least_coeff), most_coeff) if size > zero and update > zero else one
        if follows:
            r = one
        else:
            factor[at] = r
        rate = coeff[at] * r
        if np.isfinite(longest):
            rate = min(rate, longest * trust)
        if follows and factor[at] != one and factor[at] > zero:
            rate = trust
            if update > zero:
                left = one - (direction * direction - factor[at]) / (update * update)
                rate = trust / np.sqrt(min(max(left, least_left), most_left))
        rates[at] = rate * lr
