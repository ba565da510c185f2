"""Starts a launcher beside the service: a cluster takes seconds to come up, and the service answers meanwhile."""

from __future__ import annotations

import logging
import threading

from thinwire.service.launch.protocol import Launcher, LauncherError

logger = logging.getLogger(__name__)


class LauncherStarter:
    """Calls `launcher.start` in a thread until it has worked, `retry_s` seconds apart."""

    def __init__(self, launcher: Launcher, retry_s: float = 5.0) -> None:
        self._launcher = launcher
        self._retry_s = retry_s
        self._stop = threading.Event()
        self._waiting: str | None = "it is starting"
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin; returns at once."""
        self._thread = threading.Thread(target=self._loop, name="thinwire-launcher", daemon=True)
        self._thread.start()

    def reason(self) -> str | None:
        """None when jobs can be submitted, else why not. May block as `launcher.ready` does."""
        return self._waiting if self._waiting is not None else self._launcher.ready()

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
                self._launcher.start()
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
                if not self._stop.is_set():
                    self._waiting = None
                return
            if not self._stop.is_set():
                self._waiting = why
            self._stop.wait(self._retry_s)
