"""Updates as loops over the elements [8 first, 8 stop) of a slice, compiled by numba: float32 and float64.

`descend` and `receive_rows` go over blocks in place of eights; the loops of LAMB are in lamb_loops. What they compute
is said, and done in torch, by adam_math, zero_one_round, descend; here every vector is read and written once. Rounding
is as written, without a fused multiply-add, so replicas on different processors stay equal.
"""

from __future__ import annotations

from thinwire.comm.kernels.arrays import Blocks, Rows
from thinwire.comm.kernels.compiled import Array, compiled
from thinwire.comm.kernels.vectors import BYTE, cut, load8, root, signed_by_bits, splat8, store


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
def mix(
    first: int,
    stop: int,
    p: Array,
    g: Array,
    m: Array,
    v: Array,
    weight: float,
    eps: float,
    rate: float,
    keep: float,
    one: float,
) -> None:
    """m <- m + w (g - m), and descend along that, rounded as it is there."""
    weights, all_eps, rates, keeps, ones = splat8(weight), splat8(eps), splat8(rate), splat8(keep), splat8(one)
    for at in range(BYTE * first, BYTE * stop, BYTE):
        m8 = load8(m, at)
        m8 = m8 + weights * (load8(g, at) - m8)
        store(m, at, m8)
        store(p, at, load8(p, at) * keeps - m8 * (ones / (root(load8(v, at)) + all_eps)) * rates)


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
def first_local(
    first: int,
    stop: int,
    p: Array,
    g: Array,
    m: Array,
    u: Array,
    begun: Array,
    v: Array,
    weight: float,
    keep: float,
    rate: float,
    eps: float,
) -> None:
    """begun <- p, and local of u = 0: what is in u is not read. begun may be u, which is written last."""
    weights, keeps, rates, all_eps = splat8(weight), splat8(keep), splat8(rate), splat8(eps)
    for at in range(BYTE * first, BYTE * stop, BYTE):
        m8, p8 = load8(m, at), load8(p, at)
        m8 = m8 + weights * (load8(g, at) - m8)
        moved = rates * m8
        store(m, at, m8)
        store(begun, at, p8)
        store(u, at, moved)
        store(p, at, keeps * p8 - moved / (root(load8(v, at)) + all_eps))


@compiled
def local(
    first: int,
    stop: int,
    p: Array,
    g: Array,
    m: Array,
    u: Array,
    v: Array,
    weight: float,
    keep: float,
    rate: float,
    eps: float,
) -> None:
    """m <- m + w (g - m); u <- keep u + rate m; p <- keep p - rate m / d;  d = sqrt(v) + eps."""
    weights, keeps, rates, all_eps = splat8(weight), splat8(keep), splat8(rate), splat8(eps)
    for at in range(BYTE * first, BYTE * stop, BYTE):
        m8 = load8(m, at)
        m8 = m8 + weights * (load8(g, at) - m8)
        moved = rates * m8
        store(m, at, m8)
        store(u, at, keeps * load8(u, at) + moved)
        store(p, at, keeps * load8(p, at) - moved / (root(load8(v, at)) + all_eps))


@compiled
def first_proposal(first: int, stop: int, z: Array, g: Array, m: Array, weight: float, rate: float) -> None:
    """z <- rate (m + w (g - m))."""
    weights, rates = splat8(weight), splat8(rate)
    for at in range(BYTE * first, BYTE * stop, BYTE):
        m8 = load8(m, at)
        store(z, at, rates * (m8 + weights * (load8(g, at) - m8)))


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
    v: Array,
    m: Array,
    sign: float,
    divisor: float,
    longest: float,
    keep: float,
    eps: float,
) -> None:
    """z <- cut(sign z, longest d); m <- z / divisor; p <- keep start - z / d, d as in local. z stays."""
    signs, divisors, bounds, keeps = splat8(sign), splat8(divisor), splat8(longest), splat8(keep)
    all_eps = splat8(eps)
    for at in range(BYTE * first, BYTE * stop, BYTE):
        d8 = root(load8(v, at)) + all_eps
        z8 = cut(signs * load8(z, at), bounds * d8)
        store(m, at, z8 / divisors)
        store(p, at, keeps * load8(start, at) - z8 / d8)


