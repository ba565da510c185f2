"""Whether a worker that waits for its peers can still reach them. Asked only while it waits.

A collective whose data are lost on the way waits for its time-out; the membership, which all can reach, sees nothing
wrong. So a worker that has waited for WAITED_S holds a connection to the door (door.py) of every peer of its
generation. Its system asks by it, now and then, whether theirs is there (TCP's keepalive), and theirs answers, whatever
the process does: one that computes, is stopped or hangs is reached. Nobody accepts such a connection before the next
group forms, and one for each pair and generation is all that there is. Whom it cannot reach for UNREACHABLE_S, by that
connection or a new one, it reports to the membership, and again: that leaves one of such a pair out (stuck.py).
"""

from __future__ import annotations

import errno
import logging
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from thinwire.workers.membership import Seat

logger = logging.getLogger(__name__)

CAN_ASK = sys.platform == "linux"
"""Elsewhere there are other names for what is set below, and a collective's time-out has to do."""
ANSWERED = (errno.ECONNREFUSED, errno.ECONNRESET)
"""The peer's system has answered, and its process is gone: the membership knows."""


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds.

    waited_s: in one collective, before anybody is asked. unreachable_s: then a pair is reported; again_s: and again.
    connect_s: for a connection. asks_s: between two questions over one, which is closed where two had no answer.
    look_s: between two looks.
    """

    waited_s: float = 3.0
    unreachable_s: float = 10.0
    again_s: float = 5.0
    connect_s: float = 3.0
    asks_s: int = 2
    look_s: float = 0.25


class Reach:
    """Of one worker, in one generation. Threads may call it. `close` before the next generation.

    host: this worker's own address, by which the others know it. report: to the membership: ranks, and why.
    """

    def __init__(
        self, seat: Seat, host: str, report: Callable[[dict[int, str]], None], times: Times | None = None
    ) -> None:
        self.times = times or Times()
        self._generation, self._report = seat.generation, report
        self._ways = {
            rank: _Way(host, (member.identity.host, member.identity.port), self.times)
            for rank, member in enumerate(seat.members)
            if rank != seat.rank
        }
        self._lock = threading.Lock()
        self._num_waits = 0
        self._waits, self._closed = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """A collective has been waited for, for waited_s."""
        with self._lock:
            self._num_waits += 1
            if self._closed.is_set() or not CAN_ASK:
                return
            self._waits.set()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="thinwire-reach", daemon=True)
                self._thread.start()

    def end(self) -> None:
        """It is over, in whatever way."""
        with self._lock:
            self._num_waits -= 1
            if not self._num_waits:
                self._waits.clear()

    def close(self) -> None:
        """Ask nobody any more. Safe to call twice."""
        with self._lock:
            self._closed.set()
            self._waits.set()  # for the thread to see it
        if self._thread is not None:
            self._thread.join(self.times.connect_s)  # it may be reporting, to a membership that takes nothing

    def _run(self) -> None:
        report_at = 0.0
        try:
            while not self._closed.is_set():
                now = time.monotonic()
                broken = {rank: why for rank, way in self._ways.items() if (why := way.look(now)) is not None}
                if broken and now >= report_at and self._num_waits and not self._closed.is_set():
                    logger.warning("peers_unreachable generation=%d ranks=%s", self._generation, broken)
                    self._report(broken)
                    report_at = now + self.times.again_s
                self._closed.wait(self.times.look_s)
                self._waits.wait()
        finally:
            for way in self._ways.values():
                way.close()


class _Way:
    """To one peer."""

    def __init__(self, host: str, to: tuple[str, int], times: Times) -> None:
        self._host, self._to, self._times = host, to, times
        self._socket: socket.socket | None = None
        self._connected = False
        self._began = 0.0
        self._unanswered_since: float | None = None
        self._why = ""

    def look(self, now: float) -> str | None:
        """Why the peer has not been reached for unreachable_s; None where it was."""
        if self._socket is None:
            self._open(now)
        else:
            self._see(now)
        since = self._unanswered_since
        return self._why if since is not None and now - since >= self._times.unreachable_s else None

    def close(self) -> None:
        """Close the connection."""
        if self._socket is not None:
            self._socket.close()
            self._socket, self._connected = None, False

    def _open(self, now: float) -> None:
        self._socket = asking = socket.socket(socket.AF_INET6 if ":" in self._to[0] else socket.AF_INET)
        self._began = now
        if self._unanswered_since is None:
            self._unanswered_since, self._why = now, "no answer yet"
        try:
            asking.setblocking(False)
            asking.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option in ("TCP_KEEPIDLE", "TCP_KEEPINTVL"):
                asking.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), self._times.asks_s)
            asking.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
            asking.bind((self._host, 0))
            self._take(asking.connect_ex(self._to), now)
        except OSError as error:
            self._take(error.errno or errno.EIO, now)

    def _see(self, now: float) -> None:
        asking = self._socket
        assert asking is not None
        if error := asking.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._take(error, now)
        elif not self._connected and _is_writable(asking):
            self._connected, self._unanswered_since = True, None
        elif not self._connected and now - self._began > self._times.connect_s:
            self._take(errno.ETIMEDOUT, now)

    def _take(self, error: int, now: float) -> None:
        """What the system says of the connection; 0 and EINPROGRESS: nothing yet."""
        if error in (0, errno.EINPROGRESS):
            return
        if self._connected and self._unanswered_since is None:  # the last answer came before the first of two questions
            self._unanswered_since = now - 3 * self._times.asks_s
        self.close()
        if error in ANSWERED:
            self._unanswered_since = None
        else:
            self._why = (
                f"it waits for its data, and {self._to[0]}:{self._to[1]} gives no answer ({errno.errorcode[error]})"
            )


def _is_writable(asking: socket.socket) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(asking, selectors.EVENT_WRITE)
        return bool(selector.select(0))
