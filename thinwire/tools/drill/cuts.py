"""What is done to the network in a chaos drill: who is cut off from whom, and whom that excuses.

    off          one worker's host, or two together, from all others
    membership   the host of the membership, which is that of Ray's head, from all others
    pair         two workers' hosts from each other
    one way      any of these, in one direction only

Hosts are numbers: HEAD, and from 1 those of the workers. What is sent in a direction that is cut vanishes, and nobody
hears of it.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Protocol

logger = logging.getLogger(__name__)

HEAD = 0
LENGTHS_S = (3.0, 15.0, 40.0)
EXCUSED_S = 6.0
"""TCP tries again 3.0, 6.2 and 12.6 s after what was lost first. Who is cut off for longer than the second of these may
be silent for the 10 s after which the others go on without him; nobody is for less."""

Direction = tuple[int, int]
"""From host, to host."""


class Network(Protocol):
    """Of a drill whose workers have hosts of their own. Raises: DrillFailed where it is gone."""

    def number_of(self, address: str) -> int:
        """The host that has this address."""
        ...

    def deliver(self, directions: Collection[Direction], *, arrives: bool) -> None:
        """Cut these directions, or mend them."""
        ...


@dataclass(frozen=True)
class Cut:
    """Hosts are numbers. excused: whose workers may be left behind by it, where it lasts longer than EXCUSED_S."""

    words: str
    directions: frozenset[Direction]
    excused: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Mended:
    """A cut that is over. Times are of the monotonic clock."""

    cut: Cut
    began: float
    ended: float

    @property
    def excuses(self) -> frozenset[int]:
        """Hosts. By how long it really was: under load mending takes a while too."""
        return self.cut.excused if self.ended - self.began > EXCUSED_S else frozenset()


def off(chosen: Collection[int], hosts: Collection[int]) -> tuple[Cut, Cut]:
    """What these send to all others, and what these are sent."""
    others = [host for host in hosts if host not in chosen]
    who = " and ".join(f"host {host}" for host in chosen)
    return (
        Cut(f"what {who} sends", frozenset(product(chosen, others)), frozenset(chosen)),
        Cut(f"what is sent to {who}", frozenset(product(others, chosen)), frozenset(chosen)),
    )


def membership(hosts: Collection[int]) -> tuple[Cut, Cut]:
    """The same of the membership. It takes that for its own isolation: nobody is lost by it."""
    workers = [host for host in hosts if host != HEAD]
    return (
        Cut("what the membership's host sends", frozenset((HEAD, host) for host in workers)),
        Cut("what is sent to the membership's host", frozenset((host, HEAD) for host in workers)),
    )


def pair(one: int, other: int) -> tuple[Cut, Cut]:
    """What one sends to the other, and what it is sent. Either may have to go."""
    excused = frozenset((one, other))
    return (
        Cut(f"what host {one} sends to host {other}", frozenset({(one, other)}), excused),
        Cut(f"what host {other} sends to host {one}", frozenset({(other, one)}), excused),
    )


def both(one: Cut, other: Cut, words: str) -> Cut:
    """In both directions."""
    return Cut(words, one.directions | other.directions, one.excused | other.excused)


def draw(
    lot: random.Random, hosts: Collection[int], members: Sequence[int], some: Callable[[int], Sequence[int]]
) -> Cut | None:
    """Any of them; None where there are too few workers for what the lot has fallen on.

    hosts: all. members: where somebody trains. some: so many of those, so that somebody who holds the state remains.
    """
    kind, one_way = lot.choice(("off", "off", "membership", "pair")), lot.random() < 1 / 3
    if kind == "membership":
        ways, words = membership(hosts), "the membership's host from all"
    elif kind == "pair":
        if len(members) < 2:
            return None
        chosen = lot.sample(members, 2)
        ways, words = pair(*chosen), f"host {chosen[0]} and host {chosen[1]} from each other"
    else:
        chosen = [*some(lot.choice((1, 1, 2)))]
        if not chosen:
            return None
        ways, words = off(chosen, hosts), f"{' and '.join(f'host {host}' for host in chosen)} from all others"
    return lot.choice(ways) if one_way else both(*ways, words)


class Later:
    """What is to be undone after some seconds, whatever a fault waits for meanwhile: each in a thread of its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[threading.Timer, Callable[[], None]] = {}
        self._error: Exception | None = None

    def do(self, seconds: float, action: Callable[[], None]) -> None:
        """After so many seconds."""
        timer = threading.Timer(seconds, lambda: self._run(timer))
        timer.daemon = True
        with self._lock:
            self._waiting[timer] = action
        timer.start()

    def check(self) -> None:
        """Raises: what an action has raised."""
        if self._error is not None:
            raise self._error

    def all_now(self) -> None:
        """What still waits, in its order. Raises: what one of them raises."""
        for timer in list(self._waiting):
            timer.cancel()
            self._run(timer)
        for timer in list(self._waiting):  # one whose time had come just then
            timer.join()
        self.check()

    def _run(self, timer: threading.Timer) -> None:
        with self._lock:
            action = self._waiting.pop(timer, None)
        if action is None:
            return
        try:
            action()
        except Exception as error:  # noqa: BLE001 - the border of a thread: raised by check()
            self._error = error


class Cuts:
    """One cut at a time, and a rest after each: TCP doubles the time between its tries.

    What was cut for 40 s may be heard of again only 11 s after the mending.
    """

    def __init__(self, network: Network, hosts: Sequence[int], later: Later) -> None:
        self._network, self._hosts, self._later = network, hosts, later
        self._present: Cut | None = None
        self._rested = 0.0
        self._mended: list[Mended] = []

    @property
    def ready(self) -> bool:
        """May the next one begin?"""
        return self._present is None and time.monotonic() >= self._rested

    @property
    def off(self) -> frozenset[int]:
        """Hosts whose workers are cut off now."""
        return frozenset() if self._present is None else self._present.excused

    def host_of(self, address: str) -> int:
        """Its number."""
        return self._network.number_of(address)

    def begin(self, lot: random.Random, members: Sequence[int], some: Callable[[int], Sequence[int]]) -> str | None:
        """Cut, and mend after some seconds. What, in words; None where there are too few workers for it."""
        if (cut := draw(lot, self._hosts, members, some)) is None:
            return None
        seconds = lot.choice(LENGTHS_S)
        self._present, began = cut, time.monotonic()
        self._network.deliver(cut.directions, arrives=False)
        self._later.do(seconds, lambda: self._mend(cut, began))
        return f"{cut.words}, for {seconds:g} s"

    def mended(self) -> list[Mended]:
        """Those that have been since the last call."""
        found = []
        while self._mended:
            found.append(self._mended.pop(0))
        return found

    def _mend(self, cut: Cut, began: float) -> None:
        self._network.deliver(cut.directions, arrives=True)
        now = time.monotonic()
        logger.info("mended after %.1f s: %s", now - began, cut.words)
        self._mended.append(Mended(cut, began, now))
        self._rested = now + 5.0 + (now - began) / 2
        self._present = None
