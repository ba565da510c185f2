"""A control plane as a child process: started in a session of its own, found dead, ended with everything it started.

A session of its own keeps a Ctrl-C of the terminal away from it: the process that started it ends it in order.

Interrupts makes SIGINT, SIGTERM and SIGHUP one KeyboardInterrupt, at moments where it may come. A command that starts
processes must never lose one because a signal arrived between starting it and noting it down, or while it was cleaning
up. So signals raise only in an `armed` part of the code, and wait for the end of a `deferred` one. Everywhere else they
are counted.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Self

from thinwire.cli.client import Server, Unreachable, server_of

logger = logging.getLogger(__name__)

STOP_S = 30.0
"""From SIGTERM to SIGKILL. The server ends Ray in this time."""
_POLL_S = 0.1


class ChildServer:
    """One `thinwire serve` for `home`. Its output goes to `log`."""

    def __init__(self, home: Path, launcher: str) -> None:
        self.home = home
        self.log = home / "server.log"
        self._launcher = launcher
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        command = [sys.executable, "-m", "thinwire.cli.main", "serve"]
        command += ["--host", "127.0.0.1", "--port", "0", "--launcher", launcher]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, "THINWIRE_HOME": str(home), "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def find(self) -> Server:
        """Where this very process listens. Raises Unreachable while it does not yet, or no longer."""
        server = server_of(self.home)
        # A server.json of an earlier server that was killed names another process.
        if server.pid != self._process.pid:
            raise Unreachable(f"the server (process {self._process.pid}) does not answer yet")
        return server

    def exit_code(self) -> int | None:
        """None while it lives."""
        return self._process.poll()

    def log_tail(self, num_lines: int) -> str:
        """The last lines of its output."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-num_lines:])

    def stop(self, hurry: Callable[[], bool]) -> None:
        """End it and everything it started; safe to call twice.

        SIGTERM, then after STOP_S, or as soon as `hurry` is true, SIGKILL for its process group and the end of its Ray.
        Raises: LauncherError where processes of Ray outlive even that; the message names them.
        """
        if self._process.poll() is None:
            self._process.terminate()
        deadline = time.monotonic() + STOP_S
        while self._process.poll() is None and time.monotonic() < deadline and not hurry():
            time.sleep(_POLL_S)
        killed = self._process.poll() is None
        self._kill_group()
        code = self._process.wait()
        if killed:
            logger.warning("server_killed pid=%d reason=did_not_end", self._process.pid)
        if self._launcher == "local" and (killed or code != 0):
            self._end_ray()

    def _kill_group(self) -> None:
        # A group lives as long as any of its members, so this finds also what the server left behind.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _end_ray(self) -> None:
        """End the Ray that a server which was killed could not end. Raises LauncherError."""
        from thinwire.service.launch.ray_head import RayHead

        if not (self.home / "ray").exists():
            return  # it ended before it could begin with Ray
        head = RayHead(self.home / "ray", lease_s=0.0, start_timeout_s=0.0)
        head.acquire()
        try:
            # A keeper that was only just started writes its record within a moment.
            for _ in range(20):
                if head.recorded() is not None:
                    break
                time.sleep(_POLL_S)
            head.end()
        finally:
            head.release()


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """The handlers, installed while it is entered. For the main thread only; `count` is the signals so far."""

    def __init__(self) -> None:
        self.count = 0
        self._armed = False
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        for number in _SIGNALS:
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *what: object) -> None:
        for number, handler in self._before.items():
            # None stands for a handler that was not installed from Python, which cannot be put back.
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)  # type: ignore[arg-type]

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Inside, the first signal raises KeyboardInterrupt; one that came before raises at once."""
        self._armed = True
        try:
            self._raise_if_any()
            yield
        finally:
            self._armed = False

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Inside an armed part: a signal raises only at the end of this one."""
        self._armed = False
        try:
            yield
        finally:
            self._armed = True
        self._raise_if_any()

    def _raise_if_any(self) -> None:
        if self.count:
            self._armed = False
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self._armed:
            self._armed = False  # the clean-up that this one begins is not to be interrupted by the next
            raise KeyboardInterrupt
