"""Where the time and the bytes of a run go: one account a part, seconds and payload bytes together."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from thinwire.comm.protocol import Stats


class Meter:
    """Books wall seconds and the bytes that the transport counted (`stats`) on named parts. Parts do not nest."""

    def __init__(self, stats: Stats) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.sent_bytes: dict[str, int] = defaultdict(int)
        self._stats = stats
        self._loaded_bytes: dict[str, int] = {}

    def attach(self, stats: Stats) -> None:
        """Count the bytes of another group from here on, between two parts."""
        self._stats = stats

    @contextmanager
    def part(self, name: str, bytes_on: str | None = None) -> Iterator[None]:
        """Book what happens inside on `name`. On a GPU the host's time, which the step's last read synchronises.

        bytes_on: another part that the bytes belong to, such as those of a step that begin to leave in backward.
        """
        stats = self._stats
        began, sent = time.perf_counter(), stats.sent_bytes
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - began
            self.sent_bytes[bytes_on or name] += stats.sent_bytes - sent

    def state(self) -> dict[str, dict[str, float]]:
        """Both accounts, for a checkpoint."""
        return {"seconds": dict(self.seconds), "sent_bytes": dict(self.sent_bytes)}

    def load(self, state: Mapping[str, Mapping[str, float]]) -> None:
        """Go on from saved accounts."""
        for name, seconds in state["seconds"].items():
            self.seconds[name] += seconds
        self._loaded_bytes = {name: int(value) for name, value in state["sent_bytes"].items()}
        for name, value in self._loaded_bytes.items():
            self.sent_bytes[name] += value

    def sent_by_this_process(self) -> dict[str, int]:
        """Bytes by part without what was loaded: a counter that starts at 0 with the process."""
        return {name: value - self._loaded_bytes.get(name, 0) for name, value in self.sent_bytes.items()}
