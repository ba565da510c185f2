"""One worker: the real State of a member, with what member.py, ranks.py and loop.py do around it, as events.

Where those block, here a phase is remembered, and `_go_on` looks again at whatever comes:

    joining      has asked for a seat             forming      has one, and waits for its process group
    computing    looks at nothing                 collecting   waits for the data of its peers
    deciding     at a step that it promised       leased       may not commit before the server is heard again
    ended        there is no way back; what it writes in the background still goes on for a while
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from tests.workers.membership.simulator.checkpoints import Checkpoint
from tests.workers.membership.simulator.group import REGROUP, RESUME, Branch, Group
from tests.workers.membership.simulator.link import Link
from tests.workers.membership.simulator.machines import Machine, Process
from thinwire.workers.membership import messages as m
from thinwire.workers.membership.seats import Identity, Seat, Standing
from thinwire.workers.membership.state import State
from thinwire.workers.owed import LEAVE_S

if TYPE_CHECKING:
    from tests.workers.membership.simulator.job import Job

BEAT_S = 1.0
OUTCOME_S = 30.0
"""As in member.py."""
COLLECTIVE_S = 60.0
"""As in ranks.py."""
ANSWER_S = 1.0
"""How long the membership may take to say why a peer's connection ended."""
PROBE_S = 3.0
WAITED_S = 3.0
UNREACHABLE_S = 10.0
AGAIN_S = 5.0
"""As in forming/pairs.py."""


