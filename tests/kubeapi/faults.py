"""What goes wrong between an API server and its client: told one by one, or drawn from a seed."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal


@dataclass(frozen=True)
class Request:
    """What is asked, as rights name it. verb: get, list, watch, create, patch, delete."""

    verb: str
    group: str
    resource: str
    name: str = ""

    @property
    def is_write(self) -> bool:
        """May it change anything?"""
        return self.verb in ("create", "patch", "delete")


@dataclass(frozen=True)
class Fault:
    """What befalls a request.

    how: "refuse" answers `code`, and nothing has been done; "lose request" closes the connection before it is done,
    "lose answer" after that. Of a watch, after so many events: "close" ends it in order, "cut" in the middle of a line,
    "silence" leaves it open and sends nothing more, "gone" is an ERROR event with 410; "late" sends every event so many
    seconds after its change.
    """

    how: Literal["refuse", "lose request", "lose answer", "close", "cut", "silence", "gone", "late"]
    code: int = 0
    reason: str = ""
    after_events: int = 0
    late_s: float = 0.0

    def fits(self, request: Request) -> bool:
        """Can it befall this request?"""
        if self.how in ("refuse", "lose request"):
            return True
        return request.is_write if self.how == "lose answer" else request.verb == "watch"


USUAL: Final = (
    *(Fault("refuse", code) for code in (429, 500, 503)),
    Fault("lose request"),
    Fault("lose answer"),
    Fault("close"),
    Fault("close", after_events=2),
    Fault("cut", after_events=1),
    Fault("gone", after_events=1),
    Fault("late", late_s=0.3),
)
"""What `draw` draws from: nothing that takes a client longer than a second to notice."""
When = Callable[[Request], bool]


class Faults:
    """All that goes wrong with one server. A fault is met by the next requests that it fits and `when` is true of."""

    def __init__(self) -> None:
        self._to_come: list[tuple[Fault, When, int]] = []
        self._lock = threading.Lock()
        self._drawn: Callable[[Request], Fault | None] = lambda request: None
        self.met: list[tuple[Request, Fault]] = []
        """Whom what befell, in order."""

    def add(self, fault: Fault, times: int = 1, when: When = lambda request: True) -> None:
        """So many requests meet it."""
        with self._lock:
            self._to_come.append((fault, when, times))

    def refuse(self, code: int, times: int = 1, when: When = lambda request: True, reason: str = "") -> None:
        """Answer with this code."""
        self.add(Fault("refuse", code, reason), times, when)

    def draw(self, seed: int, share: float) -> None:
        """From now on this share of the requests meets one of the usual faults, drawn from the seed."""
        chance = random.Random(seed)

        def drawn(request: Request) -> Fault | None:
            fitting = [fault for fault in USUAL if fault.fits(request)]
            return chance.choice(fitting) if chance.random() < share else None

        with self._lock:
            self._drawn = drawn

    def mend(self) -> None:
        """Nothing is to come any more."""
        with self._lock:
            self._to_come, self._drawn = [], lambda request: None

    def meet(self, request: Request) -> Fault | None:
        """For the server: what this request meets."""
        with self._lock:
            fault = self._next(request)
            if fault is not None:
                self.met.append((request, fault))
            return fault

    def _next(self, request: Request) -> Fault | None:
        for place, (fault, when, times) in enumerate(self._to_come):
            if times > 0 and fault.fits(request) and when(request):
                self._to_come[place] = (fault, when, times - 1)
                return fault
        return self._drawn(request)
