"""What requests have seen of rows, such as when a token was used last: kept here, and written later by whoever prunes.

A request that only looks would else be a write each time.
"""

from __future__ import annotations

import threading
from typing import Final, Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")

COARSE_S: Final = 600.0
"""When somebody was seen last is written this seldom."""


class LastSeen(Generic[Key, Value]):
    """The newest of each row. Methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[Key, Value] = {}

    def note(self, key: Key, value: Value, now: float, written_at: float | None, *, changed: bool = False) -> None:
        """Keep it, where what is written of the row is COARSE_S old, or is of something else. Times in unix seconds."""
        if changed or written_at is None or now - written_at >= COARSE_S:
            with self._lock:
                self._found[key] = value

    def take(self) -> dict[Key, Value]:
        """What is to be written now."""
        with self._lock:
            found, self._found = self._found, {}
        return found
