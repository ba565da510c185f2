"""How a person writes a rate and a time, and how they are read."""

from __future__ import annotations

import re

RATE_MBIT = {"kbit": 1e-3, "mbit": 1.0, "gbit": 1e3}
TIME_MS = {"us": 1e-3, "ms": 1.0, "s": 1e3}


def rate_mbit(text: str) -> float:
    """100mbit, 2.7gbit -> 10^6 bit/s. Raises: ValueError."""
    return _read(text, RATE_MBIT, "a rate with its unit, such as 100mbit or 2.7gbit")


def time_ms(text: str) -> float:
    """0.1ms, 100us, 0 -> milliseconds. Raises: ValueError."""
    return 0.0 if text.strip() == "0" else _read(text, TIME_MS, "a time with its unit, such as 0.1ms or 100us, or 0")


def _read(text: str, units: dict[str, float], what: str) -> float:
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+) *([a-z]+)(?:/s)?", text.strip().lower())
    if not found or found[2] not in units:
        raise ValueError(f"{text!r} is not {what}; the units are {', '.join(units)}")
    return float(found[1]) * units[found[2]]
