"""A worker's side of the membership: join, train, hear at once that the generation is over, stop where all stop.

Two threads: one reads what the server says (`Link`), one sends beats. The training loop only looks at what they left,
under a lock that nobody holds while sending.

A planned stop takes a promise (roster.py). Once this member has said yes to a step, its loop does not go past that
step before it knows the outcome: confirmed, it stops there; cancelled, it goes on. If the connection ends in between,
nobody knows whether the others were confirmed. Then this generation is over for it when it comes to that step, as
if a member had been lost, and it goes through join() like all the others. The same happens where the server says
nothing for OUTCOME_S.

The connection is made again for ever, while training goes on. Nothing is kept for a server that is away: at a new
connection the member's state says again what still holds.
"""

from __future__ import annotations

import errno
import logging
import math
import random
import socket
import threading
import time
from collections.abc import Callable

from pydantic import BaseModel

from thinwire.workers.membership import messages as m
from thinwire.workers.membership.messages import BadLine, Lines
from thinwire.workers.membership.seats import LONGEST_REASON, Change, Doing, Identity, Seat, Standing, worker_name
from thinwire.workers.membership.state import Ended, Fenced, JoinTimeout, NotSeated, State

logger = logging.getLogger(__name__)

OUTCOME_S = 30.0
"""How long a loop waits at a promised step for the outcome, from a server that is there and says nothing."""
CLOSE_S = 5.0
CONNECT_S = 5.0
FIRST_RETRY_S = 0.05
LAST_RETRY_S = 1.0
FIND_S = 1.0
"""Between tries. Well under the time that a restarted server waits for its members."""
UNMOVED_BEATS = 5.0
"""A loop that has begun nothing else for so many beats is described in them."""


