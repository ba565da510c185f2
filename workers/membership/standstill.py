"""Says in words that the job stands still, or for whom its members wait. Nothing is done about it here.

    waited for      no step for stuck_s, some members wait in a collective, and this one does not: it is named, with
                    what it is at (Doing, which its own process has sent). So is who is about to be fenced as it hangs
                    (stuck.py), and a newcomer that has not asked for a seat for NEWCOMER_S
    stands still    no step for still_s: where each member is

Each is said once in a standstill, which ends with a step or another generation. Steps may be long: both wait for
LONGEST of the longest times between two steps that any member has told of, where that is more, and PATIENT times longer
before it has told of one, and at the end of the run, where the last checkpoint is written. While all
members have joined nobody stands still: they wait for workers.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import JsonValue

from thinwire.workers.membership.attendance import Attendance
from thinwire.workers.membership.roster import Worker
from thinwire.workers.membership.seats import LONGEST_REASON

LONGEST = 3.0
PATIENT = 5.0
NEWCOMER_S = 300.0
"""A script may fetch its data and compile before it asks for its seat."""
MOST_PLACES, MOST_NAMES, MOST_FRAMES = 4, 8, 6
"""Of one `stands_still`: places that members are at, members named of each, frames shown of each."""
NOTHING_TOLD = "what it does changes, or it does not tell"


class Standstill:
    """Of the members in one attendance."""

    def __init__(self, attendance: Attendance, now: float) -> None:
        self._attendance = attendance
        self._at = (0, 0)
        self._since = now
        self._longest_s = 0.0
        self._named: set[str] = set()
        self._has_told = False
        self._late: set[str] = set()

    def forgive(self, paused_s: float) -> None:
        """The server was stopped for so long."""
        self._since += paused_s

    def judge(self, now: float) -> None:
        """Say what is to be said."""
        attendance, present = self._attendance, self._attendance.present
        members = attendance.members()
        self._judge_newcomers(now)
        at = (present.generation, max((w.step for w in members), default=0))
        if at != self._at:
            self._at, self._since, self._has_told = at, now, False
            self._named.clear()
        self._longest_s = max([self._longest_s, *(w.longest_step_s for w in members)])
        if present.at_end or all(w.standing is not None for w in members):
            self._since = now
            return
        still_s = now - self._since
        at_end = any(w.doing is not None and w.doing.at_end for w in members)
        times = PATIENT if at_end or not self._longest_s else 1.0
        stuck_s, limit_s = (
            max(times * least_s, LONGEST * self._longest_s)
            for least_s in (attendance.timing.stuck_s, attendance.timing.still_s)
        )
        if still_s > stuck_s:
            coming = [w for w in members if w.standing is None]
            for worker in waited_for(members) if coming == members else coming:
                operation = operation_of(members) if coming == members else regroup_after(present.generation)
                self.name(worker, operation, still_s, now)
        if still_s > limit_s and not self._has_told:
            self._has_told = True
            self._say_where(members, still_s, now)

    def name(self, worker: Worker, operation: str, seconds: float, now: float) -> None:
        """This member has not come to that for so long; said once a standstill."""
        if worker.identity.id in self._named:
            return
        self._named.add(worker.identity.id)
        told = f"{name_of(worker)} has not come to {operation} for {seconds:.0f} s; {where(worker, now)}"
        doing, who = worker.doing, worker.identity
        self._attendance.say(
            "waited_for",
            step=self._at[1],
            told=told,
            slot=who.slot,
            rank=worker.rank,
            host=who.node or who.host,
            pid=who.pid,
            operation=operation,
            seconds=round(seconds, 1),
            at=None if doing is None else doing.what,
            stack=[] if doing is None else list(doing.stack),
        )

    def _judge_newcomers(self, now: float) -> None:
        newcomers = [w for w in self._attendance.workers.values() if w.rank is None and w.standing is None]
        self._late &= {w.identity.id for w in newcomers}
        for worker in newcomers:
            waited_s = now - worker.here_since
            if worker.here and waited_s > NEWCOMER_S and worker.identity.id not in self._late:
                self._late.add(worker.identity.id)
                self.name(worker, "its seat", waited_s, now)

    def _say_where(self, members: Sequence[Worker], seconds: float, now: float) -> None:
        places: dict[tuple[str, tuple[str, ...]], list[str]] = {}
        for worker in members:
            places.setdefault(place_of(worker, now), []).append(name_of(worker))
        shown = list(places.items())[:MOST_PLACES]
        words = [f"{_names(names)}: {_joined(*place)}" for place, names in shown]
        others = f"; and {len(places) - MOST_PLACES} more places" if len(places) > MOST_PLACES else ""
        told: list[JsonValue] = [
            {
                "workers": list(names[:MOST_NAMES]),
                "more": max(len(names) - MOST_NAMES, 0),
                "at": what,
                "stack": [*stack],
            }
            for (what, stack), names in shown
        ]
        self._attendance.say(
            "stands_still",
            step=self._at[1],
            told=f"no step for {seconds:.0f} s, after step {self._at[1]}: {'; '.join(words)}{others}",
            seconds=round(seconds, 1),
            places=told,
        )


def waited_for(members: Sequence[Worker]) -> list[Worker]:
    """Those that do not wait in a collective, while others do.

    Where it is not known that any waits, as on GPUs, those that have begun fewer collectives than others. Nobody,
    where all are alike: then no member is waited for more than the others; or silent: then the server is cut off.
    """
    if all(w.silent for w in members):
        return []
    known = [w for w in members if w.doing is not None]
    if any(w.doing is not None and w.doing.waits for w in known):
        return [w for w in members if w.silent or (w.doing is not None and not w.doing.waits)]
    most = max((w.doing.begun for w in known if w.doing is not None), default=0)
    return [w for w in known if w.doing is not None and w.doing.begun < most]


def operation_of(members: Sequence[Worker]) -> str:
    """In words, what the members wait in that are furthest."""
    told = [w.doing for w in members if w.doing is not None and w.doing.operation]
    furthest = max(told, key=lambda doing: (doing.waits, doing.begun), default=None)
    return "the next step" if furthest is None else furthest.operation


def regroup_after(generation: int) -> str:
    """In words."""
    return f"the regroup after generation {generation}"


def name_of(worker: Worker) -> str:
    """By its slot and rank, with where it runs."""
    who, rank = worker.identity, "no rank" if worker.rank is None else f"rank {worker.rank}"
    return f"worker {who.slot} ({rank}, {who.node or who.host}, pid {who.pid})"


def place_of(worker: Worker, now: float) -> tuple[str, tuple[str, ...]]:
    """What it is at, and its innermost frames: alike for members that are at the same."""
    if worker.silent or not worker.connected:
        return f"not heard of for {now - worker.heard_at:.0f} s", ()
    doing = worker.doing
    if doing is None:
        return NOTHING_TOLD, ()
    what = f"{doing.what}, waits in {doing.operation}" if doing.waits else doing.what
    return what, doing.stack[:MOST_FRAMES]


def where(worker: Worker, now: float) -> str:
    """In words, within the length of a reason."""
    what, stack = place_of(worker, now)
    plain = worker.doing is None or worker.silent or not worker.connected
    return (what if plain else f"it is at {_joined(what, stack)}")[:LONGEST_REASON]


def _joined(what: str, stack: Sequence[str]) -> str:
    return f"{what}: {', '.join(stack)}" if stack else what


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more
