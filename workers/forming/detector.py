"""The ranks of a process group that are gone, as the membership says: at once, and alike on all."""

from __future__ import annotations

import time

from thinwire.comm.calls import NOWHERE, Calls, Place
from thinwire.comm.groups.failure_detector import Lost
from thinwire.workers.forming.reach import Reach
from thinwire.workers.membership import Member, Seat


class MembershipDetector:
    """Which ranks of a generation are gone, as the membership says: at once and alike on all.

    reach: is told of waits that take long; None: nobody is.
    """

    look_s = 0.05

    def __init__(self, member: Member, seat: Seat, reach: Reach | None = None) -> None:
        self._member, self._seat, self._reach = member, seat, reach
        self.left: str | None = None
        self.calls = Calls()

    def leave(self, reason: str) -> None:
        """Tell the membership."""
        self.left = reason
        self._member.fail(reason)

    def find_lost(self, answer_s: float, at: Place = NOWHERE) -> Lost:
        """Who is gone. The membership may take `answer_s` to find out."""
        self._member.wait_over(answer_s)
        lost = {rank: why for rank, why in sorted(self._member.lost.items()) if rank != self._seat.rank}
        return Lost(lost, "The job goes on with the ranks that are left. The log of the one that stopped says why")

    def ended(self) -> dict[int, str]:
        """Nobody that the membership does not tell of at once."""
        return {}

    def watch(self, at: Place = NOWHERE) -> _Look:
        """Look at what the membership has said."""
        return _Look(self._member, self._reach)


class _Look:
    """At one wait in a collective."""

    def __init__(self, member: Member, reach: Reach | None) -> None:
        self._member, self._reach = member, reach
        self._began, self._is_long = time.monotonic(), False

    @property
    def seen(self) -> bool:
        if self._reach is not None and not self._is_long:
            self._is_long = time.monotonic() - self._began >= self._reach.times.waited_s
            if self._is_long:
                self._reach.begin()
        return self._member.over is not None

    def stop(self) -> None:
        if self._reach is not None and self._is_long:
            self._reach.end()
