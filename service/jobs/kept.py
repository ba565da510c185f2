"""How many bytes are kept of all jobs of each person, without adding up all their jobs at every report.

What reports add is counted as it comes. What is deleted, or another service adds, is seen when the sum is taken anew:
after AGAIN_S, or at once where there seems to be no room. So a person who deletes has room at once; and two threads
may count one batch twice, or not at all, until then.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

AGAIN_S = 60.0


@dataclass(slots=True)
class _Sum:
    size: int
    taken_at: float


class KeptOfPeople:
    """Methods may be called from any thread. clock: seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sums: dict[str, _Sum] = {}
        self._lock = threading.Lock()

    def room(self, who: str, most_bytes: int, add_up: Callable[[str], int]) -> int:
        """Of so many bytes, how many are left; none or less where all are used. add_up: asks the database."""
        with self._lock:
            known = self._sums.get(who)
            if known is not None and self._clock() - known.taken_at < AGAIN_S and known.size < most_bytes:
                return most_bytes - known.size
        size = add_up(who)
        with self._lock:
            self._sums[who] = _Sum(size, self._clock())
        return most_bytes - size

    def add(self, who: str | None, size: int) -> None:
        """So many bytes more are kept, and committed. Nothing where they are nobody's."""
        with self._lock:
            if who is not None and (known := self._sums.get(who)) is not None:
                known.size += size
