"""What the service does by itself once in a while, such as to remove what need not be kept."""

from __future__ import annotations

from collections.abc import Callable

PAUSE_S = 60.0
"""Between two times."""


class Occasion:
    """Says whether it is time again. Of one thread. clock: unix seconds, which may be set back. pause_s: in between."""

    def __init__(self, clock: Callable[[], float], pause_s: float = PAUSE_S) -> None:
        self._clock, self._pause_s = clock, pause_s
        self._last: float | None = None

    def has_come(self) -> bool:
        """Is it time? At first it is; where it was, the next time is after the pause."""
        now = self._clock()
        if self._last is not None and 0.0 <= now - self._last < self._pause_s:
            return False
        self._last = now
        return True

    def come_again(self) -> None:
        """Something was left: it is time again at once."""
        self._last = None
