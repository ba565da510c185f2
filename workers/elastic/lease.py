"""A lease: something happens unless it is renewed in time. The worker's process and the membership actor have one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

lease_expired = threading.Event()
"""Set in a worker's process when nobody has asked for it during the lease. A train function that watches it may save
and return; the process ends soon after, in any case."""


class Lease:
    """Calls `on_expiry` in a thread of its own, when `lease_s` have gone without `renew`.

    repeats: again whenever so much time has gone; else once.
    """

    def __init__(self, lease_s: float, on_expiry: Callable[[], None], *, repeats: bool = False) -> None:
        self._lease_s = lease_s
        self._repeats = repeats
        self._tick_s = min(lease_s / 10, 0.5)
        self._on_expiry = on_expiry
        self._lock = threading.Lock()
        self._renewed = time.monotonic()
        self._holders = 0
        threading.Thread(target=self._watch, name="lease", daemon=True).start()

    def renew(self) -> None:
        """Start the lease again."""
        with self._lock:
            self._renewed = time.monotonic()

    @contextmanager
    def held(self) -> Iterator[None]:
        """The lease does not run within this block, and starts again after it."""
        with self._lock:
            self._holders += 1
        try:
            yield
        finally:
            with self._lock:
                self._holders -= 1
                self._renewed = time.monotonic()

    def _watch(self) -> None:
        before = time.monotonic()
        while True:
            time.sleep(self._tick_s)
            now = time.monotonic()
            with self._lock:
                # A process that was stopped or starved could not be asked: the gap does not count.
                if self._holders or now - before > 4 * self._tick_s:
                    self._renewed = now
                expired = now - self._renewed > self._lease_s
            if expired:
                self._on_expiry()
                if not self._repeats:
                    return
                self.renew()
            before = time.monotonic()
