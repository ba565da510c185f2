"""Payload bytes that a rank sends to its peers in a collective, done by its standard algorithm.

A ring for sum, mean and gather, pairwise for all-to-all. TCP, IP and transport headers are not payload.
"""

from __future__ import annotations

from torch import Tensor


def all_to_all_bytes(rows: Tensor, size: int) -> int:
    """Bytes a rank sends: every row but its own."""
    return rows.nbytes // size * (size - 1)


def all_gather_bytes(row: Tensor, size: int) -> int:
    """Bytes a rank sends in a ring: one row at each of n-1 steps."""
    return row.nbytes * (size - 1)


def all_reduce_bytes(x: Tensor, size: int) -> int:
    """Bytes a rank sends in a ring: 2 (n-1)/n of the vector."""
    return 2 * (size - 1) * x.nbytes // size


def broadcast_bytes(x: Tensor, size: int, rank: int, src: int) -> int:
    """Bytes a rank sends, booked on the source: n-1 copies leave it, by itself or relayed."""
    return x.nbytes * (size - 1) if rank == src else 0
