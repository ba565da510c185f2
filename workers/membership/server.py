"""The membership server: threads and sockets around the rules. It decides nothing.

One thread accepts, one reads for each connection and one writes for each, so that a member that reads nothing holds up
nobody; one calls the rules' clock; one hands out events. All of them change the rules under one lock, and what the
rules ask for is queued for the writers under the same lock: every member hears things in the order in which they were
decided.

The secret comes first and in the clear: it keeps out strangers and mistakes, not somebody who can read the network.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import queue
import random
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

from pydantic import BaseModel

from thinwire.workers.membership import messages as m
from thinwire.workers.membership.attendance import (
    DEFAULT_TIMING,
    Close,
    Happened,
    Keep,
    Send,
    Timing,
)
from thinwire.workers.membership.messages import BadLine, Lines
from thinwire.workers.membership.rules import Rules
from thinwire.workers.membership.seats import Limits, MembershipEvent, Snapshot

logger = logging.getLogger(__name__)

HELLO_S = 5.0
"""In which a connection must have said who it is."""
MAX_STRANGERS = 64
"""Connections at a time that have not yet, or as many as the job may have workers, which may all come at once. One more
closes one of them, by lot: those that only hang keep nobody out."""
TICK_S = 0.05
KEPT = 16
"""Events that a snapshot has, for those that look now and then."""
RESET = (ConnectionResetError, ConnectionAbortedError)
"""The peer's system knows of no such connection."""


