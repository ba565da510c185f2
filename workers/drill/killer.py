"""Which worker is killed next? Any of those that train, at random, by SIGKILL to its process on this machine."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Kill:
    """A worker that was killed. time: unix seconds. step: one that was committed by then, about the last."""

    time: float
    slot: int
    rank: int
    step: int = 0


class Killer:
    """Kills every `every_s` seconds, from `every_s` after it was made. snapshot: of the membership, None where away."""

    def __init__(self, snapshot: Callable[[], dict[str, Any] | None], every_s: float, seed: int) -> None:
        self.kills: list[Kill] = []
        self._snapshot, self._every_s, self._random = snapshot, every_s, random.Random(seed)
        self._next = time.monotonic() + every_s

    def look(self) -> Kill | None:
        """Kill one, if it is time and there is one. Returns it."""
        if time.monotonic() < self._next:
            return None
        known = self._snapshot() or {}
        members = known.get("members") or []
        if not members:
            return None
        chosen = self._random.choice(members)
        try:
            os.kill(chosen["pid"], signal.SIGKILL)
        except ProcessLookupError:  # it has just died of something else
            return None
        self._next = time.monotonic() + self._every_s
        kill = Kill(time.time(), chosen["slot"], chosen["rank"], known["last_step"])
        self.kills.append(kill)
        return kill
