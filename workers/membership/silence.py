"""Members that are silent, and whether the others may go on without them.

    heard       lately. Members do not send their beats at one moment: where it is the server that is cut off, they fall
                silent one after another, and the last beats of the others must not be held against the first
    undecided   neither heard lately nor silent: soon the one or the other

Silent are all, or were for a while: the server is cut off, and nobody is lost by that. Unless nobody of this generation
can commit any more, and newcomers wait, or the job is at its end.
Half of the members, or more, are heard: they may go on at once, for a step takes the data of all, so that one that is
silent is at most one step ahead. Unless only the silent hold the state; then, and where less than half are heard, the
silent may still train, and are waited for, each until its lease has ended.
"""

from __future__ import annotations

from thinwire.workers.membership import roster
from thinwire.workers.membership.attendance import Attendance, Close
from thinwire.workers.membership.roster import Worker


class Silence:
    """Of the workers in one attendance.

    adopt_until: then a member that has not come back to a server that was restarted is silent.
    """

    def __init__(self, attendance: Attendance, now: float) -> None:
        self._attendance = attendance
        self._judge_from = now
        self._heard_at: float | None = None
        self.adopt_until = now

    def heard(self, now: float) -> None:
        """A worker was heard. Where nobody was for a while, the others are about to come back too."""
        timing = self._attendance.timing
        if self._heard_at is not None and now - self._heard_at > timing.beat_timeout_s / 4:
            self._judge_from = now + timing.beat_timeout_s
        self._heard_at = now

    def forgive(self, paused_s: float) -> None:
        """The server was stopped for so long."""
        self.adopt_until += paused_s
        self._judge_from += paused_s
        if self._heard_at is not None:
            self._heard_at += paused_s

    def note(self, now: float) -> list[Worker]:
        """Mark who is silent, and who is not any more. Returns these."""
        attendance, back = self._attendance, []
        for worker in attendance.workers.values():
            due = self.adopt_until if worker.awaited else worker.heard_at + attendance.timing.beat_timeout_s
            silent = now >= due if worker.awaited else now > due
            if silent == worker.silent:
                continue
            worker.silent = silent
            who = worker.identity
            attendance.say("silent" if silent else "heard", slot=who.slot, id=who.id, rank=worker.rank)
            if not silent:
                worker.here_since = now
                back.append(worker)
                if worker.rank is not None:  # the network heals: others that were cut off with it may be about to come
                    self._judge_from = max(self._judge_from, now + attendance.timing.return_s)
            elif worker.rank is not None:
                attendance.cancel()
        return back

    def judge(self, least: int, now: float) -> None:
        """Fence those members without which the others may go on. least: workers that a generation must have."""
        attendance, timing = self._attendance, self._attendance.timing
        for worker in list(attendance.workers.values()):
            if worker.rank is None and worker.silent and now >= attendance.lease_end(worker):
                attendance.effects.append(Close(worker.identity.id))
                attendance.forget(worker, f"it has not been heard of for {timing.lease_s:g} s")
        members = attendance.members()
        silent = [w for w in members if w.silent]
        heard = [w for w in members if not w.silent and attendance.heard_lately(w, now)]
        if not silent or now < self._judge_from:
            return
        if len(silent) == len(members):
            enough = len(roster.waiting_slots(attendance.workers.values())) >= least
            if now >= attendance.vacant_at() and (enough or attendance.present.at_end):
                self._fence(silent, now)
        elif _may_go_on(heard, silent, len(members)):
            self._fence(silent, now)
        elif ended := [w for w in silent if now >= attendance.lease_end(w)]:
            if len(heard) + len(silent) < len(members):
                return
            step = max(w.step for w in heard)
            given_up = max(max(w.step for w in ended) - step, 0)
            attendance.say("minority", step=step, heard=len(heard), silent=len(silent), steps_given_up=given_up)
            self._fence(ended, now)

    def _fence(self, silent: list[Worker], now: float) -> None:
        timing = self._attendance.timing
        for worker in silent:
            if worker.awaited:
                why = f"it did not come back within {timing.adopt_s:g} s after the membership server was restarted"
            else:
                why = f"it has not been heard of for {timing.beat_timeout_s:g} s"
            self._attendance.fence(worker, why, now)


def _may_go_on(heard: list[Worker], silent: list[Worker], size: int) -> bool:
    """May those that are heard, of so many members, go on without the silent at once?"""
    holds = any(w.has_state for w in heard) or not any(w.has_state for w in silent)
    return bool(heard) and 2 * len(heard) >= size and holds
