"""How much one job may report: a bucket of bytes for each job, which fills again with time."""

from __future__ import annotations

import threading
from dataclasses import dataclass


@dataclass(slots=True)
class _Bucket:
    left: float
    at: float


class Rates:
    """Buckets by name. Methods may be called from any thread. burst: bytes a full bucket holds; rate: bytes/s."""

    def __init__(self, burst: float, rate: float) -> None:
        self._burst, self._rate = burst, rate
        self._buckets: dict[str, _Bucket] = {}
        self._lock = threading.Lock()

    def take(self, name: str, size: float, now: float) -> float:
        """Take `size` bytes out of the bucket; the answer is 0.0, or, where it has fewer, in how many seconds it has.

        now: seconds of a clock that does not go back; what is larger than a bucket takes a full one.
        """
        size = min(size, self._burst)
        with self._lock:
            bucket = self._buckets.setdefault(name, _Bucket(self._burst, now))
            bucket.left = min(self._burst, bucket.left + max(0.0, now - bucket.at) * self._rate)
            bucket.at = now
            if bucket.left < size:
                return (size - bucket.left) / self._rate
            bucket.left -= size
            if len(self._buckets) > 1024:  # those that are full again say nothing
                full = [n for n, b in self._buckets.items() if b.left + (now - b.at) * self._rate >= self._burst]
                for one in full:
                    del self._buckets[one]
            return 0.0
