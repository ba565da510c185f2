"""Who is here, who has gone and why, and what has happened to the present generation; with what it takes to lose one.

A worker, as the server sees it:

    newcomer    it has no seat yet. Forgotten when its connection ends: it may come back
    member      seated in the present generation
    silent      a member or a newcomer that has not been heard of for beat_timeout_s. Its connection may have been cut
    awaited     a member that this server, which was restarted, knows from others; silent after adopt_s
    lost        a member that is gone: its connection was ended at its side (`returning`: it may come back before the
                next generation closes), it failed, or it was fenced
    past        never taken again: `past` has the refusal that it gets when it comes back

Each member that is gone may hold a lease (commit_lease.py) for a while: `released` says until when. What the rules ask
the server to do is left here as effects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pydantic import JsonValue

from thinwire.workers.membership import messages as m
from thinwire.workers.membership import roster
from thinwire.workers.membership.commit_lease import LEASE_S
from thinwire.workers.membership.messages import FromServer
from thinwire.workers.membership.roster import Plans, Worker
from thinwire.workers.membership.seating import Roster
from thinwire.workers.membership.seats import (
    LONGEST_REASON,
    Identity,
    Limits,
    LostMember,
    Seated,
    Snapshot,
    Status,
    worker_name,
)

LEASE_END_S = 1.05 * LEASE_S + 1.0
"""After so long without a word of it a lease has ended, also by a clock that is 5 % slower than this one."""

STUCK_S, STILL_S = 30.0, 60.0


@dataclass(frozen=True, slots=True)
class Timing:
    """How long the rules wait.

    beat_timeout_s: then a worker is silent. join_timeout_s: then one that is heard of, and does not come to a regroup,
    hangs; longer than a connection lasts over which nothing reaches it (messages.py). quiet_s: a server that was
    restarted seats nobody without members for so long. return_s: a process that lives comes back in it, when its
    connection was ended; in reset_s, when it was reset and could reach this server just before. form_s: a member may
    take so long for its process group. lease_s: then a lease has ended.
    stuck_s, still_s: without a step for so long, who is waited for is named, and the job said to stand still.
    """

    start_wait_s: float = 20.0
    beat_timeout_s: float = 10.0
    join_timeout_s: float = 15.0
    adopt_s: float = 5.0
    quiet_s: float = 0.0
    return_s: float = 5.0
    form_s: float = 60.0
    lease_s: float = LEASE_END_S
    reset_s: float = 1.5
    stuck_s: float = STUCK_S
    still_s: float = STILL_S


DEFAULT_TIMING = Timing()


@dataclass(frozen=True, slots=True)
class Send:
    """Send this to that worker, after what was sent before."""

    to: str
    message: FromServer


@dataclass(frozen=True, slots=True)
class Close:
    """End the connection of that worker when all is sent."""

    id: str


@dataclass(frozen=True, slots=True)
class Happened:
    """For the log and the metrics."""

    kind: str
    generation: int
    fields: dict[str, JsonValue]


@dataclass(frozen=True, slots=True)
class Keep:
    """Before anything that follows: keep for the next server that this is the generation. vacant: nobody of it can
    commit any more."""

    generation: int
    vacant: bool


Effect = Send | Close | Happened | Keep


@dataclass(slots=True)
class Present:
    """The present generation: who was seated, and what has happened since.

    roster: its members, why it came to be, and the last step reported before. lost: members since; untold: those of
    whom the others have not heard yet. over: why it ends, where that is not planned. planned: the change that was
    confirmed, planned_step: after which step; leaving: the ids of those that leave by it. at_end: a member has come to
    a clean end, and the others will too. furthest: the last step that a member has reported. released: ids that are
    gone, and until when each may commit. returning: those of them that may come back. vacant: nobody is left who could
    commit, and that was kept for the next server.
    """

    generation: int = 0
    roster: Roster | None = None
    lost: list[LostMember] = field(default_factory=list)
    untold: list[LostMember] = field(default_factory=list)
    over: str | None = None
    planned: str | None = None
    planned_step: int = 0
    leaving: frozenset[str] = frozenset()
    regroup_since: float | None = None
    at_end: bool = False
    seated_at: float = 0.0
    furthest: int = 0
    released: dict[str, float] = field(default_factory=dict)
    returning: dict[str, Worker] = field(default_factory=dict)
    vacant: bool = False

    @property
    def seats(self) -> tuple[Seated, ...]:
        """Its members, by rank, as they were when it began."""
        return () if self.roster is None else self.roster.members

    @property
    def furthest_before(self) -> int:
        """The last step that was reported before it began."""
        return 0 if self.roster is None else self.roster.furthest

    def news(self) -> list[m.FromServer]:
        """What a member that comes back has to hear."""
        heard: list[m.FromServer] = [self.lost_peers(self.lost)] if self.lost else []
        if self.over is not None and not self.lost:
            heard.append(m.Over(generation=self.generation, why=self.over))
        return heard

    def lost_peers(self, lost: Sequence[LostMember]) -> m.LostPeers:
        """The message to the others."""
        return m.LostPeers(generation=self.generation, ranks={gone.rank: gone.why for gone in lost})


class Attendance:
    """The workers, and the effects that are to be taken."""

    def __init__(self, timing: Timing) -> None:
        self.timing = timing
        self.workers: dict[str, Worker] = {}
        """By id. Changed by add() and _remove() alone, and ranks by rank()."""
        self._in_slot: dict[int, dict[str, Worker]] = {}
        self._members: list[Worker] | None = None
        self.unwanted: dict[str, str] = {}
        """Ids that are to leave, and why."""
        self.past: dict[str, m.Refusal] = {}
        self.plans = Plans()
        self.effects: list[Effect] = []
        self.present = Present()

    def members(self) -> Sequence[Worker]:
        """The living of the present generation, by rank."""
        if self._members is None:
            self._members = roster.members(self.workers.values())
        return self._members

    def in_slot(self, slot: int) -> list[Worker]:
        """Those of this slot: more than one where a new process has come while the old one is silent."""
        return list(self._in_slot.get(slot, {}).values())

    def add(self, worker: Worker) -> None:
        """It is here, or comes back."""
        self.workers[worker.identity.id] = worker
        self._in_slot.setdefault(worker.identity.slot, {})[worker.identity.id] = worker
        if worker.rank is not None:
            self._members = None

    def rank(self, worker: Worker, rank: int | None) -> None:
        """Its rank in the present generation; None in none. worker: modified."""
        worker.rank, self._members = rank, None

    def _remove(self, worker: Worker) -> None:
        id, slot = worker.identity.id, worker.identity.slot
        del self.workers[id], self._in_slot[slot][id]
        if not self._in_slot[slot]:
            del self._in_slot[slot]
        self.unwanted.pop(id, None)
        if worker.rank is not None and self._members is not None:
            self._members = [one for one in self._members if one is not worker]  # who iterates has the old one

    def awaited(self) -> list[Worker]:
        """Members of an adopted generation that have not come back yet."""
        return [worker for worker in self.workers.values() if worker.awaited]

    def heard_lately(self, worker: Worker, now: float) -> bool:
        """Was it heard of so recently that its next beat is about to come?"""
        return now - worker.heard_at <= self.timing.beat_timeout_s / 4

    def lease_end(self, worker: Worker) -> float:
        """From then on it cannot commit, unless it is heard of before."""
        return worker.heard_at + self.timing.lease_s

    def vacant_at(self) -> float:
        """From then on nobody of the present generation can commit, unless a member is heard of before."""
        return max([*self.present.released.values(), *map(self.lease_end, self.members())], default=float("-inf"))

    def begin(self, present: Present) -> None:
        """Another generation is the present one, and nothing has happened to it."""
        self.present = present
        self.plans.reset()

    def say(self, kind: str, **fields: JsonValue) -> None:
        """For the log."""
        self.effects.append(Happened(kind, self.present.generation, fields))

    def send(self, id: str, message: m.FromServer) -> None:
        """To one worker."""
        self.effects.append(Send(id, message))

    def tell(self, message: m.FromServer, but: str | None = None) -> None:
        """To all members of the present generation."""
        for worker in self.members():
            if worker.identity.id != but:
                self.send(worker.identity.id, message)

    def cancel(self) -> None:
        """The open plan, if there is one, is none."""
        if plan := self.plans.open:
            self.plans.open = None
            self.say("cancelled", step=plan.step)
            self.tell(m.Cancel(number=plan.number))

    def remove(self, worker: Worker, past: m.Refusal) -> None:
        """It is gone, and when it comes back it is refused with this."""
        self._remove(worker)
        self.past[worker.identity.id] = past

    def dismiss(self, worker: Worker, why: str) -> None:
        """Send it away; it is not lost."""
        id = worker.identity.id
        refusal = m.Refusal(verdict="dismissed", why=why)
        self.effects += [Send(id, refusal), Close(id)]
        self.remove(worker, refusal)
        self.say("dismissed", slot=worker.identity.slot, id=id, rank=worker.rank, why=why)

    def forget(self, worker: Worker, why: str) -> None:
        """A newcomer has gone. It may come back."""
        self._remove(worker)
        self.say("lost", slot=worker.identity.slot, id=worker.identity.id, rank=None, why=why)

    def lose(
        self, worker: Worker, why: str, kind: str, now: float, *, commits_until: float, past: m.Refusal | None = None
    ) -> None:
        """It is gone without a clean goodbye.

        commits_until: when its lease has ended in any case. past: the refusal when it comes back.
        """
        who = worker.identity
        self.remove(worker, past or m.Refusal(verdict="fenced", why=f"it was counted as lost: {why}"))
        self.say(kind, slot=who.slot, id=who.id, rank=worker.rank, why=why)
        if worker.rank is not None:
            self.present.released[who.id] = commits_until
            self._count_lost(who, worker.rank, why, now)

    def fence(self, worker: Worker, why: str, now: float) -> None:
        """It may live, but the others go on without it."""
        self._turn_out(worker, m.Refusal(verdict="fenced", why=why), "lost" if worker.awaited else "fenced", now)

    def refuse(self, worker: Worker, why: str, now: float) -> None:
        """The job cannot take it, whatever others are there."""
        self._turn_out(worker, m.Refusal(verdict="refused", why=why), "refused", now)

    def end_generation(self, why: str, now: float, but: str | None = None) -> None:
        """Nobody is lost, and yet the present generation is over. All members hear of it but that one."""
        present = self.present
        present.over = why
        if present.regroup_since is None:
            present.regroup_since = now
        self.cancel()
        self.say("over", why=why)
        self.tell(m.Over(generation=present.generation, why=why), but=but)

    def tell_lost(self) -> None:
        """Tell the members who was lost since the first: one message, where many die at once."""
        present = self.present
        if lost := [gone for gone in present.untold if gone in present.lost]:
            self.tell(present.lost_peers(lost))
        present.untold = []

    def take_back(self, worker: Worker) -> None:
        """A member whose connection was ended lives, and the generation has not been followed by another yet."""
        id, present = worker.identity.id, self.present
        del present.returning[id], present.released[id], self.past[id]
        present.lost = [gone for gone in present.lost if gone.id != id]
        self.add(worker)
        self.say("returned", slot=worker.identity.slot, id=id, rank=worker.rank)

    def snapshot(self, limits: Limits, *, finished: bool, events: int) -> Snapshot:
        """What people see. events: how many there have been."""
        present, workers = [w for w in self.members() if not w.awaited], list(self.workers.values())
        joined = len(roster.seating(workers))
        status, text = self._status(limits, joined, finished=finished)
        steps = [w.step for w in present] or [seated.standing.step for seated in self.present.seats]
        return Snapshot(
            generation=self.present.generation,
            status=status,
            status_text=text,
            limits=limits,
            members=tuple(w.occupant() for w in present),
            waiting=tuple(w.occupant() for w in sorted(workers, key=lambda w: w.identity.slot) if w.rank is None),
            joined=joined,
            last_step=max(steps, default=0),
            events=events,
        )

    def _status(self, limits: Limits, num_joined: int, *, finished: bool) -> tuple[Status, str]:
        """One word, and one line."""
        generation, members, num_awaited = self.present.generation, self.members(), len(self.awaited())
        if finished:
            return "finished", f"finished in generation {generation}"
        if num_awaited:
            of = len(self.present.seats)
            return "regrouping", f"restarted; waiting for {num_awaited} of {of} workers to come back"
        num_silent = sum(w.silent for w in members)
        unheard = f"; {num_silent} of {len(members)} are not heard of" if num_silent else ""
        if members and self.present.regroup_since is None:
            return "training", f"training with {len(members)} workers in generation {generation}{unheard}"
        coming = sum(w.standing is None for w in members)
        if coming:
            return (
                "regrouping",
                f"regrouping after generation {generation}: waiting for {coming} of {len(members)}{unheard}",
            )
        if num_joined < limits.min:
            return "waiting for workers", f"waiting for workers: {num_joined} of {limits.min}"
        if not members and not self.present.vacant and self.present.generation:
            return "forming", f"waiting until nobody of generation {generation} can commit any more"
        return "forming", f"forming: {num_joined} of at most {limits.max} workers have come"

    def _turn_out(self, worker: Worker, refusal: m.Refusal, kind: str, now: float) -> None:
        self.send(worker.identity.id, refusal)
        self.effects.append(Close(worker.identity.id))
        past = refusal if refusal.verdict == "refused" else None
        self.lose(worker, refusal.why, kind, now, commits_until=self.lease_end(worker), past=past)

    def _count_lost(self, who: Identity, rank: int, why: str, now: float) -> None:
        present = self.present
        first = not present.lost
        gone = LostMember(who.id, who.slot, rank, why[:LONGEST_REASON])
        present.lost.append(gone)
        present.over = present.over or f"worker {worker_name(who)} was lost: {why}"
        if present.regroup_since is None:
            present.regroup_since = now
        self.cancel()
        if first:  # it ends the generation
            self.tell(present.lost_peers([gone]))
        else:
            present.untold.append(gone)


class Silence:
    """Members that are silent, and whether the others may go on without them.

    heard       lately. Members do not send their beats at one moment: where it is the server that is cut off, they fall
                silent one after another, and the last beats of the others must not be held against the first
    undecided   neither heard lately nor silent: soon the one or the other

    Silent are all, or were for a while: the server is cut off, and nobody is lost by that. Unless nobody of this
    generation can commit any more, and newcomers wait, or the job is at its end.
    Half of the members, or more, are heard: they may go on at once, for a step takes the data of all, so that one that
    is silent is at most one step ahead. Unless only the silent hold the state; then, and where less than half are
    heard, the silent may still train, and are waited for, each until its lease has ended.

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
