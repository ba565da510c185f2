"""A loop split over cores: in equal runs, one a thread; what it computes does not depend on their number."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

MIN_BLOCKS = 16
"""Blocks that a thread must get to be worth waking: 64 Ki values, tens of microseconds."""


class Threads:
    """Up to `most` threads for loops that run without the interpreter's lock, one loop at a time."""

    def __init__(self, most: int) -> None:
        if most < 1:
            raise ValueError(f"threads = {most}: must be at least 1")
        self._most = most
        self._pool: tuple[int, ThreadPoolExecutor] | None = None

    def split(self, count: int, least: int, loop: Callable[[int, int], None]) -> None:
        """loop(first, stop) over [0, count), at least `least` a thread; the caller's is one of them."""
        parts = min(self._most, -(-count // least))
        if parts <= 1:
            loop(0, count)
            return
        bounds = [count * part // parts for part in range(parts + 1)]
        others = [self._executor().submit(loop, bounds[i], bounds[i + 1]) for i in range(1, parts)]
        try:
            loop(0, bounds[1])
        finally:
            for other in others:
                other.result()

    def _executor(self) -> ThreadPoolExecutor:
        # A forked child has the object but not its threads, and would wait for them for ever.
        if self._pool is None or self._pool[0] != os.getpid():
            self._pool = os.getpid(), ThreadPoolExecutor(self._most - 1, thread_name_prefix="thinwire-kernels")
        return self._pool[1]
