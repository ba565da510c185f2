"""Whose part of a checkpoint will not come any more: what the ranks of a generation owe of it, and who has gone.

    who has gone                         what lacks its part is waited for
    it left as planned                   LEAVE_S + BROKEN_S: so long it may go on writing
    it left, and its process has ended   BROKEN_S more: what it has finished may be seen a little later
    it was lost                          BROKEN_S more, whose part ever is missing: the others may have seen the loss
                                         before they began to write theirs

Of a worker that has left the membership hears no more. But it listens at its door (forming/pairs.py) until its process
ends, after its last checkpoint. So where the system at its address says that nobody listens there, it has ended. No
answer proves nothing.
"""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from thinwire.workers.membership.seats import Identity, Seat

BROKEN_S = 5.0
"""How long a checkpoint is waited for of which a worker that has ended owes a part."""
LEAVE_S = 25.0
"""How long a worker that leaves waits for its checkpoint: notices of preemption give 30 s."""
ASK_S = 1.0
"""For an answer of the system where a worker was."""


@dataclass(slots=True)
class _Left:
    """One that is in no generation any more. until: of the clock. ended: its process has."""

    identity: Identity
    until: float
    ended: bool = False


class Owed:
    """The parts of one checkpoint. One thread reports seats, another one asks.

    seat: of the generation that saves it. has_ended: of a host and a port, as nobody_listens. processes: of a member,
    where that is a box; ranks are theirs, box by box.
    """

    def __init__(
        self,
        seat: Seat,
        clock: Callable[[], float] = time.monotonic,
        has_ended: Callable[[str, int], bool] | None = None,
        processes: int = 1,
    ) -> None:
        self._processes = processes
        self._clock, self._has_ended = clock, has_ended or nobody_listens
        self._owing = {rank: member.identity for rank, member in enumerate(seat.members)}
        self._left: dict[int, _Left] = {}
        self._broken: tuple[float, str] = math.inf, ""
        self._lock = threading.Lock()

    def seated(self, seat: Seat) -> None:
        """Those that are not of this generation have gone. To be called for each, also for those that never formed."""
        here = {member.identity.id for member in seat.members}
        lost = {one.id: one.why for one in seat.lost}
        now = self._clock()
        with self._lock:
            for rank, identity in self._owing.items():
                why = lost.get(identity.id)
                if why is not None and now + BROKEN_S < self._broken[0]:
                    self._broken = now + BROKEN_S, f"{_name(rank, identity)} was lost: {why}"
                elif why is None and identity.id not in here and rank not in self._left:
                    self._left[rank] = _Left(identity, now + LEAVE_S + BROKEN_S)

    def patience(self, missing: Collection[int]) -> tuple[float, str]:
        """Until when the parts of these ranks are waited for, of the clock, and why no longer (writer.Patience).

        Asks for those of them that have left, for ASK_S at most each.
        """
        with self._lock:
            members = {rank // self._processes for rank in missing}
            left = {rank: self._left[rank] for rank in sorted(members) if rank in self._left}
            soonest = self._broken
        for rank, one in left.items():
            if not one.ended and one.identity.port and self._has_ended(one.identity.host, one.identity.port):
                one.ended, one.until = True, min(one.until, self._clock() + BROKEN_S)
            how = "has left, and its process has ended" if one.ended else "has left"
            soonest = min(soonest, (one.until, f"{_name(rank, one.identity)} {how}"))
        return soonest


def nobody_listens(host: str, port: int) -> bool:
    """Does the system of `host` say that nobody listens at that port? False where nothing answers in ASK_S."""
    try:
        socket.create_connection((host, port), ASK_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


def _name(rank: int, identity: Identity) -> str:
    return f"worker {identity.slot} (rank {rank})"
