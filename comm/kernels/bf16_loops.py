"""The loop of bf16.narrow, compiled by numba."""

from __future__ import annotations

from thinwire.comm.kernels.bf16 import Noise
from thinwire.comm.kernels.bf16_vectors import rounded8_any
from thinwire.comm.kernels.compiled import Array, compiled
from thinwire.comm.kernels.vectors import BYTE, load8, store


@compiled
def narrow(x: Array, noise: Noise, out: Array) -> None:
    """out <- rounded(x)."""
    for at in range(0, x.size, BYTE):
        store(out, at, rounded8_any(load8(x, at), noise, at))
