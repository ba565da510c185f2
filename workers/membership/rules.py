"""The rules of who belongs to the job, and when the next generation closes. Pure: no sockets, no clock.

    a generation closes   when every member of the present one has joined and is not silent, or has gone, and limits.min
                          have joined. Never by a time window: a survivor that is late is waited for, or fenced
    the first             also waits for limits.max workers, or start_wait_s
    without any member    also waits until nobody of the present generation can commit any more (commit_lease.py)
    a member is lost      when its side ends its connection; when it hangs, or others cannot reach it (stuck.py); when
                          it is silent for too long (Silence in attendance.py)
    a generation is over  when a member is lost; when one has stopped on its own; when none has formed a group in form_s
    it comes back         if its connection was ended, it lives, and no other generation has closed since
    a worker is refused   if it trains something else (roster.py)
    what hangs is named   before anything is done about it (stuck.py)
    a change is planned   while all are heard of and newcomers wait, or members should leave (roster.py)
    a restarted server    learns the generation from the first member that comes back; others are silent after adopt_s

A step takes the data of all members. So once one of them has stopped and joined, its generation commits nothing more,
and the next may have any members at all. Two could only commit at once where the next has no member of this one: that
is why it waits. What is to be done comes out of take().
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import JsonValue

from thinwire.workers.membership import messages as m
from thinwire.workers.membership import roster
from thinwire.workers.membership.asking import Asking
from thinwire.workers.membership.attendance import Attendance, Close, Effect, Keep, Present, Send, Silence, Timing
from thinwire.workers.membership.messages import FromMember
from thinwire.workers.membership.roster import Worker
from thinwire.workers.membership.seating import Roster, Turnover
from thinwire.workers.membership.seats import Identity, Limits, Seat, Snapshot
from thinwire.workers.membership.stuck import Standstill, Stuck

JUST_NOW = 0.12
"""Of the time after which a worker is silent: a beat or two."""
PAUSE_S = 2.0
"""Between two ticks: more than that, and this process itself was stopped, so that nobody's silence counts."""


GATHER_S = 0.25
"""Dismissals come together, when machines are taken back: they are one change, so that the last can save for all."""


