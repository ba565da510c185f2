"""The driver's log, sent to the service while it grows, where the service cannot read the file.

Ray has a driver's output written to a file on the driver's machine: what the driver, Ray and the workers' processes say
through it. A thread reads that file and sends what is new. What was said in the last moments of a driver that is killed
is in the file alone.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
from pathlib import Path
from typing import Self

from thinwire.contract.remote_run import LOG_PART_BYTES
from thinwire.workers.telemetry.service_client import ServiceClient, ServiceError

logger = logging.getLogger(__name__)

LOOK_S = 1.0
LAST_WORDS_S = 10.0


class LogCopy:
    """Sends the file at `path` until it is closed."""

    def __init__(self, path: Path, service: ServiceClient, look_s: float = LOOK_S) -> None:
        self._path, self._service, self._look_s = path, service, look_s
        self._offset, self._full = 0, False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="thinwire-log", daemon=True)
        self._thread.start()

    @classmethod
    def of_this_process(cls, service: ServiceClient) -> Self | None:
        """Of what this process writes to its standard output; None where that is no file."""
        if not stat.S_ISREG(os.fstat(1).st_mode):
            return None
        return cls(Path(os.readlink("/proc/self/fd/1")), service)

    def close(self, timeout_s: float = LAST_WORDS_S) -> None:
        """Send what is there, for so long at most."""
        self._closing.set()
        self._thread.join(timeout_s)

    def _follow(self) -> None:
        try:
            last = False
            while not last and not self._full:
                last = self._closing.wait(self._look_s)  # what was written before the close is sent after it
                self._send_new()
        except OSError as error:
            logger.warning("log_unsent path=%s reason=%s", self._path, error)

    def _send_new(self) -> None:
        """All that is new; where the service does not answer, later. Raises OSError."""
        with self._path.open("rb", buffering=0) as file:
            while not self._full:
                file.seek(self._offset)
                part = file.read(LOG_PART_BYTES)
                if not part:
                    return
                try:
                    kept = self._service.add_log(self._offset, part)
                except ServiceError:  # logged by the client, once
                    return
                self._offset, self._full = kept.next_offset, kept.full
