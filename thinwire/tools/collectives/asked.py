"""What `thinwire bench collectives` is asked: what the command line needs of this room, without torch."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from thinwire.contract.collectives import TITLES, World
from thinwire.tools.lab.spec import LabSpec

SIZES = tuple(1 << power for power in range(10, 25, 2))
"""1 KiB to 16 MiB, each four times the last."""
MOST_BYTES = 1 << 30
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}

Say = Callable[[str, float], None]
"""What is going on, and how much of it is done, 0 to 1."""


class BenchFailed(Exception):
    """Nothing was measured; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Asked:
    """sizes: of vectors, bytes, ascending. turns: of each, after one that is not counted. seconds: for all of it.

    piece_bytes: that a chain passes on at a time. device: "auto", "cpu" or "gpu". lab: hosts to start; None: this
    process is a rank. out: the file; None: where jobs look, or for a lab none. Raises: ValueError.
    """

    sizes: tuple[int, ...] = SIZES
    turns: int = 5
    seconds: float = 60.0
    piece_bytes: int = 256 << 10
    algorithms: tuple[str, ...] = tuple(TITLES)
    device: str = "auto"
    lab: LabSpec | None = None
    out: Path | None = None

    def __post_init__(self) -> None:
        if len(self.sizes) < 2 or list(self.sizes) != sorted(set(self.sizes)):
            raise ValueError(f"sizes = {self.sizes}: must be two or more, ascending: one cannot tell alpha from beta")
        if not 4 <= self.sizes[0] <= self.sizes[-1] <= MOST_BYTES:
            raise ValueError(f"sizes = {self.sizes}: must be from 4 bytes to 1g")
        if not 1 << 10 <= self.piece_bytes <= MOST_BYTES:
            raise ValueError(f"piece = {self.piece_bytes}: must be from 1k to 1g")
        unknown = [name for name in self.algorithms if name not in TITLES]
        if unknown or not self.algorithms:
            raise ValueError(f"algorithms = {', '.join(unknown) or 'none'}: must be of {', '.join(TITLES)}")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was measured. link: in words. file: where it was kept; None: nowhere."""

    world: World
    link: str
    file: Path | None


def size_bytes(text: str) -> int:
    """64k, 1m, 4096 -> bytes. Raises: ValueError."""
    found = re.fullmatch(r"(\d+)([kmg]?)(i?b)?", text.strip().lower())
    if not found:
        raise ValueError(f"{text!r} is not a size, such as 4096, 64k or 1m (k is 1024 bytes)")
    return int(found[1]) * _UNITS[found[2]]


def size_text(num_bytes: int) -> str:
    """As it may be asked for."""
    unit = next(unit for unit in ("g", "m", "k", "") if num_bytes % _UNITS[unit] == 0)
    return f"{num_bytes // _UNITS[unit]}{unit}"


def link_of(lab: LabSpec) -> str:
    """In words, alike for labs that are alike."""
    loss = f", loss {lab.loss:g}" if lab.loss else ""
    return f"a lab of {lab.rate_mbit:g} Mbit/s, {lab.delay_ms:g} ms one way{loss}"
