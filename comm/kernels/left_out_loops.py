"""The loop of left_out.py."""

from __future__ import annotations

from thinwire.comm.kernels.compiled import Array, compiled


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
