"""Members that come to a server which does not know their generation: it was restarted, or has slept.

All of them know all seats, and one that tells them is enough. So they come with the number of their generation alone,
and wait; a few are asked at a time, for those may be just about to die.
"""

from __future__ import annotations

from thinwire.workers.membership import messages as m
from thinwire.workers.membership.attendance import Attendance, Close
from thinwire.workers.membership.seats import Identity

MOST_ASKED = 4
ASK_S = 3.0
"""Who was asked and has not answered in it is sent away, to come again, and others are asked."""


class Asking:
    """What it asks is left as effects in the attendance, in which none of them is yet."""

    def __init__(self, attendance: Attendance) -> None:
        self._attendance = attendance
        self._waiting: dict[str, tuple[Identity, int]] = {}
        self._asked: dict[str, float] = {}

    def wait(self, identity: Identity, generation: int, now: float) -> None:
        """This member has come, with this generation."""
        self._asked.pop(identity.id, None)  # what was asked over its last connection is not answered any more
        self._waiting[identity.id] = (identity, generation)
        self._ask(now)

    def gone(self, id: str, now: float) -> None:
        """Its connection has ended. Nothing where it does not wait here."""
        if self._waiting.pop(id, None) is not None:
            self._asked.pop(id, None)
            self._ask(now)

    def answered(self, id: str) -> Identity | None:
        """Who has told its seat, and waits no more. None where another of those that were asked was quicker."""
        self._asked.pop(id, None)
        identity, _ = self._waiting.pop(id, (None, 0))
        return identity

    def up_to(self, generation: int) -> list[tuple[Identity, int]]:
        """Those whose generations are at most that, and they wait no more."""
        known = [(one, of) for one, of in self._waiting.values() if of <= generation]
        for identity, _ in known:
            del self._waiting[identity.id]
            self._asked.pop(identity.id, None)
        return known

    def tick(self, now: float) -> None:
        """Give up those that do not answer."""
        for id in [id for id, at in self._asked.items() if now - at > ASK_S]:
            self._attendance.effects.append(Close(id))
            self.gone(id, now)
        self._ask(now)

    def _ask(self, now: float) -> None:
        for id in self._waiting:
            if len(self._asked) >= MOST_ASKED:
                return
            if id not in self._asked:
                self._asked[id] = now
                self._attendance.send(id, m.AskSeat())