@compiled
def receive_own(
    first: int,
    stop: int,
    p: Array,
    g: Array,
    v: Array,
    m: Array,
    weight: float,
    rate: float,
    sign: float,
    divisor: float,
    longest: float,
    keep: float,
    eps: float,
) -> None:
    """receive of what first_proposal gives, with p as its start."""
    weights, rates = splat8(weight), splat8(rate)
    signs, divisors, bounds, keeps = splat8(sign), splat8(divisor), splat8(longest), splat8(keep)
    all_eps = splat8(eps)
    for at in range(BYTE * first, BYTE * stop, BYTE):
        m8, d8 = load8(m, at), root(load8(v, at)) + all_eps
        z8 = cut(signs * (rates * (m8 + weights * (load8(g, at) - m8))), bounds * d8)
        store(m, at, z8 / divisors)
        store(p, at, keeps * load8(p, at) - z8 / d8)


@compiled
def receive_own_round(
    first: int,
    stop: int,
    p: Array,
    g: Array,
    v: Array,
    m: Array,
    u: Array,
    weight: float,
    rate: float,
    share: float,
    sign: float,
    divisor: float,
    longest: float,
    keep: float,
    eps: float,
) -> None:
    """receive of what propose gives, share being its keep, where p + u / d is K times the start."""
    weights, rates, shares = splat8(weight), splat8(rate), splat8(share)
    signs, divisors, bounds, keeps = splat8(sign), splat8(divisor), splat8(longest), splat8(keep)
    all_eps = splat8(eps)
    for at in range(BYTE * first, BYTE * stop, BYTE):
        m8, u8, d8 = load8(m, at), load8(u, at), root(load8(v, at)) + all_eps
        z8 = cut(signs * (shares * u8 + rates * (m8 + weights * (load8(g, at) - m8))), bounds * d8)
        store(m, at, z8 / divisors)
        store(p, at, keeps * load8(p, at) - (z8 - keeps * u8) / d8)


@compiled
def receive_rows(
    first: int,
    stop: int,
    p: Array,
    start: Array,
    v: Array,
    m: Array,
    rows: Rows,
    sign: float,
    divisor: float,
    longest: float,
    keep: float,
    eps: float,
    blocks: Blocks,
) -> None:
    """receive of what the rows say, of the blocks [first, stop); 0 where dead."""
    divisors, bounds, keeps, all_eps = splat8(divisor), splat8(longest), splat8(keep), splat8(eps)
    for block in range(first, stop):
        low, high = blocks.starts[block], blocks.starts[block + 1]
        size, bits = splat8(sign * rows.values[blocks.scale_at[block]]), blocks.bits_at[block]
        for at in range(low, high, BYTE):
            d8 = root(load8(v, at)) + all_eps
            z8 = cut(signed_by_bits(rows.bytes[bits + (at - low) // BYTE], size), bounds * d8)
            store(m, at, z8 / divisors)
            store(p, at, keeps * load8(start, at) - z8 / d8)
        for index in range(blocks.dead_starts[block], blocks.dead_starts[block + 1]):
            p[blocks.dead[index]] = 0
            m[blocks.dead[index]] = 0


# The floor under a frozen variance (optim/variance/floor.py).


@compiled
def floor_sums(v: Array, cuts: Array, sum_p: Array, count_p: Array) -> None:
    """Of each piece between cuts: the sum of v, in float64, and how many are above 0. sum, count: modified."""
    for piece in range(sum_p.size):
        part = v[cuts[piece] : cuts[piece + 1]]
        whole = part.size // 4 * 4
        a = b = c = d = 0.0
        count = 0
        for at in range(0, whole, 4):  # four sums, for one would wait for each addition
            a += part[at]
            b += part[at + 1]
            c += part[at + 2]
            d += part[at + 3]
        for at in range(whole, part.size):
            a += part[at]
        for at in range(part.size):
            count += part[at] > 0
        sum_p[piece], count_p[piece] = (a + b) + (c + d), count


@compiled
def raise_to_floor(v: Array, cuts: Array, floor_p: Array, raised: Array) -> None:
    """v <- what is below the floor of its piece, raised to it; raised <- which are. Both modified."""
    for piece in range(floor_p.size):
        low, high = cuts[piece], cuts[piece + 1]
        part, below_floor, floor = v[low:high], raised[low:high], floor_p[piece]
        for at in range(part.size):
            below = part[at] < floor
            below_floor[at] = below
            part[at] = floor if below else part[at]
