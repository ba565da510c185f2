"""Starts the launcher, again and again until that works, and keeps what it said last.

Requests never ask a launcher: one that hangs would hold every thread that serves them. The reconciler looks in each
of its turns, in a thread of its own, and requests are answered from what it found.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from thinwire.service.launch.protocol import Launcher, LauncherError

logger = logging.getLogger(__name__)


class LauncherStarter:
    """Calls `launcher.start` in a thread until it has worked, `retry_s` seconds apart.

    service_id: asked for then: it is in the database.
    silent_s: a launcher that has not answered for so long counts as one that cannot be used.
    """

    def __init__(
        self, launcher: Launcher, service_id: Callable[[], str] = str, *, silent_s: float, retry_s: float = 5.0
    ) -> None:
        self._launcher = launcher
        self._service_id = service_id
        self._silent_s = silent_s
        self._retry_s = retry_s
        self._stop = threading.Event()
        self._waiting: str | None = "it is starting"
        self._last: tuple[float, str | None] | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin; returns at once."""
        self._thread = threading.Thread(target=self._loop, name="thinwire-launcher", daemon=True)
        self._thread.start()

    def look(self) -> str | None:
        """Ask the launcher, and keep what it says. None when jobs can be submitted, else why not. Blocks as it does."""
        if self._waiting is not None:
            return self._waiting
        said = self._launcher.ready()
        self._last = (time.monotonic(), said)
        return said

    def reason(self) -> str | None:
        """None when jobs can be submitted, else why not, as of the last look. It waits for nothing."""
        if self._waiting is not None or self._last is None:
            return self._waiting
        answered, said = self._last
        age_s = time.monotonic() - answered
        if age_s <= self._silent_s:
            return said
        return f"it has not answered for {age_s:.0f} s" + (f"; before that: {said}" if said is not None else "")

    def age_s(self) -> float | None:
        """Seconds since the launcher last answered; None where it has not been started."""
        return None if self._last is None else time.monotonic() - self._last[0]

    def close(self, timeout_s: float = 60.0) -> None:
        """Close the launcher, and whatever a start that is under way brings up. Safe to call twice.

        Raises: LauncherError, where the launcher could not end everything.
        """
        self._stop.set()
        self._waiting = "the service is ending"
        self._launcher.close()  # makes a slow start give up
        if self._thread is not None and self._thread.is_alive():
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                logger.warning("launcher_still_starting timeout_s=%g", timeout_s)
            self._launcher.close()  # a start that began just as the first close ended

    def _loop(self) -> None:
        while not self._stop.is_set():
            try:
                self._launcher.start(self._service_id())
            except LauncherError as error:
                logger.warning(
                    "launcher_start_failed name=%s retry_s=%g error=%s", self._launcher.name, self._retry_s, error
                )
                why = str(error)
            except Exception as error:
                logger.exception("launcher_start_failed name=%s retry_s=%g", self._launcher.name, self._retry_s)
                why = f"{type(error).__name__}: {error}"
            else:
                logger.info("launcher_started name=%s", self._launcher.name)
                self._last = (time.monotonic(), None)
                if not self._stop.is_set():
                    self._waiting = None
                return
            if not self._stop.is_set():
                self._waiting = why
            self._stop.wait(self._retry_s)
