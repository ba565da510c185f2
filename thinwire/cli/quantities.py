"""How quantities are written for people, and how rates and times are read: decimal units, three significant digits."""

from __future__ import annotations

import re
from datetime import datetime, timedelta

_BYTE_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def bytes_text(amount: float) -> str:
    """Bytes with a decimal unit: 0 B, 999 B, 1.23 MB."""
    size, unit = float(amount), 0
    while abs(size) >= 999.5 and unit < len(_BYTE_UNITS) - 1:
        size /= 1000.0
        unit += 1
    return f"{size:.0f} B" if unit == 0 else f"{size:.3g} {_BYTE_UNITS[unit]}"


def seconds_text(amount_s: float) -> str:
    """A duration: 0.42 s, 9.3 s, 75 s becomes 1 min 15 s, 2 h 05 min."""
    if amount_s < 9.95:
        return f"{amount_s:.2g} s"
    if amount_s < 59.5:
        return f"{amount_s:.0f} s"
    minutes, seconds = divmod(round(amount_s), 60)
    if minutes < 60:
        return f"{minutes} min {seconds:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


def time_text(moment: datetime) -> str:
    """In the machine's time zone, to the second."""
    return moment.astimezone().strftime("%Y-%m-%d %H:%M:%S")


def ratio_text(ratio: float | None) -> str:
    """A compression ratio: 31.8x, 1,012x; a dash where there is none."""
    if ratio is None:
        return "-"
    return f"{ratio:.3g}x" if ratio < 999.5 else f"{ratio:,.0f}x"


def loss_text(loss: float | None) -> str:
    """A loss; a dash where there is none."""
    return "-" if loss is None else f"{loss:.4f}"


def reported_text(value: float | str) -> str:
    """A number of a script's own, of whatever size: four digits that mean something; nan and inf as they are."""
    return value if isinstance(value, str) else f"{value:.4g}"


def steps_text(step: int, of: int | None, between: str = "/") -> str:
    """How far a run is: 20/100; only 20 where nobody knows of how many."""
    return str(step) if of is None else f"{step}{between}{of}"


RATE_MBIT = {"kbit": 1e-3, "mbit": 1.0, "gbit": 1e3}
TIME_MS = {"us": 1e-3, "ms": 1.0, "s": 1e3}


def rate_mbit(text: str) -> float:
    """100mbit, 2.7gbit -> 10^6 bit/s. Raises: ValueError."""
    return _read(text, RATE_MBIT, "a rate with its unit, such as 100mbit or 2.7gbit")


def time_ms(text: str) -> float:
    """0.1ms, 100us, 0 -> milliseconds. Raises: ValueError."""
    return 0.0 if text.strip() == "0" else _read(text, TIME_MS, "a time with its unit, such as 0.1ms or 100us, or 0")


DURATION_S = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}


def duration_s(text: str) -> float:
    """90s, 30m, 2h, 7d -> seconds. Raises: ValueError."""
    return _read(text, DURATION_S, "a time with its unit, such as 90s, 30m, 2h or 7d")


def past(text: str, now: datetime) -> datetime:
    """So long before now, 2h, 7d; or a date, 2026-11-27, or a date and time, in the machine's time zone where none is
    written. Raises: ValueError.
    """
    try:
        return datetime.fromisoformat(text.strip()).astimezone()
    except ValueError:
        pass  # a duration, perhaps
    except OverflowError as error:  # of the years 1 and 9999 in another time zone
        raise ValueError(f"{text!r} is beyond what a date can be") from error
    try:
        return now - timedelta(seconds=duration_s(text))
    except (ValueError, OverflowError):
        raise ValueError(
            f"{text!r} is neither a time that has passed, such as 90m, 12h or 7d, nor a date, such as 2026-11-27 or "
            "2026-11-27T08:00"
        ) from None


def _read(text: str, units: dict[str, float], what: str) -> float:
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+) *([a-z]+)(?:/s)?", text.strip().lower())
    if not found or found[2] not in units:
        raise ValueError(f"{text!r} is not {what}; the units are {', '.join(units)}")
    return float(found[1]) * units[found[2]]
