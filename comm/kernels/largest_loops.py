"""The loop of largest.py."""

from __future__ import annotations

from thinwire.comm.kernels.compiled import Array, compiled


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