class Rules:
    """The state of the server. Every call may leave effects, which take() hands out in order.

    after: the highest generation that is known to have been.
    """

    def __init__(self, limits: Limits, timing: Timing, now: float, *, after: int = 0) -> None:
        self.limits = limits
        self.finished = False
        self._timing = timing
        self._began = now
        self._quiet_until = now + timing.quiet_s
        self._ticked_at = now
        self._highest = self._after = after  # the first: that is known from anybody
        self._signature: dict[str, str] | None = None  # of the job, while it has members
        self._known: dict[str, str] = {}  # of the job's signature, by the driver
        self._attendance = Attendance(timing)
        self._silence = Silence(self._attendance, now)
        self._standstill = Standstill(self._attendance, now)
        self._stuck = Stuck(self._attendance, self._standstill)
        self._asking = Asking(self._attendance)

    def take(self) -> list[Effect]:
        """What is to be done, once."""
        effects, self._attendance.effects = self._attendance.effects, []
        return effects

    # What members say

    def hello(self, identity: Identity, seat: Seat | int | None, now: float) -> m.Refusal | None:
        """A worker came. The answer where it is not taken.

        seat: its own, as it says; or the generation of that alone, 0 for none, and it is asked for the rest if need be.
        """
        attendance, seated = self._attendance, seat.generation if isinstance(seat, Seat) else seat or 0
        self._asking.gone(identity.id, now)
        if back := attendance.present.returning.get(identity.id):  # it may not have read yet that it is seated
            attendance.take_back(back)
        elif past := attendance.past.get(identity.id):
            return past
        elif self.finished:
            return m.Refusal(verdict="dismissed", why="the job has finished")
        elif refusal := self._filled(identity, seated > 0):
            return refusal
        known = attendance.workers.get(identity.id)
        if seated and (known is None or seated > attendance.present.generation):
            self._highest = max(self._highest, seated)
            if isinstance(seat, int) and self._knows_less(seated):
                self._asking.wait(identity, seated, now)
                return None
            if refusal := self._adopt(identity, seated, seat, now):
                return refusal
            known = attendance.workers.get(identity.id)
        worker = known or Worker(identity, now, here_since=now)
        if (
            now - worker.heard_at > self._timing.return_s
        ):  # else it was not away: a connection that ends again and again
            worker.here_since = now
        if known is None:
            attendance.add(worker)
        worker.connected, worker.awaited, worker.reset = True, False, None
        attendance.say("connected", slot=identity.slot, id=identity.id, host=identity.host, pid=identity.pid)
        attendance.send(identity.id, m.Welcome())
        self._hear(worker, now)
        if worker.rank is not None:
            self._refuse_doubles(worker, now)
            attendance.cancel()  # it may not have read what it was to answer
            self._tell_all(worker, seated)
            self._settle(now)
        return None

    def heard(self, id: str, message: FromMember, now: float) -> None:
        """What a worker says that has come, as in messages.py. Raises BadLine where it is not welcome yet."""
        if isinstance(message, m.OwnSeat):
            self._tells_seat(id, message.seat, now)
            return
        worker = self._attendance.workers.get(id)
        if worker is None:
            raise m.BadLine(f"{message.kind} came before its welcome: wait for that")
        if not isinstance(message, m.Goodbye):
            self._hear(worker, now)
        match message:
            case m.Join():
                self._join(worker, message, now)
            case m.Formed():
                self._formed(worker, message.generation)
            case m.Unreachable():
                self._unreachable(worker, message, now)
            case m.Beat():
                self._note_step(worker, message.step, message.seconds)
                worker.doing = message.doing
                self._attendance.send(id, m.Heard(number=message.number))
            case m.Answer():
                self._note_step(worker, message.step)
                self._answer(worker, message, now)
            case m.Notice():
                self._notice(worker, message.reason, now)
            case m.Goodbye(clean=True):
                self._finished(worker, message.reason, now)
            case m.Goodbye():
                self._attendance.effects.append(Close(id))
                self._attendance.lose(worker, f"it failed: {message.reason}", "failed", now, commits_until=now)
                self._settle(now)

    def _join(self, worker: Worker, message: m.Join, now: float) -> None:
        attendance, present = self._attendance, self._attendance.present
        id, standing = worker.identity.id, message.standing
        self._highest = max(self._highest, message.floor)
        if worker.rank is not None and message.after < present.generation:  # it has not yet read that it is seated
            attendance.send(id, m.Seating(rank=worker.rank, roster=present.roster))
            return
        worker.signature = message.signature
        if attendance.members():
            why = roster.signature_difference(worker.signature, self._signature)
        else:
            why = roster.differs_from_known(worker.signature, self._known)
        if why:
            attendance.refuse(worker, why, now)
            self._settle(now)
            return
        if worker.rank is not None:
            self._signature = self._signature or worker.signature  # a server that was restarted learns it from members
        worker.standing, worker.joined_at = standing, now
        worker.step = max(worker.step, standing.step)
        attendance.say("joined", slot=worker.identity.slot, id=id, step=standing.step, rank=worker.rank)
        if worker.rank is not None:
            as_planned = present.planned is not None and standing.step == present.planned_step
            if not as_planned and present.over is None:
                present.planned = None
                attendance.end_generation(f"rank {worker.rank} ({worker.name}) has stopped for a regroup", now, but=id)
            elif present.regroup_since is None:
                present.regroup_since = now
            if id in attendance.unwanted and not standing.has_state:
                # else it is seated, and leaves when it has handed over
                attendance.dismiss(worker, attendance.unwanted[id])
            self._settle(now)  # a newcomer waits for the next tick: many come together, and are one change

    def _formed(self, worker: Worker, generation: int) -> None:
        if worker.rank is not None and generation == self._attendance.present.generation and not worker.formed:
            worker.formed = True
            self._stuck.forget_reports()  # each pair is proved before anybody has the group: they can talk again

    def _unreachable(self, worker: Worker, message: m.Unreachable, now: float) -> None:
        if worker.rank is None or message.generation != self._attendance.present.generation:
            return  # it speaks of a generation that is over
        self._stuck.report(worker.rank, message.ranks, now)

    def _answer(self, worker: Worker, message: m.Answer, now: float) -> None:
        attendance, plan = self._attendance, self._attendance.plans.open
        if plan is None or plan.number != message.number:
            return
        if not message.yes:
            attendance.cancel()
            attendance.plans.refused(now, stepping=message.step is not None)
        elif attendance.plans.vote(worker.identity.id, message.number) is not None:
            attendance.plans.reset()
            attendance.present.planned, attendance.present.planned_step = plan.reason, plan.step
            attendance.unwanted |= plan.leaving
            attendance.present.leaving = frozenset(plan.leaving)
            attendance.say("confirmed", step=plan.step, reason=plan.reason)
            attendance.tell(m.Confirm(number=message.number))
        self._settle(now)

    def _notice(self, worker: Worker, reason: str, now: float) -> None:
        id = worker.identity.id
        if id not in self._attendance.unwanted:
            self._attendance.say("notice", slot=worker.identity.slot, id=id, rank=worker.rank, why=reason)
        self._let_go(worker, reason, now)
        self._settle(now)

    def _finished(self, worker: Worker, reason: str, now: float) -> None:
        attendance, id = self._attendance, worker.identity.id
        leaving = id in attendance.present.leaving
        attendance.remove(worker, m.Refusal(verdict="fenced", why=f"it has said goodbye: {reason}"))
        attendance.effects.append(Close(id))
        attendance.say("left", slot=worker.identity.slot, id=id, rank=worker.rank, reason=reason)
        if worker.rank is not None:
            attendance.cancel()
            attendance.present.at_end = attendance.present.at_end or not leaving
        self._settle(now)

    # What the server finds

    def gone(self, id: str, why: str, now: float) -> None:
        """The connection of a worker was ended at its side: its process is dead, or comes back within return_s."""
        self._asking.gone(id, now)
        worker = self._attendance.workers.get(id)
        if worker is None:
            return
        if now - worker.heard_at > self._timing.beat_timeout_s / 2:
            self.cut(id, why, now)  # its system may have given up a connection that was cut, and the process lives
        else:
            self._lose(worker, why, now)

    def cut(self, id: str, why: str, now: float) -> None:
        """The connection of a worker broke, and not at its side. It may live, and know nothing of it."""
        self._asking.gone(id, now)
        attendance, worker = self._attendance, self._attendance.workers.get(id)
        if worker is None:
            return
        if worker.rank is None:
            attendance.forget(worker, why)
        else:
            worker.connected = False
            attendance.say("cut", slot=worker.identity.slot, id=id, rank=worker.rank, why=why)
            attendance.cancel()
        self._settle(now)

    def reset(self, id: str, why: str, now: float) -> None:
        """The connection of a worker was reset: its process has ended, or its system had given the connection up.

        One that lives comes back; at once, if it was heard of just now, and so can reach this server. Else the others
        go on without it; but nobody begins in its place before its lease has ended, for a device in between may have
        reset the connection, and the network be cut since.
        """
        self.cut(id, why, now)
        if worker := self._attendance.workers.get(id):
            timing = self._timing
            just_now = now - worker.heard_at <= JUST_NOW * timing.beat_timeout_s
            worker.reset = (now + (timing.reset_s if just_now else timing.return_s), why)

    def misspoke(self, id: str, why: str, now: float) -> None:
        """A worker does not speak the protocol: it is fenced, and its connection is ended at this side."""
        self._asking.gone(id, now)
        if worker := self._attendance.workers.get(id):
            self._attendance.fence(worker, why, now)
            self._settle(now)

    def tick(self, now: float) -> None:
        """Time has passed. To be called several times a second."""
        attendance = self._attendance
        paused_s, self._ticked_at = now - self._ticked_at, now
        if paused_s > PAUSE_S:
            self._forgive(paused_s)
        for worker in attendance.members():
            if worker.reset is not None and now >= worker.reset[0]:
                self._lose(worker, worker.reset[1], now, commits_until=attendance.lease_end(worker))
        for worker in self._silence.note(now):
            self._refuse_doubles(worker, now)
        self._silence.judge(self.limits.min, now)
        self._stuck.judge(now)
        self._asking.tick(now)
        attendance.tell_lost()
        if not self.finished:
            self._standstill.judge(now)
        present = attendance.present
        # What has come back may know an older generation than the one that was kept, of which others may commit yet.
        vacant = now >= attendance.vacant_at() and (present.generation >= self._after or now >= self._quiet_until)
        if present.generation and vacant != present.vacant:
            present.vacant = vacant
            attendance.effects.append(Keep(self.highest, vacant=vacant))
        self._settle(now)

    # What the operator wants

    def set_limits(self, limits: Limits, now: float) -> None:
        """Other limits, at the next boundary."""
        if limits != self.limits:
            self.limits = limits
            self._attendance.say("limits", min=limits.min, max=limits.max)
            self._settle(now)

    def know(self, known: dict[str, str], now: float) -> None:
        """What is known of the job's signature. It says who may begin; members go on with what they have begun."""
        self._known, attendance = known, self._attendance
        for worker in [] if attendance.members() else list(attendance.workers.values()):
            if why := roster.differs_from_known(worker.signature, known):
                attendance.refuse(worker, why, now)
        self._settle(now)

    def dismiss(self, slot: int, reason: str, now: float) -> None:
        """Let who fills this slot leave; nothing if nobody does."""
        for worker in self._attendance.in_slot(slot):
            self._let_go(worker, reason, now)
        self._settle(now)

    def bar(self, id: str, reason: str, now: float) -> None:
        """Let this worker leave, and send it away when it comes back: its job's driver has given it up."""
        attendance = self._attendance
        if worker := attendance.workers.get(id):
            self._let_go(worker, reason, now)
            self._settle(now)
        else:
            attendance.past.setdefault(id, m.Refusal(verdict="dismissed", why=reason))

    def snapshot(self, events: int) -> Snapshot:
        """What is known now. events: how many there have been."""
        return self._attendance.snapshot(self.limits, finished=self.finished, events=events)

    def vacant_in_s(self, now: float) -> float:
        """For how long a server that replaces this one must be quiet: nobody that this one knows can commit after."""
        return max(self._attendance.vacant_at() - now, self._quiet_until - now, 0.0)

    @property
    def highest(self) -> int:
        """The highest generation that is known."""
        return max(self._highest, self._attendance.present.generation)

    def _lose(self, worker: Worker, why: str, now: float, *, commits_until: float | None = None) -> None:
        """Its process is taken to be dead; it may come back, and commit till then: within return_s, or until that."""
        if worker.rank is None:
            self._attendance.forget(worker, why)
        else:
            worker.connected, worker.reset = False, None
            until = now + self._timing.return_s if commits_until is None else commits_until
            self._attendance.lose(worker, why, "lost", now, commits_until=until)
            self._attendance.present.returning[worker.identity.id] = worker
        self._settle(now)

    def _let_go(self, worker: Worker, reason: str, now: float) -> None:
        attendance = self._attendance
        if worker.rank is None:
            attendance.dismiss(worker, reason)
        elif worker.identity.id not in attendance.unwanted:
            attendance.unwanted[worker.identity.id] = reason
            attendance.plans.hold(now + GATHER_S)

    def _filled(self, identity: Identity, seated: bool) -> m.Refusal | None:
        """Has another worker its id, or is there in its slot? Who is silent may be dead, and fills nothing.

        Nor does a newcomer, where this one has a seat: it came while this one was silent.
        """
        known = self._attendance.workers.get(identity.id)
        for other in [*self._attendance.in_slot(identity.slot), *([known] if known else [])]:
            if other.identity == identity:
                continue  # it comes back, before this side has seen its connection end
            there = other.here and (other.rank is not None or not seated)
            if identity.id == other.identity.id or (identity.slot == other.identity.slot and there):
                what = f"id {identity.id}" if identity.id == other.identity.id else f"slot {identity.slot}"
                why = f"{what} is filled by process {other.identity.pid} on {other.identity.host}: end one of the two"
                return m.Refusal(verdict="refused", why=why)
        return None

    # Who is not heard of, and who does not come

    def _hear(self, worker: Worker, now: float) -> None:
        self._silence.heard(now)
        worker.heard_at = now
        if worker.rank is not None:
            self._attendance.present.furthest = max(self._attendance.present.furthest, worker.step)

    def _note_step(self, worker: Worker, step: int | None, seconds: float = 0.0) -> None:
        worker.step = max(worker.step, step or 0)
        worker.has_state = worker.has_state or step is not None
        worker.longest_step_s = max(worker.longest_step_s, seconds)
        if worker.rank is not None:
            self._attendance.present.furthest = max(self._attendance.present.furthest, worker.step)

    def _refuse_doubles(self, worker: Worker, now: float) -> None:
        """It is there again, and while it was silent a new process may have come for its slot."""
        doubles = [w for w in self._attendance.in_slot(worker.identity.slot) if w is not worker]
        why = f"slot {worker.identity.slot} is filled by two processes: end one of the two"
        if worker.rank is not None:
            for double in doubles:
                self._attendance.refuse(double, why, now)
        elif any(double.here for double in doubles):
            self._attendance.refuse(worker, why, now)

    def _forgive(self, paused_s: float) -> None:
        """This process was stopped: nobody's silence counts."""
        present = self._attendance.present
        self._silence.forgive(paused_s)
        self._standstill.forgive(paused_s)
        present.seated_at += paused_s
        if present.regroup_since is not None:
            present.regroup_since += paused_s
        for worker in self._attendance.workers.values():
            worker.heard_at += paused_s

    # What follows

    def _settle(self, now: float) -> None:
        attendance, present = self._attendance, self._attendance.present
        members = attendance.members()
        if self.finished:
            return
        if present.at_end and not members:
            self._finish()
        elif all(w.standing is not None and w.here for w in members):
            self._close(members, now)
        elif (
            present.regroup_since is None
            and present.planned is None
            and not present.at_end
            and attendance.plans.may_propose(now)
            and all(w.here for w in members)
        ):
            self._plan(members)

    def _close(self, members: Sequence[Worker], now: float) -> None:
        attendance, ended = self._attendance, self._attendance.present
        if not members and now < max([self._quiet_until, *ended.released.values()]):
            return
        if ended.generation < self._after and now < self._quiet_until:
            return  # members of a later generation than the one that came may still commit
        joined = roster.seating(attendance.workers.values())
        if ended.at_end:  # one has ended well, so all have made the last step: a death only kept these from ending too
            joined = [worker for worker in joined if worker.rank is not None]
        elif len(joined) < self.limits.min:
            return
        waited = not members and now >= min(w.joined_at for w in joined) + self._timing.start_wait_s
        if not members and len(joined) < self.limits.max and not waited:
            return
        signature = (self._signature if members else None) or roster.signature_of_most(members or joined)
        if others := [w for w in joined if roster.signature_difference(w.signature, signature)]:
            for worker in others:
                attendance.refuse(worker, roster.signature_difference(worker.signature, signature) or "", now)
            self._settle(now)
            return
        # Who holds a state and is too many is seated too, and hands it over at the next boundary.
        most = max(
            self.limits.max, sum(w.rank is not None and bool(w.standing and w.standing.has_state) for w in joined)
        )
        chosen = joined[:most]
        for worker in joined[most:]:
            if worker.rank is not None:
                attendance.dismiss(worker, f"the job was shrunk to {self.limits.max} workers")
        before = ended.furthest or ended.furthest_before
        if not members and ended.lost:
            attendance.say("gave_up", step=before)
        reason = roster.reason(ended.lost, ended.planned, len(ended.seats), len(chosen), ended.over)
        self._highest, self._signature = self.highest + 1, signature
        seats = Roster(
            generation=self._highest,
            reason=reason,
            lost=tuple(sorted(ended.lost, key=lambda gone: gone.rank)),
            furthest=before,
            members=tuple(roster.to_seated(worker) for worker in chosen),
        )
        change = Turnover.between(ended.generation, ended.seats, seats) if members else None
        self._begin(Present(self._highest, seats, at_end=ended.at_end, seated_at=now))
        attendance.effects.append(Keep(self._highest, vacant=False))
        for rank, worker in enumerate(chosen):
            stays = worker.rank is not None  # and so has the seats of the generation that has ended
            worker.has_state = seats.members[rank].standing.has_state
            worker.standing, worker.longest_step_s, worker.formed, worker.doing = None, 0.0, False, None
            attendance.rank(worker, rank)
            told = m.Seating(rank=rank, roster=seats, change=change if stays else None)
            attendance.send(worker.identity.id, told)
        slots: list[JsonValue] = [w.identity.slot for w in chosen]
        attendance.say("seated", size=len(chosen), slots=slots, reason=reason)
        self._settle(now)

    def _begin(self, present: Present) -> None:
        self._attendance.begin(present)
        self._stuck.forget_reports()

    def _plan(self, members: Sequence[Worker]) -> None:
        attendance = self._attendance
        change = roster.wanted(attendance.workers.values(), attendance.unwanted, self.limits)
        if change is None:
            return
        largest = max(w.step for w in members)
        plan = attendance.plans.propose([w.identity.id for w in members], largest, change.leaving, change.reason)
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

    # A server that was restarted

    def _knows_less(self, generation: int) -> bool:
        """Does this server know less than a member of that generation?"""
        present = self._attendance.present.generation
        return generation > present and (present == 0 or bool(self._attendance.awaited()) or present < self._after)

    def _adopt(self, identity: Identity, seated: int, seat: Seat | int | None, now: float) -> m.Refusal | None:
        attendance, generation = self._attendance, self._attendance.present.generation
        is_its_own = isinstance(seat, Seat) and any(one.identity.id == identity.id for one in seat.members)
        if self._knows_less(seated) and isinstance(seat, Seat) and is_its_own:
            self._take_over(seat, now)
            return None
        why = f"it was seated in generation {seated}, and generation {generation} goes on without it"
        attendance.say("fenced", slot=identity.slot, id=identity.id, rank=None, why=why)
        attendance.past[identity.id] = m.Refusal(verdict="fenced", why=why)
        return attendance.past[identity.id]

    def _tells_seat(self, id: str, seat: Seat, now: float) -> None:
        """It was asked. Those that wait with it for a server that knows their generation have one now."""
        identity = self._asking.answered(id)
        if identity is None:
            return
        came: list[tuple[Identity, Seat | int]] = [(identity, seat)]
        while came:
            who, brings = came.pop()
            if refusal := self.hello(who, brings, now):
                self._attendance.effects += [Send(who.id, refusal), Close(who.id)]
            if not came:
                came += self._asking.up_to(self._attendance.present.generation)

    def _take_over(self, seat: Seat, now: float) -> None:
        """This server knows less than a member, whose generation becomes the present one."""
        attendance = self._attendance
        attendance.cancel()
        seats = Roster(
            generation=seat.generation,
            reason=seat.reason,
            lost=seat.lost,
            furthest=seat.furthest,
            members=seat.members,
        )
        self._begin(Present(seat.generation, seats, seated_at=now))
        self._silence.adopt_until = now + self._timing.adopt_s
        if seat.generation < self._after:  # members of the last generation may be about to come, or be cut off
            self._silence.adopt_until = max(self._silence.adopt_until, self._quiet_until)
        attendance.say("adopted", size=seat.size)
        ranks = {seated.identity.id: rank for rank, seated in enumerate(seat.members)}
        for worker in list(attendance.workers.values()):
            if worker.identity.id in ranks:
                continue
            if worker.rank is not None:
                attendance.rank(worker, None)  # of another generation; it is not a loss of this one
                attendance.fence(worker, f"generation {seat.generation} goes on without it", now)
        for rank, seated in enumerate(seat.members):
            worker = attendance.workers.get(seated.identity.id) or Worker(
                seated.identity, self._began, connected=False, awaited=True
            )
            if seated.identity.id not in attendance.workers:
                attendance.add(worker)
            attendance.rank(worker, rank)
            worker.standing, worker.step = None, seated.standing.step
            worker.has_state = seated.standing.has_state
            if worker.connected:
                self._tell_all(worker, 0)

    def _tell_all(self, worker: Worker, knows: int) -> None:
        """A member is there again. knows: the last generation that it knows."""
        attendance, present = self._attendance, self._attendance.present
        if worker.rank is not None and knows < present.generation:
            attendance.send(worker.identity.id, m.Seating(rank=worker.rank, roster=present.roster))
        for message in present.news():
            attendance.send(worker.identity.id, message)
