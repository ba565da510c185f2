"""Members that are heard of, and yet do not go on: who is named, and who must be left out.

Standstill says in words that the job stands still, or for whom its members wait. Nothing is done about it there.

    waited for      no step for stuck_s, some members wait in a collective, and this one does not: it is named, with
                    what it is at (Doing, which its own process has sent). So is a member that is about to be fenced as
                    it hangs, and a newcomer that has not asked for a seat for NEWCOMER_S
    stands still    no step for still_s: where each member is

Each is said once in a standstill, which ends with a step or another generation. Steps may be long: both wait for
LONGEST of the longest times between two steps that any member has reported, where that is more, and PATIENT times
longer before it has reported one, and at the end of the run, where the last checkpoint is written. While all members
have joined nobody stands still: they wait for workers.

Stuck fences those without which the others have to go on.

    hangs           it does not come to a regroup within join_timeout_s, or 3 of the longest steps, from when it could
                    hear of it: it may have been cut off, and be back. One that still forms its process group has
                    form_s from its seat on; then it hangs, if others have theirs
    is not reached  others cannot talk to it, or it to them. Once the group is formed, only among those that have been
                    heard of for return_s: the others are a matter of Silence (attendance.py), which may wait for a
                    lease, or are just back, and what was said of them is old

Of members that cannot talk to one another as few as possible are left out, chosen one by one: each time the rank of the
most broken pairs; of several, one that was not heard of lately; then one that brings no state; then the highest. Never
the last that holds the state: the others would begin from a checkpoint while it lives.
Where nobody has formed a group in form_s, none of them is to blame: the generation is over, and all try again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

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
NOTHING_REPORTED = "what it does changes, or it does not report it"
REPORTS_S = 1.0
"""Reports come together: only from all broken pairs follows who is to be left out."""


class Standstill:
    """Of the members in one attendance."""

    def __init__(self, attendance: Attendance, now: float) -> None:
        self._attendance = attendance
        self._at = (0, 0)
        self._since = now
        self._longest_s = 0.0
        self._named: set[str] = set()
        self._has_said = False
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
            self._at, self._since, self._has_said = at, now, False
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
        if still_s > limit_s and not self._has_said:
            self._has_said = True
            self._say_where(members, still_s, now)

    def name(self, worker: Worker, operation: str, seconds: float, now: float) -> None:
        """This member has not come to that for so long; said once a standstill."""
        if worker.identity.id in self._named:
            return
        self._named.add(worker.identity.id)
        words = f"{name_of(worker)} has not come to {operation} for {seconds:.0f} s; {where(worker, now)}"
        doing, who = worker.doing, worker.identity
        self._attendance.say(
            "waited_for",
            step=self._at[1],
            told=words,
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
        at: list[JsonValue] = [
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
            places=at,
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
    known = [w.doing for w in members if w.doing is not None and w.doing.operation]
    furthest = max(known, key=lambda doing: (doing.waits, doing.begun), default=None)
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
        return NOTHING_REPORTED, ()
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


class Stuck:
    """Of the members in one attendance."""

    def __init__(self, attendance: Attendance, standstill: Standstill) -> None:
        self._attendance, self._standstill = attendance, standstill
        self._reports: dict[int, dict[int, str]] = {}
        self._reported_at = 0.0

    def report(self, rank: int, ranks: dict[int, str], now: float) -> None:
        """This rank of the present generation cannot talk to those: why, in words."""
        self._attendance.say("unreachable", rank=rank, ranks=[*sorted(ranks)])
        counting = self._counting(now)
        reported = {other: why for other, why in ranks.items() if other in counting}
        if rank not in counting or not reported:
            return
        if not self._reports:
            self._reported_at = now
        self._reports[rank] = reported

    def forget_reports(self) -> None:
        """They are of another generation, or of a disturbance that is over."""
        self._reports = {}

    def judge(self, now: float) -> None:
        """Fence who must be left out."""
        if self._attendance.present.regroup_since is None:
            self._judge_forming(now)
        else:
            self._judge_regroup(self._attendance.present.regroup_since, now)
        if self._reports and now >= self._reported_at + REPORTS_S:
            self._judge_reports(now)

    def _judge_forming(self, now: float) -> None:
        attendance, present, form_s = self._attendance, self._attendance.present, self._attendance.timing.form_s
        members = attendance.members()
        late = [
            w
            for w in members
            if w.here and not w.formed and w.standing is None and now - max(present.seated_at, w.here_since) > form_s
        ]
        if not late or present.at_end:
            return
        if any(w.formed for w in members):
            for worker in late:
                what = f"the forming of generation {present.generation}"
                self._standstill.name(worker, what, now - max(present.seated_at, worker.here_since), now)
                self._fence(worker, f"it did not form its group within {form_s:g} s: it hangs", now)
        else:
            attendance.end_generation(f"no member has formed its group within {form_s:g} s", now)

    def _judge_regroup(self, since: float, now: float) -> None:
        attendance, timing = self._attendance, self._attendance.timing
        members = attendance.members()
        limit_s = max([timing.join_timeout_s, *(3 * w.longest_step_s for w in members)])
        if attendance.present.over is None and now - since > limit_s / 3:  # planned, but a pair may be cut in between
            attendance.end_generation("not all came to the step after which it was to end", now)
        for worker in members:
            forms = not worker.formed and now - attendance.present.seated_at <= timing.form_s
            told_s = now - max(since, worker.here_since)
            if worker.standing is None and worker.here and not forms and told_s > limit_s:
                self._standstill.name(worker, regroup_after(attendance.present.generation), told_s, now)
                self._fence(worker, f"it did not come to the regroup within {limit_s:g} s: it hangs", now)

    def _fence(self, worker: Worker, why: str, now: float) -> None:
        words = why if worker.doing is None else f"{why}; {where(worker, now)}"
        self._attendance.fence(worker, words[:LONGEST_REASON], now)

    def _judge_reports(self, now: float) -> None:
        attendance, members = self._attendance, self._counting(now)
        reports = {
            rank: {other: why for other, why in reported.items() if other in members}
            for rank, reported in self._reports.items()
            if rank in members
        }
        self._reports = {}
        holders = {w.rank for w in attendance.members() if w.rank is not None and w.has_state}
        unheard = {rank for rank, w in members.items() if not attendance.heard_lately(w, now)}
        for rank, why in left_out(reports, holders, unheard).items():
            attendance.fence(members[rank], why, now)

    def _counting(self, now: float) -> dict[int, Worker]:
        """The members by rank of whose pairs it may be said that they are broken."""
        members = {w.rank: w for w in self._attendance.members() if w.rank is not None}
        if not all(w.formed for w in members.values()):
            return members
        settled_s = self._attendance.timing.return_s
        lately = {rank: w for rank, w in members.items() if self._attendance.heard_lately(w, now)}
        return {rank: w for rank, w in lately.items() if now - w.here_since > settled_s}


def left_out(
    reports: dict[int, dict[int, str]], holders: Collection[int], unheard: Collection[int] = ()
) -> dict[int, str]:
    """The ranks to leave out, and why.

    reports: by the rank that says it, whom it cannot reach, and why. holders: of the state.
    """
    pairs = {frozenset((one, other)) for one, others in reports.items() for other in others if one != other}
    found: dict[int, str] = {}
    while pairs:
        left = [rank for rank in holders if rank not in found]
        worst = max(
            set().union(*pairs) - (set(left) if len(left) == 1 else set()),
            key=lambda rank: (sum(rank in pair for pair in pairs), rank in unheard, rank not in holders, rank),
        )
        found[worst] = _why(worst, reports, sorted(min(pair - {worst}) for pair in pairs if worst in pair))
        pairs = {pair for pair in pairs if worst not in pair}
    return found


def _why(rank: int, reports: dict[int, dict[int, str]], peers: list[int]) -> str:
    said = [
        f"rank {peer} cannot reach it ({reports[peer][rank]})"
        if rank in reports.get(peer, {})
        else f"it cannot reach rank {peer} ({reports[rank][peer]})"
        for peer in peers
    ]
    return "; ".join(said)[:LONGEST_REASON]