class Worker(Process):
    """A process of the job."""

    def __init__(self, job: Job, machine: Machine, identity: Identity, signature: dict[str, str] | None) -> None:
        super().__init__(machine, f"{identity.id}")
        self._job = job
        self.identity, self.signature = identity, signature
        self.state = State(identity, machine.boottime)
        self.link = Link(job, self)
        self.phase = "starting"
        self.since = 0.0
        self.group: Group | None = None
        self.rank = 0
        self.step = 0
        """Applied; counted once the lease was looked at."""
        self.branch: Branch | None = None
        self.saving: list[Checkpoint] = []
        self.writing = 0
        """Shards of its own that are not written yet."""
        self.seat: Seat | None = None
        self.dies_at_seat = False
        self._seat_generation: int | None = None
        self._next = self._train
        self._era = 0
        self._told: dict[int, str] = {}
        self._unreached: dict[int, float] = {}
        self._tell_at = 0.0
        self.compute_s = job.chance.uniform(0.4, 1.5)
        self.at_death.append(self._left_group)
        self.after(job.chance.uniform(0.0, BEAT_S), "beats", self._beat)
        self.after(job.chance.uniform(0.0, 1.0), "train", self._join)

    @property
    def has_state(self) -> bool:
        return self.branch is not None

    def heard(self) -> None:
        """The state has changed by something that the server said, or by the end of the connection."""
        if self.phase not in ("computing", "starting"):
            self.do("train", self._go_on)

    def leave(self, reason: str) -> None:
        """It has been told to go (member.py, notice)."""
        if self.state.ended is None and self.state.notice is None:
            self.state.notice = reason
            self.link.say(m.Notice(reason=reason))

    # What its group tells it

    def formed(self, group: Group) -> None:
        """All its peers are connected."""
        if self.group is not group or self.phase != "forming":
            return
        self.state.formed = True
        self.link.say(m.Formed(generation=group.generation))
        self._collect(REGROUP, (self.has_state, self.step, self.branch))

    def collected(self, group: Group, number: int, values: dict[int, Any]) -> None:
        """A collective is complete here."""
        if self.group is not group or self.phase != "collecting" or self.state.over is not None:
            return
        if number == REGROUP:
            known = [(step, -rank, branch) for rank, (has, step, branch) in values.items() if has]
            if known:
                self._set_out(*max(known, key=lambda one: one[:2])[::2])
            else:
                self._collect(RESUME, self._job.store.newest_whole() if self.rank == 0 else None)
        elif number == RESUME:
            found: Checkpoint | None = values[0]
            self._set_out(found.step if found else 0, found.branch if found else None)
        elif number == self.step + 1:
            self.step = number
            self._when_leased(self._count)

    def peer_ended(self, group: Group) -> None:
        """The connection to a peer has ended."""
        if self.group is group and self.phase in ("forming", "collecting"):
            era = self._era
            self.after(
                ANSWER_S, "train", lambda: self._lost("its peer's connection ended") if era == self._era else None
            )

    # The loop

    def _join(self) -> None:
        """Ask for a seat in the next generation."""
        self._left_group()
        state, self._era = self.state, self._era + 1
        self._enter("joining")
        last = self._seat_generation
        standing = Standing(last, None if last is None else self.rank, self.step, self.has_state)
        with state.changed:
            known = state.standing
            if state.seat is None or state.handed_out:
                state.standing, state.promise, state.stop_at = standing, None, math.inf
                state.signature, state.floor = self.signature, self._job.store.highest_generation()
            joining = state.join(standing) if state.standing is not None and known != standing else None
        if joining is not None:
            self.link.say(joining)
        self._go_on()

    def _go_on(self) -> None:
        state = self.state
        if self.phase == "ended":
            return
        if state.ended is not None and self.phase != "computing":
            self._end(f"{type(state.ended).__name__}: {state.ended}")
        elif self.phase == "joining" and state.standing is None:
            self._sit()
        elif self.phase in ("forming", "collecting", "leased") and state.over is not None:
            if self.phase != "forming" or self._job.settings.forming_listens:
                self._lost(state.over)
        elif self.phase == "leased" and self.may_commit():
            self._next()
        elif self.phase == "deciding" and not (state.promise is not None and state.promise.undecided):
            self._decide()

    def may_commit(self) -> bool:
        """Does the lease hold?"""
        with self.state.changed:
            return not self._job.settings.leased or self.state.may_commit()

    def _sit(self) -> None:
        seat = self.state.seat
        assert seat is not None
        self.state.handed_out = True
        self.rank, self._seat_generation = seat.rank, seat.generation
        if self.dies_at_seat:
            self._job.say(self.name, "dies between its seat and its group")
            self.kill()
            return
        self._job.store.seated(self, seat)
        self.seat = seat
        self.group = self._job.group(seat)
        self._enter("forming")
        self._told = {}
        self.after(PROBE_S, "train", self._probe)
        self.group.arrive(self, seat.rank)

    def _probe(self) -> None:
        """Say with whom it cannot talk."""
        if self.phase != "forming" or self.group is None:
            return
        found = self.group.unreachable(self.rank)
        if found and found != self._told and self._job.settings.forming_listens:
            self._told = self.state.unreachable = found
            self.link.say(m.Unreachable(generation=self.group.generation, ranks=found))
        self.after(PROBE_S, "train", self._probe)

    def _ask(self) -> None:
        """Once it has waited for long: whom it has not reached for long."""
        now, group = self._job.clockwork.now, self.group
        if self.phase != "collecting" or group is None or now - self.since < WAITED_S:
            self._unreached = {}
            return
        self._unreached = {rank: self._unreached.get(rank, now) for rank in group.unreached(self.rank)}
        broken = {rank: "no answer" for rank, since in self._unreached.items() if now - since >= UNREACHABLE_S}
        if broken and now >= self._tell_at and self._job.settings.forming_listens:
            self.link.say(m.Unreachable(generation=group.generation, ranks=broken))
            self._tell_at = now + AGAIN_S

    def _set_out(self, step: int, branch: Branch | None) -> None:
        """After a regroup: all are at this step."""
        group = self.group
        assert group is not None
        if group.branch is None:
            group.branch = Branch(group, step, branch)
            self._job.laws.started(group, step)
        self.step, self.branch = step, group.branch
        self._at_boundary()

    def _at_boundary(self) -> None:
        with self.state.changed:
            self.state.step = self.step
        if self.step >= self.state.stop_at:
            era = self._era
            self._enter("deciding")
            self.after(OUTCOME_S, "train", lambda: self._decide() if era == self._era else None)
            self._go_on()
        else:
            self._when_leased(self._train)

    def _decide(self) -> None:
        """At a promised step, when the outcome is known or has not come for too long."""
        if self.phase != "deciding":
            return
        promise = self.state.promise
        if promise is not None and promise.confirmed and promise.proposal.step == self.step:
            self._job.laws.stopped(self)
            if promise.proposal.leaving:
                self._say_goodbye()
            else:
                self._join()
        elif promise is not None:
            with self.state.changed:
                self.state.over = self.state.over or f"it was agreed to stop after step {promise.proposal.step}"
            self._lost(self.state.over)
        else:
            self._when_leased(self._train)

    def _when_leased(self, then: Any) -> None:
        """Go on while the generation stands, and once this worker may commit."""
        self._enter("leased")
        self._next = then
        if self.state.over is None and not self.may_commit():
            self._job.say(self.name, f"may not commit at step {self.step}: waits")
        self._go_on()

    def _train(self) -> None:
        self._enter("computing")
        era = self._era
        self.after(self.compute_s, "train", lambda: self._computed() if era == self._era else None)

    def _computed(self) -> None:
        self._enter("collecting")
        self._go_on()
        if self.phase == "collecting":
            self._collect(self.step + 1, None)

    def _collect(self, number: int, value: Any) -> None:
        assert self.group is not None
        self._enter("collecting")
        self.group.send(self.rank, number, value)

    def _count(self) -> None:
        group = self.group
        assert group is not None
        self._job.laws.committed(self, group, self.step)
        if self.step % self._job.settings.save_every == 0:
            self._job.store.save(self, group, self.rank, self.step)
        self._at_boundary()

    def _lost(self, why: str) -> None:
        """PeerLost: as ranks.form() begins."""
        if self.phase in ("ended", "joining"):
            return
        self._era += 1
        self._enter("losing")
        self.after(self._job.chance.uniform(0.01, 0.3), "train", self._join)

    def _say_goodbye(self) -> None:
        self.link.say(m.Goodbye(reason="finished", clean=True))
        self._end("it has left as planned")

    def _end(self, why: str) -> None:
        self._job.say(self.name, f"ends: {why}")
        self._enter("ended")
        self._era += 1
        self.link.stop()
        self._left_group()
        self.after(LEAVE_S if self.saving or self.writing else 0.3, "train", self.kill)

    def _enter(self, phase: str) -> None:
        self.phase, self.since = phase, self._job.clockwork.now

    def _left_group(self) -> None:
        group, self.group = self.group, None
        # gloo keeps the connections of a group of which something still runs; a process that is dead has none.
        if group is not None and (not self.alive or self._job.chance.random() < 0.5):
            group.leave(self.rank)

    def _beat(self) -> None:
        if self.state.ended is not None or self.phase == "ended":
            return
        with self.state.changed:
            beat = self.state.beat()
        self.link.say(beat)
        self._ask()
        if self.phase in ("forming", "collecting") and self._job.clockwork.now - self.since > COLLECTIVE_S:
            self.do("train", lambda: self._lost("a collective took too long"))
        self.after(BEAT_S, "beats", self._beat)
