"""A control plane as a child process: started in a session of its own, found dead, ended with everything it started.

A session of its own keeps a Ctrl-C of the terminal away from it: the process that started it ends it in order.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

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
