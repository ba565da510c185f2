"""Who belongs to the job, and when does the next generation close? Pure: no sockets, no clock, time is passed in.

    a generation closes   when every living member of the present one has joined or said goodbye, and limits.min have
                          joined. Never by a time window: a survivor that is late is waited for, or fenced
    the first             also waits for limits.max workers, or start_wait_s
    a member is lost      when its connection ends; when it has not been heard of for beat_timeout_s; when it does not
                          come to a regroup within join_timeout_s, or 3 of the longest steps. The last two are fenced
    a change is planned   (plans.py) while all is well and newcomers wait, or members should leave (roster.py)
    a restarted server    learns the generation from the first member that comes back, and waits adopt_s for the others

A worker is living while its connection is open. What is to be done comes out of take().
"""

from __future__ import annotations

from pydantic import JsonValue

from thinwire.workers.membership import messages as m
from thinwire.workers.membership import roster
from thinwire.workers.membership.attendance import Attendance, Close, Effect, Present, Timing
from thinwire.workers.membership.roster import Worker
from thinwire.workers.membership.seats import Identity, Limits, Seat, Snapshot, Standing

PAUSE_S = 2.0
"""Between two ticks: more than that, and this process itself was stopped, so that nobody's silence counts."""


GATHER_S = 0.25
"""Dismissals come together, when machines are taken back: they are one change, so that the last can save for all."""


