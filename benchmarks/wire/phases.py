"""Where the time of a step goes: a clock of nested phases that counts each moment once, in the innermost phase.

    with clock.phase("update"):             step()
        with clock.phase("compress"):       the exchange's own work
            with clock.phase("wire"):       its waiting

Only the thread that made the clock is counted: what another thread does meanwhile is hidden, and what is reported is
what the step waits for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

FORWARD, BACKWARD, COMPRESS, WIRE, UPDATE = PHASES = ("forward", "backward", "compress", "wire", "update")


class PhaseClock:
    """Seconds by phase since the last `take`."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._thread = threading.get_ident()
        self._open: list[str] = []
        self._since = 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what passes inside as `name`, but for what inner phases count."""
        if threading.get_ident() != self._thread:
            yield
            return
        self._close()
        self._open.append(name)
        try:
            yield
        finally:
            self._close()
            self._open.pop()

    def take(self) -> dict[str, float]:
        """The seconds so far, and begin at zero."""
        taken, self.seconds = self.seconds, dict.fromkeys(PHASES, 0.0)
        return taken

    def watch(self, owner: Any, names: tuple[str, ...], phase: str) -> None:
        """Count every call of these methods of the object `owner` as `phase`; those that it does not have are left."""
        for name in names:
            method = getattr(owner, name, None)
            if method is not None:
                setattr(owner, name, self._counted(method, phase))

    def _counted(self, method: Callable[..., Any], phase: str) -> Callable[..., Any]:
        @wraps(method)
        def counted(*arguments: Any, **named: Any) -> Any:
            with self.phase(phase):
                return method(*arguments, **named)

        return counted

    def _close(self) -> None:
        """Book the time since the last change on the phase that is open."""
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now