class MembershipServer:
    """Listens as soon as it is made; `close` ends it. `on_event` is called from one thread, in order.

    timing: how long its rules wait.
    after, timing.quiet_s: of a server that replaces another one: the generation that `keep` was called with last, and
    how long somebody of it might still commit, so that newcomers do not begin beside the members (`vacant_in_s` of the
    other; LEASE_END_S where nobody can be asked; 0 where it was vacant). keep: called with each generation before
    anybody hears of it, and with whether it is vacant; what it raises is logged.
    Raises ValueError for a secret under 16 characters, OSError if it cannot listen.
    """

    def __init__(
        self,
        limits: Limits,
        secret: str,
        timing: Timing = DEFAULT_TIMING,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        after: int = 0,
        keep: Callable[[int, bool], None] | None = None,
        on_event: Callable[[MembershipEvent], None] | None = None,
    ) -> None:
        if len(secret) < 16:
            raise ValueError(f"a secret of {len(secret)} characters can be guessed: give 16 or more")
        self._secret = secret.encode()
        self._rules = Rules(limits, timing, time.monotonic(), after=after)
        self._keep = keep
        self._on_event = on_event
        self._lock = threading.Lock()
        self._outboxes: dict[str, _Outbox] = {}
        self._events: queue.SimpleQueue[MembershipEvent | None] = queue.SimpleQueue()
        self._num_events = 0
        self._given_up: deque[MembershipEvent] = deque(maxlen=KEPT)
        self._still: deque[MembershipEvent] = deque(maxlen=KEPT)
        self._open: set[Lines] = set()
        self._strangers: list[Lines] = []
        self._closing = threading.Event()
        self._listener = socket.create_server((host, port))
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._threads = [
            threading.Thread(target=run, name=f"thinwire-membership-{name}", daemon=True)
            for name, run in (("accept", self._accept), ("clock", self._clock), ("events", self._deliver))
        ]
        for thread in self._threads:
            thread.start()

    def set_limits(self, limits: Limits) -> None:
        """Grow or shrink to these limits at the next boundary."""
        with self._lock:
            self._rules.set_limits(limits, time.monotonic())
            self._do()

    def know(self, known: dict[str, str]) -> None:
        """What is known of the job's signature: a worker that says otherwise is refused while there are no members."""
        with self._lock:
            self._rules.know(known, time.monotonic())
            self._do()

    def dismiss(self, slot: int, reason: str) -> None:
        """Let the worker of this slot leave at the next boundary; at once if it only waits. Nothing if nobody does."""
        with self._lock:
            self._rules.dismiss(slot, reason, time.monotonic())
            self._do()

    def bar(self, id: str, reason: str) -> None:
        """Let the worker of this id leave, as by dismiss(), and send it away when it comes back."""
        with self._lock:
            self._rules.bar(id, reason, time.monotonic())
            self._do()

    def snapshot(self) -> Snapshot:
        """What the server knows now."""
        with self._lock:
            now = self._rules.snapshot(self._num_events)
            return now.model_copy(update={"given_up": tuple(self._given_up), "still": tuple(self._still)})

    def vacant_in_s(self) -> float:
        """Seconds after which nobody that this server knows can commit, if it hears of nobody any more."""
        with self._lock:
            return self._rules.vacant_in_s(time.monotonic())

    @property
    def highest(self) -> int:
        """The highest generation that it knows of."""
        with self._lock:
            return self._rules.highest

    def close(self) -> None:
        """Stop listening and end all connections. Members go on and look for the next server."""
        self._closing.set()
        with contextlib.suppress(OSError):  # some systems refuse it for a listener; close() wakes accept() there
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for lines in self._open:
                lines.end()
        self._events.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(5.0)

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                connection, peer = self._listener.accept()
            except OSError as error:
                if not self._closing.is_set():
                    logger.error("membership_accept_failed error=%r", str(error))
                    self._closing.wait(0.1)  # out of file descriptors, for one; those that come wait in the backlog
                continue
            try:
                lines = Lines(connection)
            except OSError:  # it has gone already
                connection.close()
                continue
            self._let_in(lines)
            try:
                threading.Thread(
                    target=self._read_from, args=(lines, peer), name="thinwire-membership-read", daemon=True
                ).start()
            except RuntimeError as error:  # no more threads now: it comes again
                logger.error("membership_accept_failed error=%r", str(error))
                self._forget(None, lines, "", self._rules.gone)
                self._closing.wait(0.1)

    def _let_in(self, lines: Lines) -> None:
        with self._lock:
            self._open.add(lines)
            if len(self._strangers) >= max(MAX_STRANGERS, self._rules.limits.max):
                logger.warning("membership_crowded strangers=%d", len(self._strangers))
                self._strangers.pop(random.randrange(len(self._strangers))).end()
            self._strangers.append(lines)

    def _read_from(self, lines: Lines, peer: tuple[str, int]) -> None:
        id, why = None, "its connection ended"
        # A worker that got no welcome in time gives the connection up, and lives. So its end proves nothing before the
        # worker has said something more, which it does as soon as it is welcome.
        how: Callable[[str, str, float], None] = self._rules.cut
        try:
            if not self._closing.is_set():
                id = self._meet(lines)
            while id is not None and (message := lines.read(m.from_member, m.LONGEST_LINE_BYTES)) is not None:
                self._heard(id, lines, message)
                how = self._rules.gone
        except OSError as error:
            why = f"its connection broke: {error.strerror or error}"
            how = self._broke(error)
        except BadLine as error:
            why, how = str(error), self._rules.misspoke
            logger.warning("membership_bad_line peer=%s:%d why=%r", peer[0], peer[1], why)
        finally:
            self._forget(id, lines, why, how)

    def _meet(self, lines: Lines) -> str | None:
        """Who it is; None if it was refused, and knows it."""
        until = time.monotonic() + HELLO_S
        key = lines.read(m.key, m.LONGEST_KEY_BYTES, until)
        if key is None:
            return None
        if not hmac.compare_digest(key.secret.encode(), self._secret):
            logger.warning("membership_wrong_secret")
            lines.write(m.Refusal(verdict="refused", why="the secret is wrong: give the one of this job"))
            return None
        hello = lines.read(m.from_member, m.LONGEST_LINE_BYTES, until)
        if not isinstance(hello, m.Hello):
            return None
        with self._lock:
            if lines not in self._strangers:
                return None  # it has been closed for another one, and must not count as one that ended its connection
            self._strangers.remove(lines)
            refusal = self._rules.hello(hello.identity, hello.seated, time.monotonic())
            if refusal is None:
                if before := self._outboxes.get(hello.identity.id):
                    before.end()  # it has come back before its last connection was seen to end
                self._outboxes[hello.identity.id] = _Outbox(lines)
            self._do()
        if refusal is not None:
            lines.write(refusal)
            return None
        return hello.identity.id

    def _heard(self, id: str, lines: Lines, message: m.FromMember) -> None:
        with self._lock:
            outbox = self._outboxes.get(id)
            if outbox is None or outbox.lines is not lines:
                return  # it was fenced, dismissed or has said goodbye, and does not know it yet
            if isinstance(message, m.Hello):
                raise BadLine("a second hello came on one connection: open another")
            self._rules.heard(id, message, time.monotonic())
            self._do()

    def _forget(self, id: str | None, lines: Lines, why: str, how: Callable[[str, str, float], None]) -> None:
        with self._lock:
            self._open.discard(lines)
            if lines in self._strangers:
                self._strangers.remove(lines)
            if id is not None and (outbox := self._outboxes.get(id)) is not None and outbox.lines is lines:
                del self._outboxes[id]
                outbox.end()
                if not self._closing.is_set():
                    if outbox.broke is not None:  # then the thread that reads sees an end as if it were the peer's
                        how = self._broke(outbox.broke)
                    how(id, why, time.monotonic())
                    self._do()
        lines.end()
        lines.close()

    def _broke(self, error: OSError) -> Callable[[str, str, float], None]:
        """What a connection with this error means to the rules."""
        if isinstance(error, BrokenPipeError):
            return self._rules.gone  # it was written to after its peer had closed it (Linux: tcp_reset)
        return self._rules.reset if isinstance(error, RESET) else self._rules.cut

    def _do(self) -> None:
        """What the rules ask for. Under the lock."""
        for effect in self._rules.take():
            match effect:
                case Send(to, message):
                    if outbox := self._outboxes.get(to):
                        outbox.put(message)
                case Close(id):
                    if outbox := self._outboxes.pop(id, None):
                        outbox.end()
                case Keep(generation, vacant):
                    self._call_keep(generation, vacant)
                case Happened(kind, generation, fields):
                    self._num_events += 1
                    event = MembershipEvent(kind, time.time(), generation, fields)
                    self._events.put(event)
                    if kind in ("minority", "gave_up"):
                        self._given_up.append(event)
                    elif kind in ("waited_for", "stands_still"):
                        self._still.append(event)

    def _call_keep(self, generation: int, vacant: bool) -> None:
        if self._keep is not None:
            try:
                self._keep(generation, vacant)
            except Exception:  # the next server learns it from members, and from checkpoints
                logger.exception("membership_not_kept generation=%d", generation)

    def _clock(self) -> None:
        while not self._closing.wait(TICK_S):
            with self._lock:
                self._rules.tick(time.monotonic())
                self._do()

    def _deliver(self) -> None:
        while (event := self._events.get()) is not None:
            fields = " ".join(f"{name}={value!r}" for name, value in event.fields.items())
            logger.info("membership_%s generation=%d %s", event.kind, event.generation, fields)
            if self._on_event is not None:
                try:
                    self._on_event(event)
                except Exception:  # a listener must not end the listening
                    logger.exception("membership_event_failed kind=%s", event.kind)


class _Outbox:
    """What one member is still to be sent, and the thread that sends it."""

    def __init__(self, lines: Lines) -> None:
        self.lines = lines
        self.broke: OSError | None = None
        self._queue: queue.SimpleQueue[BaseModel | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="thinwire-membership-write", daemon=True).start()

    def put(self, message: BaseModel) -> None:
        self._queue.put(message)

    def end(self) -> None:
        """End the connection when all is sent."""
        self._queue.put(None)

    def _run(self) -> None:
        try:
            while (message := self._queue.get()) is not None:
                self.lines.write(message)
        except OSError as error:
            self.broke = error
            logger.info("membership_write_failed error=%r", str(error))
        self.lines.end()  # the thread that reads sees it
