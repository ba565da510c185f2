"""Updates as loops over the elements [8 first, 8 stop) of a slice, compiled by numba: float32 and float64.

`descend` goes over blocks in place of eights, the loops of LAMB over tiles. What they compute is said, and done in
torch, by adam_math, zero_one_adam, onebit_lamb, descend; here every vector is read and written once. Rounding is
as written, without a fused multiply-add, so replicas on different processors stay equal.
"""

from __future__ import annotations

from thinwire.comm.kernels.arrays import Blocks, Rows
from thinwire.comm.kernels.compiled import Array, compiled
from thinwire.comm.kernels.vectors import BYTE, cut, folded, lane, larger, load8, root, signed_by_bits, splat8, store


@compiled
def adam(
    first: int,
    stop: int,
    p: Array,
    g: Array,
    m: Array,
    v: Array,
    weight1: float,
    beta2: float,
    weight2: float,
    correction: float,
    eps: float,
    keep: float,
    rate: float,
) -> None:
    """m <- m + w1 (g - m); v <- beta2 v + w2 g^2; p <- keep p - rate m / (sqrt(v) / correction + eps)."""
    weights1, betas2, weights2, corrections = splat8(weight1), splat8(beta2), splat8(weight2), splat8(correction)
    all_eps, keeps, rates = splat8(eps), splat8(keep), splat8(rate)
    for at in range(BYTE * first, BYTE * stop, BYTE):
        g8, m8 = load8(g, at), load8(m, at)
        m8 = m8 + weights1 * (g8 - m8)
        v8 = betas2 * load8(v, at) + weights2 * g8 * g8
        store(m, at, m8)
        store(v, at, v8)
        store(p, at, keeps * load8(p, at) - rates * m8 / (root(v8) / corrections + all_eps))


@compiled
def descend(
    first: int,
    stop: int,
    p: Array,
    v: Array,
    rows: Rows,
    eps: float,
    rate: float,
    keep: float,
    one: float,
    blocks: Blocks,
) -> None:
    """p <- p keep - rate (m / (sqrt(v) + eps)) of the blocks [first, stop); p x 1 is p, so decay is no case.

    v: as p, or bfloat16 as uint16.
    """
    all_eps, rates, keeps, ones = splat8(eps), splat8(rate), splat8(keep), splat8(one)
    for block in range(first, stop):
        low, high = blocks.starts[block], blocks.starts[block + 1]
        size, bits = splat8(rows.values[blocks.scale_at[block]]), blocks.bits_at[block]
        for at in range(low, high, BYTE):
            inverse = ones / (root(load8(v, at)) + all_eps)
            step = signed_by_bits(rows.bytes[bits + (at - low) // BYTE], size) * inverse * rates
            store(p, at, load8(p, at) * keeps - step)
        for index in range(blocks.dead_starts[block], blocks.dead_starts[block + 1]):
            p[blocks.dead[index]] = 0


@compiled
def local(
    first: int,
    stop: int,
    p: Array,
    g: Array,
    m: Array,
    u: Array,
    d: Array,
    weight: float,
    keep: float,
    rate: float,
) -> None:
    """m <- m + w (g - m); u <- keep u + rate m; p <- keep p - rate m / d."""
    weights, keeps, rates = splat8(weight), splat8(keep), splat8(rate)
    for at in range(BYTE * first, BYTE * stop, BYTE):
        m8 = load8(m, at)
        m8 = m8 + weights * (load8(g, at) - m8)
        moved = rates * m8
        store(m, at, m8)
        store(u, at, keeps * load8(u, at) + moved)
        store(p, at, keeps * load8(p, at) - moved / load8(d, at))


@compiled
def propose(
    first: int, stop: int, z: Array, g: Array, m: Array, u: Array, weight: float, keep: float, rate: float
) -> None:
    """z <- keep u + rate (m + w (g - m))."""
    weights, keeps, rates = splat8(weight), splat8(keep), splat8(rate)
    for at in range(BYTE * first, BYTE * stop, BYTE):
        m8 = load8(m, at)
        store(z, at, keeps * load8(u, at) + rates * (m8 + weights * (load8(g, at) - m8)))


@compiled
def receive(
    first: int,
    stop: int,
    p: Array,
    start: Array,
    z: Array,
    d: Array,
    m: Array,
    u: Array,
    divisor: float,
    longest: float,
    keep: float,
) -> None:
    """z <- cut(z, longest d); m <- z / divisor; p <- keep start - z / d; u <- 0. z itself is not written."""
    divisors, bounds, keeps, zeros = splat8(divisor), splat8(longest), splat8(keep), splat8(divisor - divisor)
    for at in range(BYTE * first, BYTE * stop, BYTE):
        d8 = load8(d, at)
        z8 = cut(load8(z, at), bounds * d8)
        store(m, at, z8 / divisors)
        store(p, at, keeps * load8(start, at) - z8 / d8)
        store(u, at, zeros)


@compiled
def scaled_momentum(first: int, stop: int, z: Array, g: Array, m: Array, weight: float, scaling: Array) -> None:
    """z <- k (m + w (g - m)). scaling: float[1]."""
    weights, scalings = splat8(weight), splat8(scaling[0])
    for at in range(BYTE * first, BYTE * stop, BYTE):
        m8 = load8(m, at)
        store(z, at, scalings * (m8 + weights * (load8(g, at) - m8)))


@compiled
def lamb_measure(
    first: int,
    stop: int,
    starts: Array,
    stops: Array,
    tensors: Array,
    p: Array,
    z: Array,
    m: Array,
    v: Array,
    fresh_v: Array,
    scaling: Array,
    beta1: float,
    weight1: float,
    beta2: float,
    weight2: float,
    eps: float,
    decay: float,
    found: Array,
) -> None:
    """1-bit LAMB's moments, and what its factors need, of the tiles [first, stop).

    m <- z / k; v_fresh as in optim.onebit_lamb. found: float[4, tiles]: the largest ratio of roots, and the sums of
    squares of the direction u_0 = m / (sqrt(v) + eps), of u = u_0 + decay p and of p. A tile lies in one tensor; starts
    are multiples of 8.
    """
    zero = beta1 - beta1
    betas1, weights1, betas2, weights2 = splat8(beta1), splat8(weight1), splat8(beta2), splat8(weight2)
    all_eps, decays, zeros = splat8(eps), splat8(decay), splat8(zero)
    for tile in range(first, stop):
        scalings = splat8(scaling[tensors[tile]])
        most, direction, update, size = zeros, zeros, zeros, zeros
        last = last_direction = last_update = last_size = zero
        for at in range(starts[tile], stops[tile], BYTE):
            before, m8, p8 = load8(m, at), load8(z, at) / scalings, load8(p, at)
            implied = (m8 - betas1 * before) / weights1
            fresh = betas2 * load8(fresh_v, at) + weights2 * implied * implied
            d8 = root(load8(v, at)) + all_eps
            store(m, at, m8)
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
    m: Array,
    v: Array,
    eps: float,
    decay: float,
    rates: Array,
) -> None:
    """p <- p - rate (m / (sqrt(v) + eps) + decay p), with each tensor's rate, of the tiles [first, stop)."""
    all_eps, decays = splat8(eps), splat8(decay)
    for tile in range(first, stop):
        rate = splat8(rates[tensors[tile]])
        for at in range(starts[tile], stops[tile], BYTE):
            p8 = load8(p, at)
            store(p, at, p8 - rate * (load8(m, at) / (root(load8(v, at)) + all_eps) + decays * p8))
