"""Simulated time: what happens next, and chance. The same seed gives the same run: no wall clock, no threads."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable

Call = Callable[[], None]


class Clockwork:
    """Calls things in the order of their times; those of one time in the order in which they were asked for."""

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self.chance = random.Random(seed)
        self._queue: list[tuple[float, int, Call]] = []
        self._number = 0

    def after(self, seconds: float, call: Call) -> None:
        """Call it so many seconds from now."""
        self._number += 1
        heapq.heappush(self._queue, (self.now + seconds, self._number, call))

    def run(self, until: Callable[[], bool]) -> None:
        """Go on until that is true, or nothing is left to do."""
        while self._queue and not until():
            self.now, _, call = heapq.heappop(self._queue)
            call()