class Rules:
    """The state of the server. Every call may leave effects, which take() hands out in order."""

    def __init__(self, limits: Limits, timing: Timing, now: float) -> None:
        self.limits = limits
        self.finished = False
        self._timing = timing
        self._quiet_until = now + timing.quiet_s
        self._ticked_at = now
        self._adopt_until = now
        self._highest = 0  # generation that anybody has told of
        self._attendance = Attendance()

    def take(self) -> list[Effect]:
        """What is to be done, once."""
        effects, self._attendance.effects = self._attendance.effects, []
        return effects

    # What members say

    def hello(self, identity: Identity, told: Seat | None, now: float) -> m.Refusal | None:
        """A worker came; told is its seat. The answer where it is not taken."""
        attendance = self._attendance
        if past := attendance.past.get(identity.id):
            return past
        if self.finished:
            return m.Refusal(verdict="dismissed", why="the job has finished")
        for other in attendance.workers.values():
            if identity.id == other.identity.id or identity.slot == other.identity.slot:
                what = f"id {identity.id}" if identity.id == other.identity.id else f"slot {identity.slot}"
                why = f"{what} is filled by process {other.identity.pid} on {other.identity.host}: end one of the two"
                return m.Refusal(verdict="refused", why=why)
        if told is not None and (refusal := self._adopt(identity, told, now)):
            return refusal
        worker = attendance.workers[identity.id] = Worker(identity, now)
        attendance.say("connected", slot=identity.slot, id=identity.id, host=identity.host, pid=identity.pid)
        attendance.send(identity.id, m.Welcome())
        self._give_up_replaced(now)
        if identity.id in attendance.awaited:
            self._come_back(worker, told.generation if told else 0)
        self._settle(now)
        return None

    def join(
        self,
        id: str,
        after: int,
        standing: Standing,
        now: float,
        *,
        signature: dict[str, str] | None = None,
        floor: int = 0,
    ) -> None:
        """A worker is ready for the generation that follows `after`."""
        self._highest = max(self._highest, floor)
        attendance, present = self._attendance, self._attendance.present
        worker = attendance.workers[id]
        worker.heard_at = now
        if worker.rank is not None and after < present.generation:  # it has not yet read that it is seated
            attendance.send(id, present.seating(worker.rank))
            return
        worker.standing, worker.joined_at = standing, now
        worker.step = max(worker.step, standing.step)
        attendance.say("joined", slot=worker.identity.slot, id=id, step=standing.step, rank=worker.rank)
        if worker.rank is not None:
            if present.regroup_since is None:
                present.regroup_since = now
            if present.planned is None and present.over is None:
                attendance.cancel()
                present.over = f"rank {worker.rank} ({worker.name}) has stopped for a regroup"
                attendance.say("over", why=present.over)
                attendance.tell(m.Over(generation=present.generation, why=present.over), but=id)
            if id in attendance.unwanted and not standing.has_state:
                attendance.dismiss(
                    worker, attendance.unwanted[id]
                )  # else it is seated, and leaves when it has handed over
        self._settle(now)

    def store(self, id: str, generation: int, port: int) -> None:
        """Rank 0 has a store."""
        attendance, worker = self._attendance, self._attendance.workers[id]
        if worker.rank != 0 or generation != attendance.present.generation:
            return  # it speaks of a generation that is over
        attendance.present.store = m.StoreAt(generation=generation, host=worker.identity.host, port=port)
        attendance.say("store", host=worker.identity.host, port=port)
        attendance.tell(attendance.present.store, but=id)

    def formed(self, id: str, generation: int, now: float) -> None:
        """A member has the process group of that generation."""
        self._hear(id, None, 0.0, now)

    def unreachable(self, id: str, generation: int, ranks: dict[int, str], now: float) -> None:
        """A member cannot talk to these ranks of that generation."""
        self._hear(id, None, 0.0, now)

    def beat(self, id: str, number: int, step: int | None, seconds: float, now: float) -> None:
        """A worker lives, and is at that step of the present generation."""
        self._hear(id, step, seconds, now)
        self._attendance.send(id, m.Heard(number=number))

    def _hear(self, id: str, step: int | None, seconds: float, now: float) -> None:
        worker = self._attendance.workers[id]
        worker.heard_at = now
        worker.step = max(worker.step, step or 0)
        worker.longest_step_s = max(worker.longest_step_s, seconds)

    def answer(self, id: str, number: int, *, yes: bool, step: int | None, now: float) -> None:
        """A member said yes or no to a proposal."""
        self._hear(id, step, 0.0, now)
        attendance, plan = self._attendance, self._attendance.plans.open
        if plan is None or plan.number != number:
            return
        if not yes:
            attendance.cancel()
            attendance.plans.refused(now, stepping=step is not None)
        elif attendance.plans.vote(id, number) is not None:
            attendance.plans.reset()
            attendance.present.planned = plan.reason
            attendance.unwanted |= plan.leaving
            attendance.present.leaving = frozenset(plan.leaving)
            attendance.say("confirmed", step=plan.step, reason=plan.reason)
            attendance.tell(m.Confirm(number=number))
        self._settle(now)

    def notice(self, id: str, reason: str, now: float) -> None:
        """A worker has been told to go: as if it were dismissed."""
        worker = self._attendance.workers[id]
        worker.heard_at = now
        if id not in self._attendance.unwanted:
            self._attendance.say("notice", slot=worker.identity.slot, id=id, rank=worker.rank, why=reason)
        self._let_go(worker, reason, now)
        self._settle(now)

    def finished_by(self, id: str, reason: str, now: float) -> None:
        """A worker leaves at a clean end."""
        attendance = self._attendance
        worker, leaving = attendance.workers[id], id in attendance.present.leaving
        attendance.remove(worker, m.Refusal(verdict="fenced", why=f"it has said goodbye: {reason}"))
        attendance.effects.append(Close(id))
        attendance.say("left", slot=worker.identity.slot, id=id, rank=worker.rank, reason=reason)
        if worker.rank is not None:
            attendance.cancel()
            attendance.present.at_end = attendance.present.at_end or not leaving
        self._settle(now)

    def failed_by(self, id: str, reason: str, now: float) -> None:
        """A worker leaves for an error of its own."""
        self._attendance.effects.append(Close(id))
        self._attendance.lose(self._attendance.workers[id], f"it failed: {reason}", "failed", now)
        self._settle(now)

    # What the server finds

    def gone(self, id: str, why: str, now: float) -> None:
        """The connection of a worker has ended: it is dead."""
        if worker := self._attendance.workers.get(id):
            self._attendance.lose(worker, why, "lost", now)
            self._settle(now)

    def tick(self, now: float) -> None:
        """Time has passed. To be called several times a second."""
        attendance, timing = self._attendance, self._timing
        paused_s, self._ticked_at = now - self._ticked_at, now
        if paused_s > PAUSE_S:
            self._forgive(paused_s)
        for worker in list(attendance.workers.values()):
            if now - worker.heard_at > timing.beat_timeout_s:
                attendance.fence(worker, f"it has not been heard of for {timing.beat_timeout_s:g} s", now)
        if attendance.present.regroup_since is not None:
            members = attendance.members()
            limit_s = max([timing.join_timeout_s, *(3 * w.longest_step_s for w in members)])
            for worker in members:
                if worker.standing is None and now - attendance.present.regroup_since > limit_s:
                    attendance.fence(worker, f"it did not come to the regroup within {limit_s:g} s: it hangs", now)
        if now >= self._adopt_until:
            why = f"it did not come back within {timing.adopt_s:g} s after the membership server was restarted"
            for id in list(attendance.awaited):
                attendance.lose_awaited(id, why, now)
        self._settle(now)

    # What the operator wants

    def set_limits(self, limits: Limits, now: float) -> None:
        """Other limits, at the next boundary."""
        if limits != self.limits:
            self.limits = limits
            self._attendance.say("limits", min=limits.min, max=limits.max)
            self._settle(now)

    def dismiss(self, slot: int, reason: str, now: float) -> None:
        """Let who fills this slot leave; nothing if nobody does."""
        for worker in [w for w in self._attendance.workers.values() if w.identity.slot == slot]:
            self._let_go(worker, reason, now)
        self._settle(now)

    def snapshot(self, events: int) -> Snapshot:
        """What is known now. events: how many there have been."""
        return self._attendance.snapshot(self.limits, finished=self.finished, events=events)

    def _let_go(self, worker: Worker, reason: str, now: float) -> None:
        attendance = self._attendance
        if worker.rank is None:
            attendance.dismiss(worker, reason)
        elif worker.identity.id not in attendance.unwanted:
            attendance.unwanted[worker.identity.id] = reason
            attendance.plans.hold(now + GATHER_S)

    # What follows

    def _settle(self, now: float) -> None:
        attendance, present = self._attendance, self._attendance.present
        members = attendance.members()
        if self.finished or attendance.awaited:
            return
        if present.at_end and not members:
            self._finish()
        elif all(w.standing is not None for w in members):
            self._close(members, now)
        elif present.regroup_since is None and present.planned is None and not present.at_end:
            self._plan(members, now)

    def _close(self, members: list[Worker], now: float) -> None:
        attendance, ended = self._attendance, self._attendance.present
        joined = roster.seating(attendance.workers.values())
        if ended.at_end:  # one has ended well, so all have made the last step: a death only kept these from ending too
            joined = [worker for worker in joined if worker.rank is not None]
        elif len(joined) < self.limits.min:
            return
        if not members and now < self._quiet_until:
            return
        waited = not members and now >= min(w.joined_at for w in joined) + self._timing.start_wait_s
        if not members and len(joined) < self.limits.max and not waited:
            return
        # Who holds a state and is too many is seated too, and hands it over at the next boundary.
        most = max(
            self.limits.max, sum(w.rank is not None and bool(w.standing and w.standing.has_state) for w in joined)
        )
        chosen = joined[:most]
        for worker in joined[most:]:
            if worker.rank is not None:
                attendance.dismiss(worker, f"the job was shrunk to {self.limits.max} workers")
        reason = roster.reason(ended.lost, ended.planned, len(ended.seats), len(chosen), ended.over)
        self._highest = max(self._highest, ended.generation) + 1
        seats = tuple(roster.to_seated(worker) for worker in chosen)
        lost = tuple(sorted(ended.lost, key=lambda gone: gone.rank))
        attendance.begin(Present(self._highest, seats, reason, lost, at_end=ended.at_end))
        for rank, worker in enumerate(chosen):
            worker.rank, worker.standing, worker.longest_step_s = rank, None, 0.0
            attendance.send(worker.identity.id, attendance.present.seating(rank))
        slots: list[JsonValue] = [w.identity.slot for w in chosen]
        attendance.say("seated", size=len(chosen), slots=slots, reason=reason)
        self._settle(now)

    def _plan(self, members: list[Worker], now: float) -> None:
        attendance = self._attendance
        change = roster.wanted(attendance.workers.values(), attendance.unwanted, self.limits)
        if change is None or attendance.plans.open is not None:
            return
        largest = max(w.step for w in members)
        plan = attendance.plans.propose([w.identity.id for w in members], largest, change.leaving, change.reason, now)
        if plan is None:
            return
        attendance.say("proposed", step=plan.step, reason=plan.reason)
        for worker in members:
            proposal = m.Proposal(
                number=plan.number,
                generation=attendance.present.generation,
                step=plan.step,
                leaving=worker.identity.id in plan.leaving,
                reason=plan.reason,
            )
            attendance.send(worker.identity.id, proposal)

    def _finish(self) -> None:
        self.finished = True
        self._attendance.say("finished")
        for worker in list(self._attendance.workers.values()):
            self._attendance.dismiss(worker, "the job has finished")

    def _forgive(self, paused_s: float) -> None:
        """This process was stopped: nobody's silence counts."""
        self._adopt_until += paused_s
        if self._attendance.present.regroup_since is not None:
            self._attendance.present.regroup_since += paused_s
        for worker in self._attendance.workers.values():
            worker.heard_at += paused_s

    # A server that was restarted

    def _adopt(self, identity: Identity, told: Seat, now: float) -> m.Refusal | None:
        attendance, generation = self._attendance, self._attendance.present.generation
        self._highest = max(self._highest, told.generation)
        knows_less = told.generation > generation and (generation == 0 or bool(attendance.awaited))
        if knows_less and any(seated.identity.id == identity.id for seated in told.members):
            self._take_over(told, now)
            return None
        if identity.id in attendance.awaited:
            return None
        why = f"it was seated in generation {told.generation}, and generation {generation} goes on without it"
        attendance.say("fenced", slot=identity.slot, id=identity.id, rank=None, why=why)
        attendance.past[identity.id] = m.Refusal(verdict="fenced", why=why)
        return attendance.past[identity.id]

    def _take_over(self, told: Seat, now: float) -> None:
        """This server knows less than a member: what it was told is the present generation."""
        attendance = self._attendance
        attendance.cancel()
        attendance.begin(Present(told.generation, told.members, told.reason, told.lost))
        attendance.awaited = {seated.identity.id: rank for rank, seated in enumerate(told.members)}
        self._adopt_until = now + self._timing.adopt_s
        attendance.say("adopted", size=told.size)
        for worker in list(attendance.workers.values()):
            if worker.identity.id in attendance.awaited:
                self._come_back(worker, 0)
            elif worker.rank is not None:
                worker.rank = None  # of another generation; it is not a loss of this one
                attendance.fence(worker, f"generation {told.generation} goes on without it", now)

    def _come_back(self, worker: Worker, knows: int) -> None:
        """A member of the adopted generation is there. knows: the last generation that it knows."""
        attendance, id = self._attendance, worker.identity.id
        worker.rank, worker.standing = attendance.awaited.pop(id), None
        worker.step = attendance.present.seats[worker.rank].standing.step
        if knows < attendance.present.generation:
            attendance.send(id, attendance.present.seating(worker.rank))
        for message in attendance.present.news():
            attendance.send(id, message)

    def _give_up_replaced(self, now: float) -> None:
        """A new process fills the slot of a member that has not come back: that one is dead."""
        filled = {w.identity.slot: w.identity for w in self._attendance.workers.values()}
        for id, rank in list(self._attendance.awaited.items()):
            new = filled.get(self._attendance.present.seats[rank].identity.slot)
            if new is not None and new.id != id:
                why = f"a new process, {new.pid} on {new.host}, fills its place"
                self._attendance.lose_awaited(id, why, now)
