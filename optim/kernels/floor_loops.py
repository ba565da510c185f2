"""The loops of the floor under a frozen variance, compiled by numba: float32 and float64 (optim/variance/floor.py)."""

from __future__ import annotations

from thinwire.comm.kernels.compiled import Array, compiled


@compiled
def sums(v: Array, cuts: Array, sum_p: Array, count_p: Array) -> None:
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
def raise_to(v: Array, cuts: Array, floor_p: Array, raised: Array) -> None:
    """v <- what is below the floor of its piece, raised to it; raised <- which are. Both modified."""
    for piece in range(floor_p.size):
        low, high = cuts[piece], cuts[piece + 1]
        part, below_floor, floor = v[low:high], raised[low:high], floor_p[piece]
        for at in range(part.size):
            below = part[at] < floor
            below_floor[at] = below
            part[at] = floor if below else part[at]
