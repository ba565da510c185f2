"""How often a slot may die soon after its start before the job ends: a bug must not crash and start for ever."""

from __future__ import annotations

import time


class WorkersKeepDying(RuntimeError):
    """A slot died early too often; whatever kills it will kill the next one too."""


class EarlyDeaths:
    """Counts, for each slot, deaths in a row within `early_s` of the worker's start."""

    def __init__(self, early_s: float, most: int) -> None:
        self._early_s = early_s
        self._most = most
        self._in_a_row: dict[int, int] = {}

    def died(self, slot: int, started: float, why: str) -> None:
        """A worker that was started at this monotonic time is gone. Raises: WorkersKeepDying."""
        if time.monotonic() - started > self._early_s:
            self._in_a_row[slot] = 0
            return
        self._in_a_row[slot] = self._in_a_row.get(slot, 0) + 1
        if self._in_a_row[slot] > self._most:
            raise WorkersKeepDying(
                f"slot {slot} died {self._in_a_row[slot]} times in a row within {self._early_s:g} s of its start, more "
                f"than the {self._most} that are borne: mend what kills it (see its log) and submit the job again. "
                f"The last: {why}"
            )

    def pause_s(self, slot: int) -> float:
        """How long to wait before the next worker of this slot: nothing at first, then longer."""
        in_a_row = self._in_a_row.get(slot, 0)
        return 0.0 if in_a_row <= 1 else min(0.5 * 2.0 ** (in_a_row - 2), 8.0)

    def in_a_row(self, slot: int) -> int:
        """Early deaths of this slot since a worker of it lived longer."""
        return self._in_a_row.get(slot, 0)
