"""Whom a rank waits for, and whether it will come: a rank that waits long asks through the store of the group.

    after LOOK_S    it writes down where it is: the place in each communicator's order, and the call of its user
    now and then    it reads where the others are
        another collective at its own place      ranks are in different calls: all raise CallMismatch
        a process that has ended                 PeerLost, also where its connections live on in a child of it
        nothing, for SAY_S                       one line of the log: who has not come, and what it did last

A rank that does not wait writes nothing: one that computes pays nothing, and is the one that is waited for. Nobody is
accused for being late. Two ranks are in different calls only where both wait, and have begun at the same place of the
same order collectives that can never meet, and still do when asked again.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch.distributed.distributed_c10d import Store

from thinwire.comm.calls import Calls, Place, mismatch
from thinwire.comm.groups.births import Birth

logger = logging.getLogger(__name__)

LOOK_S = 0.25
READ_S = (0.5, 1.0, 2.0, 4.0)
"""When, after the first look, a rank that waits reads where the others are: what both wait in is known by then."""
SAY_S = 5.0
"""When it says for whom it waits; AGAIN_S after it says so again, if it still does, and so on."""
AGAIN_S = 180.0
SURE_S = 0.6
"""How much later it looks again before it names anyone: who came just now has written so by then."""
QUIET_S = 60.0
"""The least time between two first lines: a rank that is always late by SAY_S is not reported at every step."""


@dataclass(frozen=True, slots=True)
class Report:
    """Where a rank was when it last wrote so. waits: what it waits in, if it still does. recent: what it has begun."""

    begun: list[int]
    waits: list[Place]
    recent: list[Place]
    call: str
    remedy: str
    last: str

    def other_than(self, at: Place) -> Place | None:
        """What it has begun at that place, if it waits now and that was another collective."""
        return next((place for place in self.recent if self.waits and place.differs(at)), None)

    def waits_beyond(self, begun: list[int]) -> bool:
        """Does it wait for a collective that a rank which has begun so many has not begun?"""
        return any(place.number > begun[place.communicator] for place in self.waits)


class Board:
    """Where ranks write that they wait, and read where others do. Raises RuntimeError where the store is gone."""

    def __init__(self, store: Store, rank: int, size: int, calls: Calls) -> None:
        self._store, self.rank, self.size, self.calls = store, rank, size, calls
        self._lock = threading.Lock()
        self._told = ""
        self._quiet_until = 0.0

    def tell(self) -> None:
        """Write where this rank is, if that has changed."""
        with self._lock:
            now = self.calls
            text = json.dumps([now.begun, sorted(now.waits), list(now.recent), now.words(), now.remedy, now.last])
            if text != self._told:
                self._store.set(_at(self.rank), text)
                self._told = text

    def others(self) -> dict[int, Report]:
        """Where the other ranks are that have ever waited long."""
        found = {}
        for rank in range(self.size):
            if rank != self.rank and self._store.check([_at(rank)]):
                begun, waits, recent, *texts = json.loads(self._store.get(_at(rank)))
                found[rank] = Report(begun, [Place(*one) for one in waits], [Place(*one) for one in recent], *texts)
        return found

    def late_for(self, at: Place, reports: dict[int, Report]) -> set[int]:
        """Who has not begun the collective at this place: those that do not wait for others themselves, if any."""
        late = {r for r in range(self.size) if r != self.rank}
        late -= {r for r, one in reports.items() if one.begun[at.communicator] >= at.number}
        return {r for r in late if r not in reports or not reports[r].waits} or late

    def may_say(self) -> bool:
        """Is it long ago that this rank said for whom it waits? Then it may, and this counts as when it did."""
        now = time.monotonic()
        if now < self._quiet_until:
            return False
        self._quiet_until = now + QUIET_S
        return True


class Outlook(Protocol):
    """What a Watch does at every look."""

    def look(self) -> bool:
        """Will what this rank waits for never come? Raises: RuntimeError where the store is gone."""

    def close(self) -> None:
        """The wait is over."""


class Lookout:
    """What a rank does that waits at one place. failed: has any rank failed? prove: tell all of a mismatch.

    births: of the other ranks, as far as known.
    """

    def __init__(
        self,
        board: Board,
        at: Place,
        failed: Callable[[], bool],
        births: Callable[[], dict[int, Birth]],
        prove: Callable[[str], None],
    ) -> None:
        self._board, self._at, self._failed, self._prove = board, at, failed, prove
        self._births = births
        self._missing: dict[int, Birth] = {}
        self._began = time.monotonic()
        self._suspects: set[tuple[int, Place]] = set()
        self._late: set[int] | None = None
        self._to_read = list(READ_S)
        self._say_at, self._firsts = SAY_S, True

    def look(self) -> bool:
        """As Outlook.look."""
        if self._failed():
            return True
        self._board.tell()
        waited_s = time.monotonic() - self._began
        if self._to_read and waited_s >= self._to_read[0]:
            self._to_read.pop(0)
            if self._is_mismatch():
                return True
        if waited_s >= self._say_at:
            self._say(waited_s)
        return self._has_ended()

    def close(self) -> None:
        """Write that this rank waits no more."""
        self._board.tell()

    def _is_mismatch(self) -> bool:
        reports = self._board.others()
        here = {(rank, place) for rank, one in reports.items() if (place := one.other_than(self._at)) is not None}
        proven, self._suspects = here & self._suspects, here
        if not proven:
            return False
        calls = self._board.calls
        where = {self._board.rank: f"{calls.words()} ({self._at})"}
        where |= {rank: f"{reports[rank].call} ({place})" for rank, place in proven}
        self._prove(str(mismatch(where, [calls.remedy, *(reports[rank].remedy for rank, _ in sorted(proven))])))
        return True

    def _say(self, waited_s: float) -> None:
        """Name who has not come, when asked twice."""
        reports = self._board.others()
        late = self._board.late_for(self._at, reports)
        if self._late is None:
            self._late, self._say_at = late, waited_s + SURE_S
            return
        late &= self._late
        first, self._firsts = self._firsts, False
        self._late, self._say_at = None, waited_s + AGAIN_S
        if first:
            births = self._births()
            self._missing = {rank: births[rank] for rank in late if rank in births}
        if (late or not first) and (not first or self._board.may_say()):
            logger.warning(
                "waiting_for ranks=%s seconds=%.0f in=%r known=%r",
                sorted(late),
                waited_s + LOOK_S,
                self._board.calls.words(),
                "; ".join(self._known(rank, reports.get(rank)) for rank in sorted(late)) or ALL_HERE,
            )

    def _has_ended(self) -> bool:
        """Has the process of one ended that had not come? It may have come, and ended well, since."""
        ended = {rank for rank, birth in self._missing.items() if birth.ending()}
        return bool(ended) and bool(ended & self._board.late_for(self._at, self._board.others()))

    def _known(self, rank: int, report: Report | None) -> str:
        said = [f"rank {rank} has not come to this call"]
        if report is not None and report.waits:
            said.append(f"it waits in {report.call}")
        elif self._board.calls.last:
            said.append(f"it took part in {self._board.calls.last}")
        if rank in self._missing:
            said.append(self._missing[rank].words())
        return ", ".join(said)


ALL_HERE = (
    "all ranks have come: the network is slow, or some rank has called a collective of torch.distributed on this group "
    "that others have not"
)


class Watch:
    """Looks every LOOK_S, in a thread, until something is seen or `stop` is called."""

    def __init__(self, outlook: Outlook) -> None:
        self._outlook = outlook
        self._stop = threading.Event()
        self._seen = threading.Event()
        self._thread = threading.Thread(target=self._run, name="thinwire-watch", daemon=True)
        self._thread.start()

    @property
    def seen(self) -> bool:
        """A peer has failed."""
        return self._seen.is_set()

    def stop(self) -> None:
        """Look no more. Does not wait."""
        self._stop.set()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                if self._outlook.look():
                    self._seen.set()
                    return
                self._stop.wait(LOOK_S)
            self._outlook.close()
        except RuntimeError:  # the store is gone, so its host is, or the group has ended
            if not self._stop.is_set():
                self._seen.set()


def _at(rank: int) -> str:
    return f"thinwire/at/{rank}"
