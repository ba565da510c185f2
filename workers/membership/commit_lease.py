"""The lease to commit steps: it holds for LEASE_S from when the worker sent the last beat that was heard.

Until then the worker may commit a step. The server waits until every lease of a generation has ended before it lets
others go on without any of its members (rules.py). It reckons from when it heard a beat, which is never before that
beat was sent: its count ends later.
Time is of a clock that goes on while the process is stopped or the machine sleeps; it is passed in.
"""

from __future__ import annotations

import time
from collections import deque

LEASE_S = 45.0
"""Below the 60 s in which a node of Ray must reach the cluster's head again: longer, and Ray has killed the worker."""

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def lease_clock() -> float:
    """Seconds, for a lease. Of the time in which the machine sleeps too, where the system counts it (Linux)."""
    return time.clock_gettime(_CLOCK)


class CommitLease:
    """Of one member. Not safe for threads: State guards it."""

    def __init__(self, lease_s: float = LEASE_S) -> None:
        self._lease_s = lease_s
        self._until = float("-inf")
        self._number = 0
        self._sent: deque[tuple[int, float]] = deque()

    def beat(self, now: float) -> int:
        """The number of a beat that is sent from `now` on."""
        while self._sent and now - self._sent[0][1] > self._lease_s:
            self._sent.popleft()
        self._number += 1
        self._sent.append((self._number, now))
        return self._number

    def heard(self, number: int) -> None:
        """The server has heard the beat of this number. Nothing where that beat was sent before give_up()."""
        while self._sent and self._sent[0][0] <= number:
            sent, at = self._sent.popleft()
            if sent == number:
                self._until = max(self._until, at + self._lease_s)

    def give_up(self) -> None:
        """No more commit before a beat that is yet to be sent is heard."""
        self._until = float("-inf")
        self._sent.clear()

    def holds(self, now: float) -> bool:
        """May this worker commit?"""
        return now < self._until
