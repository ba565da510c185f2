"""What is to be undone after some seconds, whatever a fault of the schedule waits for meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable

Action = Callable[[], None]


class Later:
    """Actions, each in a thread of its own when its time has come."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[threading.Timer, Action] = {}
        self._error: Exception | None = None

    def do(self, seconds: float, action: Action) -> None:
        """After so many seconds."""
        timer = threading.Timer(seconds, lambda: self._run(timer))
        timer.daemon = True
        with self._lock:
            self._waiting[timer] = action
        timer.start()

    def check(self) -> None:
        """Raises: what an action has raised."""
        if self._error is not None:
            raise self._error

    def all_now(self) -> None:
        """What still waits, in its order. Raises: what one of them raises."""
        for timer in list(self._waiting):
            timer.cancel()
            self._run(timer)
        for timer in list(self._waiting):  # one whose time had come just then
            timer.join()
        self.check()

    def _run(self, timer: threading.Timer) -> None:
        with self._lock:
            action = self._waiting.pop(timer, None)
        if action is None:
            return
        try:
            action()
        except Exception as error:  # noqa: BLE001 - the border of a thread: raised by check()
            self._error = error
