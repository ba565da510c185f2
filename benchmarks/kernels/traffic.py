"""How many bytes of memory each kernel must move per value of float32, array by array: the floor it is counted by.

Scales are left out: with blocks of 4096 values each array of them is 0.001 B a value.
"""

from __future__ import annotations

from dataclasses import dataclass

BIT = 1 / 8
FLOAT = 4.0


@dataclass(frozen=True, slots=True)
class Access:
    """One array that is read, written or both. Bytes a value."""

    array: str
    read: float
    written: float


def _changed(array: str) -> Access:
    return Access(array, FLOAT, FLOAT)


def _read(array: str, size: float = FLOAT) -> Access:
    return Access(array, size, 0)


def _written(array: str, size: float = FLOAT) -> Access:
    return Access(array, 0, size)


def floor(num_rows: int) -> dict[str, list[Access]]:
    """By kernel; each array is read at most once and written at most once. num_rows: what a server adds up."""
    rows = _read(f"bits of {num_rows} received rows", num_rows * BIT)
    own_bits, last_bits = _written("bits of the own rows", BIT), _read("bits of the last rows", BIT)
    return {
        "copy": [_read("source"), _written("target")],
        "encode_sum": [_changed("kept sums c"), _read("x"), own_bits],
        "encode_lerp": [_changed("kept sums c"), _read("x"), last_bits, own_bits],
        "serve": [_changed("kept sums b"), rows, own_bits],
        "decode": [last_bits, _written("out")],
        "descend": [_changed("parameters"), _read("variance"), last_bits],
    }


def total(accesses: list[Access]) -> float:
    """Bytes a value, read and written."""
    return sum(access.read + access.written for access in accesses)