class Member:
    """One worker in the membership of its job. It connects at once, in a thread, and again whenever the server is lost.

    resolve: where the server is; called for each connection. For each process there is one, with an id of its own.
    on_heard: called, and not to wait, whenever the server has answered a beat.
    """

    def __init__(
        self,
        resolve: Callable[[], tuple[str, int]],
        secret: str,
        identity: Identity,
        *,
        beat_s: float = 1.0,
        on_heard: Callable[[], None] = lambda: None,
    ) -> None:
        self.doing: Callable[[float], Doing | None] = lambda after_s: None
        """What the loop is at, if it has not moved for so long. Asked before each beat, in a thread of its own."""
        self._identity = identity
        self._state = State(identity, on_heard=on_heard)
        self._closing = threading.Event()
        self._link = Link(resolve, secret, self._state, worker_name(identity))
        self._beats = threading.Thread(target=self._beat, args=(beat_s,), name="thinwire-beats", daemon=True)
        self._beats.start()

    def join(
        self,
        standing: Standing,
        timeout_s: float | None = None,
        *,
        signature: dict[str, str] | None = None,
        floor: int = 0,
    ) -> Seat:
        """Wait for the next generation, and take a seat in it. Blocks until it closes; None waits for ever.

        signature: what this worker is to train; where it differs from the job's, the server refuses the worker. floor:
        the next generation has a larger number than this, and than any that a member or the server knows.
        After a JoinTimeout this member still waits at the server, and a seat that came meanwhile is what the next
        join() returns. Raises JoinTimeout, Fenced, Dismissed, Refused.
        """
        until = math.inf if timeout_s is None else time.monotonic() + timeout_s
        with self._state.changed:
            self._raise_if_ended()
            after = self._state.seat.generation if self._state.seat else 0
            known = self._state.standing  # of a join() that timed out: the server has it
            if self._state.seat is None or self._state.handed_out:
                self._state.standing, self._state.promise, self._state.stop_at = standing, None, math.inf
                self._state.signature, self._state.floor = signature, floor
            joining = self._state.join(standing) if self._state.standing is not None and known != standing else None
        if joining is not None:
            self._link.send(joining)  # again at each new connection
        with self._state.changed:
            while self._state.standing is not None:
                self._raise_if_ended()
                if not self._wait_until(until):
                    raise JoinTimeout(
                        f"{worker_name(self._identity)} waited {timeout_s:g} s for the generation after {after}: "
                        "call join() again, or look at the membership server for whom it waits"
                    )
            self._raise_if_ended()
            self._state.handed_out = True
            return self._seated()

    def formed(self) -> None:
        """This member has the process group of its generation. Raises NotSeated."""
        with self._state.changed:
            seat, self._state.formed = self._seated(), True
        self._link.send(m.Formed(generation=seat.generation))  # again at each new connection

    def unreachable(self, generation: int, ranks: dict[int, str]) -> None:
        """This member cannot talk to these ranks of that generation: why, in words. Nothing where that is over.

        The server leaves one of each such pair out, and ends the generation: see `over`. Raises NotSeated.
        """
        with self._state.changed:
            seat = self._seated()
            if seat.generation != generation:
                return
            reported = self._state.unreachable = {rank: why[:LONGEST_REASON] for rank, why in ranks.items()}
        self._link.send(m.Unreachable(generation=seat.generation, ranks=reported))  # again at each new connection

    def may_commit(self) -> bool:
        """Has the server been heard of lately enough that nobody can have gone on without this worker?

        Under a microsecond, and sends nothing. Where it is False no step may count, and nothing be saved: see
        wait_to_commit().
        """
        with self._state.changed:
            return self._state.may_commit()

    def wait_to_commit(self, timeout_s: float) -> bool:
        """may_commit(), as soon as it is True, or `over` is not None, or after `timeout_s`."""
        with self._state.changed:
            self._state.changed.wait_for(lambda: self._state.may_commit() or self._state.over is not None, timeout_s)
            return self._state.may_commit()

    @property
    def fenced(self) -> bool:
        """Has the server gone on without this member? Then it may never commit again."""
        return isinstance(self._state.ended, Fenced)

    @property
    def has_ended(self) -> bool:
        """Is there no way back for this member?"""
        return self._state.ended is not None

    @property
    def over(self) -> str | None:
        """Why the present generation is over without being planned, in words; None while it stands."""
        return self._state.over

    @property
    def lost(self) -> dict[int, str]:
        """Ranks of the present generation that are lost, and why."""
        with self._state.changed:
            return dict(self._state.lost)

    def wait_over(self, timeout_s: float) -> str | None:
        """`over`, as soon as it is not None, or after `timeout_s`."""
        with self._state.changed:
            self._state.changed.wait_for(lambda: self._state.over is not None, timeout_s)
            return self._state.over

    def at_boundary(self, step: int) -> Change | None:
        """To be called after each committed step. The change, if the generation ends here as planned; mostly None.

        Waits only at a step to which this member said yes and of which the outcome is not known. Look at `over` when
        it returns None. Takes under 10 microseconds otherwise, and sends nothing.
        """
        with self._state.changed:
            now = time.monotonic()
            if self._state.step is not None:
                self._state.longest_step_s = max(self._state.longest_step_s, now - self._state.stepped_at)
            self._state.step, self._state.stepped_at = step, now
            if step < self._state.stop_at:
                return None
            return self._stop(step)

    def ask_to_leave(self, reason: str) -> None:
        """Its process or machine is about to be taken away: have a boundary agreed on at which it leaves in order.

        Returns at once; at_boundary() then gives a Change in which it leaves, and a join() raises Dismissed. May be
        called at any time, from any thread.
        """
        with self._state.changed:
            if self._state.ended is not None or self._state.notice is not None:
                return
            self._state.notice = reason[:LONGEST_REASON]
        self._link.send(m.Notice(reason=self._state.notice))  # again at each new connection

    def finish(self) -> None:
        """Leave for good, at a clean end: nobody counts this member as lost. A server that is away never hears it."""
        with self._state.changed:
            self._state.left = self._state.left or self._state.ended is None
        self._leave("finished", m.Goodbye(reason="finished", clean=True))

    def fail(self, reason: str) -> None:
        """Leave for good, for an error of its own. The others hear of it at once, and it counts as lost."""
        self._leave(f"failed: {reason}", m.Goodbye(reason=reason[:LONGEST_REASON], clean=False))

    def close(self) -> None:
        """End the connection without a goodbye: if nothing was said before, the others count this member as lost."""
        with self._state.changed:
            self._state.end(Ended(f"{worker_name(self._identity)} was closed: make another Member, with a new id"))
        self._closing.set()
        self._link.stop()
        self._link.join(CLOSE_S)
        if self._beats is not threading.current_thread():
            self._beats.join(CLOSE_S)

    # Under the lock

    def _stop(self, step: int) -> Change | None:
        promise = self._state.promise
        if promise is None:
            return None
        until = time.monotonic() + OUTCOME_S
        while promise is self._state.promise and promise.undecided and self._state.ended is None:
            if not self._wait_until(until):
                break
        if promise is not self._state.promise or self._state.ended is not None:
            return None  # cancelled, and perhaps another promise made; or fenced, which `over` says
        if promise.confirmed and step == promise.proposal.step:
            return Change(step, promise.proposal.leaving, promise.proposal.reason)
        what = "the server was lost" if promise.cut else "no word came"
        if promise.confirmed:
            what = "the loop went past it"
        self._state.over = self._state.over or (
            f"it was agreed to stop after step {promise.proposal.step}, this worker is at {step}, and {what}"
        )
        self._state.changed.notify_all()
        return None

    def _wait_until(self, until: float) -> bool:
        """False once the time is over."""
        left_s = until - time.monotonic()
        return left_s > 0 and (self._state.changed.wait(min(left_s, 3600.0)) or time.monotonic() < until)

    def _seated(self) -> Seat:
        if self._state.seat is None:
            raise NotSeated(f"{worker_name(self._identity)} has no seat: call join() first")
        return self._state.seat

    def _raise_if_ended(self) -> None:
        if self._state.ended is not None:
            raise type(self._state.ended)(*self._state.ended.args)

    # Without the lock

    def _leave(self, what: str, goodbye: m.Goodbye) -> None:
        with self._state.changed:
            if self._state.ended is not None:
                return
            self._state.end(Ended(f"{worker_name(self._identity)} has left: {what}"))
        self._closing.set()
        self._link.send(goodbye)
        self._link.stop()

    def _beat(self, beat_s: float) -> None:
        while not self._closing.wait(beat_s) and self._state.ended is None:
            doing = self._described(UNMOVED_BEATS * beat_s)
            with self._state.changed:
                beat = self._state.beat(doing)
            self._link.send(beat)

    def _described(self, after_s: float) -> Doing | None:
        try:
            return self.doing(after_s)
        except Exception:  # it is the caller's, and a beat must go out whatever it raises
            logger.exception("doing_unknown worker=%s", worker_name(self._identity))
            self.doing = lambda after_s: None
            return None


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
