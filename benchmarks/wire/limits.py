"""How fast a step could be at most: the wire's limit from payload, the processors' from bytes of memory.

    limit = max(wire, CPU)
    wire  = payload of a rank and direction / (0.957 x the link's rate)
    CPU   = bytes of memory of all ranks on this machine / copy rate of all cores + forward and backward alone

The bytes are floors: every vector that a method must read or write once, with nothing read twice; copies of the
kernel's network stack, scales of blocks and what a store reads before it writes are left out. n ranks; bytes a value.
"""

from __future__ import annotations

from benchmarks.wire.cases import GOODPUT

BITS = 1 / 8
ADAM = 28.0
"""Reads p, g, m, v, writes p, m, v."""
ENCODE = 12.0 + 2 * BITS
"""Reads the kept sum, the gradient and the momentum's bits, writes the kept sum and bits."""
DESCEND = 12.0 + BITS
"""Reads p, the divisor and bits, writes p."""
LOCAL_STEP = 32.0
"""0/1 Adam between syncs: reads g, m, u, x, the divisor, writes m, u, x."""
SYNC = 20.0 + BITS
"""Its sync before the wire: reads g, m, u and the kept sum, writes the kept sum and bits."""
AGREE = 16.0 + BITS
"""Its sync after the wire: reads bits, x_s and the divisor, writes m and x."""


def serve(ranks: int) -> float:
    """Of a chunk, for each of its values: reads a bit of each rank, the kept sum, writes both; a chunk is 1/n."""
    return (8.0 + ranks * BITS + BITS) / ranks


def ring(ranks: int, value: float) -> float:
    """All-reduce of values of so many bytes: each phase sends, receives; the first one adds what it received."""
    return 7.0 * value * (ranks - 1) / ranks


def floor_bytes(method: str, ranks: int) -> float | None:
    """Bytes of memory a rank must move for a value and step; None for a method that no floor is worked out for."""
    one_bit = ENCODE + serve(ranks) + DESCEND
    if method.startswith("zero_one_adam_"):
        interval = int(method.rpartition("_")[2])
        return ((interval - 1) * LOCAL_STEP + SYNC + serve(ranks) + AGREE) / interval
    return {
        "ddp_fp32": ring(ranks, 4.0) + ADAM,
        "adam": ring(ranks, 4.0) + ADAM,
        # reads g and d, writes their sum and 8 bits; serves its chunk; reads both again for d; decodes into g
        "adam_int8": 13.0 + (9.0 + ranks) / ranks + 9.0 + 5.0 + ADAM,
        "ddp_bf16": 12.0 + ring(ranks, 2.0) + ADAM,  # cast there, and back
        "ddp_fp16": 12.0 + ring(ranks, 2.0) + ADAM,
        "chain_flat": one_bit,
        "onebit_adam": one_bit,
        "onebit_adam_rows": one_bit,
        "onebit_adam_shadow": one_bit + serve(ranks),
        # the fresh variance is read and written, and p, v and bits, also those of before, once more for the norms
        "onebit_lamb": one_bit + 16.0 + 2 * BITS,
    }.get(method)


def wire_limit_s(payload_bytes: float, rate_mbit: float) -> float:
    """Seconds that the payload of a rank takes at best."""
    return 8 * payload_bytes / (GOODPUT * rate_mbit * 1e6)


def cpu_limit_s(method: str, ranks: int, parameters: int, copy_bytes_s: float, compute_s: float) -> float | None:
    """Seconds that the machine's memory and the model's computation take at best."""
    floor = floor_bytes(method, ranks)
    return None if floor is None else ranks * parameters * floor / copy_bytes_s + compute_s
