"""What goes wrong between an API server and its client: told one by one, or drawn from a seed.

A test says it to the one `Faults` of its server: `server.faults.refuse(429, times=3)`. Faults are met in the order in
which they were told, each by the requests that it is for; `met` has what befell whom.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol


@dataclass(frozen=True)
class Request:
    """What is asked, as rights name it. verb: get, list, watch, create, update, patch, delete, deletecollection."""

    verb: str
    group: str
    resource: str
    subresource: str = ""
    namespace: str = ""
    name: str = ""

    @property
    def is_write(self) -> bool:
        """May it change anything?"""
        return self.verb not in ("get", "list", "watch")


@dataclass(frozen=True)
class Refuse:
    """The answer is this code, and nothing has been done."""

    code: int
    retry_after_s: int | None = None


@dataclass(frozen=True)
class LoseRequest:
    """The connection is closed, and nothing has been done."""


@dataclass(frozen=True)
class LoseAnswer:
    """It is done, and the connection closed without a word of it."""


@dataclass(frozen=True)
class Hang:
    """There is no answer, and no end of the connection, for so long; nothing has been done then."""

    seconds: float


@dataclass(frozen=True)
class BadWatch:
    """A watch that does not go as it should, after so many events of it.

    how: "close" ends it in order; "cut" in the middle of a line; "silence" leaves it open, and nothing more comes;
    "gone" is an ERROR event with 410. late_s: every event comes so many seconds after its change.
    """

    how: Literal["close", "cut", "silence", "gone", "late"]
    after_events: int = 0
    late_s: float = 0.0


Fault = Refuse | LoseRequest | LoseAnswer | Hang | BadWatch
When = Callable[[Request], bool]


class Listener(Protocol):
    """The server, as far as a fault takes it away."""

    def go_away(self) -> None:
        """Refuse connections, and close those that are open."""

    def come_back(self) -> None:
        """Answer again, on the same port."""

    def forget(self) -> None:
        """Keep nothing of the history."""


@dataclass
class _Told:
    fault: Fault
    when: When
    times: int


class Faults:
    """All that goes wrong with one server. Methods that tell a fault may be called at any time, from any thread."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._told: list[_Told] = []
        self._lock = threading.Lock()
        self._drawn: Callable[[Request], Fault | None] = lambda request: None
        self._timers: list[threading.Timer] = []
        self.met: list[tuple[Request, Fault]] = []
        """Whom what befell, in order."""

    # by script

    def tell(self, fault: Fault, times: int = 1, when: When = lambda request: True) -> None:
        """The next so many requests that `when` is true of meet this fault. A bad watch is for watches alone, a lost
        answer for writes.
        """
        with self._lock:
            self._told.append(_Told(fault, when, times))

    def refuse(
        self, code: int, times: int = 1, when: When = lambda request: True, retry_after_s: int | None = None
    ) -> None:
        """Answer 410, 429, 500, 503 or 504."""
        self.tell(Refuse(code, retry_after_s), times, when)

    def mend(self) -> None:
        """Nothing that was told is still to come, and nothing is drawn any more."""
        with self._lock:
            self._told.clear()
            self._drawn = lambda request: None

    def gone(self, seconds: float) -> None:
        """Close the port and all connections at once; be back after so long."""
        self._listener.go_away()
        timer = threading.Timer(seconds, self._listener.come_back)
        timer.daemon = True
        self._timers.append(timer)
        timer.start()

    def restart(self) -> None:
        """Close all connections, forget the history, be back at once: old watches have to list again (410)."""
        self._listener.go_away()
        self._listener.forget()
        self._listener.come_back()

    # by seed

    def draw(self, seed: int, share: float, choices: Sequence[Fault] | None = None) -> None:
        """From now on this share of the requests meets one of these faults, drawn from the seed."""
        chance = random.Random(seed)
        faults = tuple(choices or USUAL)

        def drawn(request: Request) -> Fault | None:
            if chance.random() >= share:
                return None
            fitting = [fault for fault in faults if _fits(fault, request)]
            return chance.choice(fitting) if fitting else None

        with self._lock:
            self._drawn = drawn

    # for the server

    def meet(self, request: Request) -> Fault | None:
        """What this request meets."""
        with self._lock:
            fault = self._next(request)
            if fault is not None:
                self.met.append((request, fault))
            return fault

    def close(self) -> None:
        """Nobody comes back any more."""
        for timer in self._timers:
            timer.cancel()
            timer.join()

    def _next(self, request: Request) -> Fault | None:
        for told in self._told:
            if told.times > 0 and _fits(told.fault, request) and told.when(request):
                told.times -= 1
                return told.fault
        return self._drawn(request)


USUAL: Sequence[Fault] = (
    Refuse(429, retry_after_s=1),
    Refuse(500),
    Refuse(503),
    LoseRequest(),
    LoseAnswer(),
    BadWatch("close"),
    BadWatch("close", after_events=2),
    BadWatch("cut", after_events=1),
    BadWatch("gone", after_events=1),
    BadWatch("late", late_s=0.3),
)
"""What `draw` draws from, unless it is told otherwise: nothing that takes a client longer than a second to notice."""


def _fits(fault: Fault, request: Request) -> bool:
    if isinstance(fault, BadWatch):
        return request.verb == "watch"
    if isinstance(fault, LoseAnswer):
        return request.is_write
    return True
