"""Members that are heard of, and yet must be left out.

    who hangs             it does not come to a regroup within join_timeout_s, or 3 of the longest steps, from when it
                          could be told of it: it may have been cut off, and be back. One that still
                          forms its process group has form_s from its seat on; then it hangs, if others have theirs
    who is not reached    others cannot talk to it, or it to them. Once the group is formed, only among those that have
                          been heard of for return_s: the others are silence.py's, which may wait for a lease, or are
                          just back, and what was said of them is old

Of members that cannot talk to one another as few as can be are left out, chosen one by one: each time the rank of the
most broken pairs; of several, one that was not heard of lately; then one that brings no state; then the highest. Never
the last that holds the state: the others would begin from a checkpoint while it lives.
Where nobody has formed a group in form_s, none of them is to blame: the generation is over, and all try again.
Who hangs is named with what it is at before it is fenced (standstill.py).
"""

from __future__ import annotations

from collections.abc import Collection

from thinwire.workers.membership.attendance import Attendance
from thinwire.workers.membership.roster import Worker
from thinwire.workers.membership.seats import LONGEST_REASON
from thinwire.workers.membership.standstill import Standstill, regroup_after, where

REPORTS_S = 1.0
"""Reports come together: the pairs that cannot talk tell together who is to be left out."""


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
        told = {other: why for other, why in ranks.items() if other in counting}
        if rank not in counting or not told:
            return
        if not self._reports:
            self._reported_at = now
        self._reports[rank] = told

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
        told = why if worker.doing is None else f"{why}; {where(worker, now)}"
        self._attendance.fence(worker, told[:LONGEST_REASON], now)

    def _judge_reports(self, now: float) -> None:
        attendance, members = self._attendance, self._counting(now)
        reports = {
            rank: {other: why for other, why in told.items() if other in members}
            for rank, told in self._reports.items()
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
