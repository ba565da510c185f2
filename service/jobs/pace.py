"""How often jobs report: more seldom the more of them there are, so that one service bears them all.

Every answer to a report and to a registration says how long until the next (contract/reports.py). The rule looks at
nothing but how many send and who looks, so that it cannot swing:

    a report          after (jobs that report) / A_SECOND seconds, at least REPORT_S and at most MOST_REPORT_S;
                      of a job that somebody looks at, no others count than those
    a registration    after (workers that register) / A_SECOND seconds, at least HEARTBEAT_S, at most MOST_HEARTBEAT_S

Somebody looks at a job who reads its stream, or has asked for it, its history or its log in the last LOOKED_S.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from typing import Final

from thinwire.contract.reports import HEARTBEAT_S, MOST_HEARTBEAT_S, MOST_REPORT_S, REPORT_S

A_SECOND: Final = 50.0
"""Reports that come in a second where jobs are many; of jobs that somebody looks at as many, and registrations."""
LOOKED_S: Final = 30.0
"""A page or a command that asks again and again does so more often."""


class Pace:
    """Methods may be called from any thread. streamed: does somebody read a stream of this job? elapsed: seconds."""

    def __init__(
        self, streamed: Callable[[str], bool] = lambda job_id: False, elapsed: Callable[[], float] = time.monotonic
    ) -> None:
        self._streamed, self._elapsed = streamed, elapsed
        self._lock = threading.Lock()
        # Whoever has sent within three of the longest times between two is there.
        self._jobs, self._live = _Recent(3 * MOST_REPORT_S), _Recent(3 * MOST_REPORT_S)
        self._workers = _Recent(3 * MOST_HEARTBEAT_S)
        self._looked = _Recent(LOOKED_S)

    def looked(self, job_id: str) -> None:
        """Somebody has asked for this job, and been answered."""
        with self._lock:
            self._looked.seen(job_id, self._elapsed())

    def reported(self, job_id: str) -> float:
        """Seconds until the next report of this job, which has just sent one."""
        is_streamed = self._streamed(job_id)
        with self._lock:
            now = self._elapsed()
            jobs = self._live if is_streamed or self._looked.has(job_id, now) else self._jobs
            many = jobs.seen(job_id, now)
        return min(max(REPORT_S, many / A_SECOND), MOST_REPORT_S)

    def knows(self, job_id: str, rank: int) -> bool:
        """Has this worker registered not long ago?"""
        with self._lock:
            return self._workers.has((job_id, rank), self._elapsed())

    def registered(self, job_id: str, rank: int) -> float:
        """Seconds until the next registration of this worker, which has just sent one."""
        with self._lock:
            many = self._workers.seen((job_id, rank), self._elapsed())
        return min(max(HEARTBEAT_S, many / A_SECOND), MOST_HEARTBEAT_S)


class _Recent:
    """Who was seen in the last `window_s`, the one that was longest ago first."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._at: dict[Hashable, float] = {}

    def seen(self, one: Hashable, now: float) -> int:
        """How many were, this one too."""
        self._at.pop(one, None)
        self._at[one] = now
        while self._at[first := next(iter(self._at))] <= now - self._window_s:
            del self._at[first]
        return len(self._at)

    def has(self, one: Hashable, now: float) -> bool:
        return self._at.get(one, now - self._window_s) > now - self._window_s
