"""The connection of one member to the server, which it makes again for ever, while training goes on.

Nothing is kept for a server that is away: at a new connection the member's state says again what still holds.
"""

from __future__ import annotations

import errno
import logging
import random
import socket
import threading
import time
from collections.abc import Callable

from pydantic import BaseModel

from thinwire.workers.membership import messages as m
from thinwire.workers.membership.lines import BadLine, Lines
from thinwire.workers.membership.state import State

logger = logging.getLogger(__name__)

CONNECT_S = 5.0
FIRST_RETRY_S = 0.05
LAST_RETRY_S = 1.0
FIND_S = 1.0
"""Between tries. Well under the time that a restarted server waits for its members."""


class Link:
    """Connects from a thread of its own until `close`."""

    def __init__(self, resolve: Callable[[], tuple[str, int]], secret: str, state: State, name: str) -> None:
        self._resolve, self._secret, self._state, self._name = resolve, secret, state, name
        self._lines: Lines | None = None
        self._address: tuple[str, int] | None = None
        self._finding: threading.Thread | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="thinwire-member", daemon=True)
        self._thread.start()

    def send(self, message: BaseModel) -> bool:
        """Send to the server if it is there. False if nothing was sent."""
        lines = self._lines
        if lines is None:
            return False
        try:
            lines.write(message)
        except OSError as error:
            logger.info("membership_send_failed worker=%s error=%r", self._name, str(error))
            if _gave_up(error):
                self._state.give_up_lease()
            lines.end()  # the thread that reads sees it, and connects again
            return False
        return True

    def stop(self) -> None:
        """Connect no more; what was sent arrives. Does not wait."""
        self._closing.set()
        if (lines := self._lines) is not None:
            lines.end()

    def join(self, timeout_s: float) -> None:
        """Wait until the thread has ended."""
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        retry_s = FIRST_RETRY_S
        while not self._closing.is_set():
            began = time.monotonic()
            try:
                why = self._connect()
            except Exception as error:  # noqa: BLE001 - resolve() is the caller's, and training goes on without us
                why = f"{type(error).__name__}: {error}"
            if self._closing.is_set():
                return
            logger.info("membership_unreachable worker=%s why=%r retry_s=%.2f", self._name, why, retry_s)
            self._state.cut()
            self._find_server()
            if time.monotonic() - began > LAST_RETRY_S:
                retry_s = FIRST_RETRY_S
            self._closing.wait(retry_s * random.uniform(0.5, 1.0))
            retry_s = min(2 * retry_s, LAST_RETRY_S)

    def _find_server(self) -> None:
        """Ask where it is now. Where nobody answers, because of the same broken network, it is tried where it was."""
        if self._address is not None and (self._finding is None or not self._finding.is_alive()):
            self._finding = threading.Thread(target=self._find, name="thinwire-member-find", daemon=True)
            self._finding.start()
            self._finding.join(FIND_S)

    def _find(self) -> None:
        try:
            self._address = self._resolve()
        except Exception as error:  # noqa: BLE001 - resolve() is the caller's; it is asked again
            logger.info("membership_unfound worker=%s error=%r", self._name, str(error))

    def _connect(self) -> str:
        """One connection from its begin to its end; why it ended."""
        self._address = self._address or self._resolve()
        lines = Lines(socket.create_connection(self._address, CONNECT_S))
        try:
            lines.write(m.Key(secret=self._secret))
            lines.write(self._state.hello())
            until: float | None = time.monotonic() + CONNECT_S
            while not self._closing.is_set():
                message = lines.read(m.from_server, m.LONGEST_LINE_BYTES, until)
                if message is None:
                    return "the server ended the connection"
                if isinstance(message, m.Welcome):
                    until, self._lines = None, lines
                for answer in self._state.heard(message):
                    lines.write(answer)
                if isinstance(message, m.Refusal):
                    self._closing.set()
            return "closed"
        except BadLine as error:
            self._state.give_up_lease()
            return str(error)
        except OSError as error:
            if _gave_up(error) and self._lines is not None:  # welcome: until then its end proves nothing to the server
                self._state.give_up_lease()
            return str(error)
        finally:
            self._lines = None
            lines.end()
            lines.close()


def _gave_up(error: OSError) -> bool:
    """Did this side give the connection up, since it could not send? Else it has ended by itself."""
    return isinstance(error, BlockingIOError | TimeoutError) and error.errno != errno.ETIMEDOUT
