"""Where the time of a step goes, in the thread that runs it: what other threads do meanwhile is hidden.

Encoding and waiting are counted by the exchange itself (Stats), whichever phase they are in: they are taken out of it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from thinwire.comm.protocol import Stats

FORWARD, BACKWARD, COMPRESS, WIRE, UPDATE = PHASES = ("forward", "backward", "compress", "wire", "update")


class PhaseClock:
    """Seconds by phase since the last `take`."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def phase(self, name: str, stats: Stats | None = None) -> Iterator[None]:
        """Count what passes inside as `name`, but for what `stats` count as encoding and waiting."""
        encoded, waited = (0.0, 0.0) if stats is None else (stats.encode_s, stats.waited_s)
        began = time.perf_counter()
        try:
            yield
        finally:
            took = time.perf_counter() - began
            encode_s, wait_s = (0.0, 0.0) if stats is None else (stats.encode_s - encoded, stats.waited_s - waited)
            self.seconds[COMPRESS] += encode_s
            self.seconds[WIRE] += wait_s
            self.seconds[name] += took - encode_s - wait_s

    def take(self) -> dict[str, float]:
        """The seconds so far, and begin at zero."""
        taken, self.seconds = self.seconds, dict.fromkeys(PHASES, 0.0)
        return taken
