"""What must hold, whatever happens. Each is looked at at every event that could break it.

1  one generation commits at a time: once a step of a later generation has been counted, an earlier one counts at most
   the step that was running, for which all its members that are in the later one had sent their data; and nothing at
   all where there is none of them
2  committed steps never go back while a holder of them lives. Excluded: a holder that the server has not heard for
   SILENT_S (ADOPT_S after its restart), or has left out for a fault that touched it, holds at most the one step that
   was running more than the others; and one that it has not heard for longer than a lease, by either clock, may hold
   any number
3  every living worker that is connected is seated, waits for a reason that has a name, or has been told why not; looked
   at when the network is whole again and CALM_S have passed
4  when faults stop and the network is whole, the job commits again within CALM_S
5  nobody is counted out but for a fault that touched its machine within TOUCH_S, or because it cannot talk to a peer,
   when one cut the two off. A fault of the server's machine alone touches no worker; but one that cuts only one
   direction touches those whose connection must be made anew then, while that of others lasts. Who is to train
   something else is refused, and nobody else for that
6  a resume never chooses a checkpoint that is older than another whole one of the history that goes on, or of an
   earlier generation than one; and nobody removes a checkpoint of a later generation than its own, or the one that a
   resume would choose
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.workers.membership.simulator.checkpoints import Checkpoint
from tests.workers.membership.simulator.group import Branch, Group
from thinwire.workers.membership import messages as m
from thinwire.workers.membership.commit_lease import LEASE_S

if TYPE_CHECKING:
    from tests.workers.membership.simulator.job import Job
    from tests.workers.membership.simulator.worker import Worker

SILENT_S = 10.0
ADOPT_S = 5.0
TOUCH_S = 90.0
CALM_S = 240.0
SLOWEST = 0.96
"""The rate of the slowest clock against the fastest: a lease may end so much earlier for the server."""


class Broken(Exception):
    """A law was broken."""


class Laws:
    """Watches one job. Raises: Broken."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._heard_at: dict[str, float] = {}
        self._seats: dict[int, tuple[str, ...]] = {}
        self._justly_out: dict[str, bool] = {}
        self._stops: dict[tuple[int, int], int] = {}
        self.head: tuple[Branch, int] | None = None
        """The last commit of the history that goes on."""
        self.latest: Group | None = None
        """The latest generation that has committed."""
        self.commits = 0
        self.committed_at = 0.0

    def server_heard(self, id: str) -> None:
        """The server has heard a worker."""
        self._heard_at[id] = self._job.clockwork.now

    def all_silent_s(self) -> dict[str, float]:
        """For how long the server has not heard each worker."""
        return {id: self._job.clockwork.now - at for id, at in self._heard_at.items()}

    def seated(self, seating: m.Seating, id: str) -> None:
        """The server seats a worker. By what crosses the wire it has the same seat: of many, some are tried."""
        seat, state = seating.seat, self._job.workers[id].state
        tried = seat.rank % (1 + seat.size // 20) == 0
        if tried and seating.change is not None and (state.seat is None or seat.generation > state.seat.generation):
            told = m.from_server.validate_json(m.encoded(seating))
            assert isinstance(told, m.Seating)
            if told.seat_after(state.seat) != seat:
                self._break(1, f"{id} is told another seat than it has: {told}, {seat}")
        ids = tuple(member.identity.id for member in seat.members)
        if self._seats.setdefault(seat.generation, ids) != ids:
            self._break(1, f"two generations have the number {seat.generation}: {self._seats[seat.generation]}, {ids}")
        if ids[seat.rank] != id:
            self._break(1, f"{id} was given the seat of {ids[seat.rank]}")
        signatures = [self._job.workers[one].signature for one in ids]
        if self._job.signature not in signatures:  # nobody was there who knew better
            self._job.signature = signatures[0]
        if any(signature != signatures[0] for signature in signatures):
            self._break(5, f"members of generation {seat.generation} are to train different things: {signatures}")
        self._job.group(seat)

    def started(self, group: Group, step: int) -> None:
        """A generation begins at this step (law 2)."""
        self._job.say(f"generation {group.generation}", f"begins after step {step}")
        if self.head is None or self._on_head(group.branch, step):
            return
        if self.latest is not None and group.generation < self.latest.generation:
            return  # it can commit nothing any more (law 1)
        branch, reached = self.head
        assert group.branch is not None
        kept = max((at for at in range(step + 1) if group.branch.contains(branch, at, step)), default=0)
        if group.branch.parent is None and step == 0:
            kept = 0
        for worker in self._job.workers.values():
            if not worker.alive or worker.phase == "ended" or worker.branch is not branch or worker.step <= kept:
                continue
            silent_s = group.silent_s.get(worker.identity.id, 0.0)
            running = min(worker.step, reached) - kept <= 1
            restarted = silent_s > group.seated_at - self._job.server_since
            needed_s = (ADOPT_S if restarted else SILENT_S) if running else LEASE_S
            if running and worker.identity.id in self._justly_out:
                continue
            if silent_s < needed_s * SLOWEST:
                self._break(
                    2,
                    f"generation {group.generation} begins after step {step}, {worker.name} lives and holds step "
                    f"{worker.step}, and was not heard for only {silent_s:.1f} s when it was seated",
                )

    def committed(self, worker: Worker, group: Group, step: int) -> None:
        """A worker counts a step (law 1)."""
        latest = self.latest
        if latest is not None and group.generation < latest.generation:
            allowed = group.running or 0
            if step > allowed:
                self._break(
                    1,
                    f"{worker.name} counts step {step} of generation {group.generation}, and generation "
                    f"{latest.generation} has committed; of the former only step {allowed} was running",
                )
            return
        if latest is None or group.generation > latest.generation:
            self.latest = group
            self._job.say(worker.name, f"first commit of generation {group.generation}: step {step}")
        if self.head is None or self.head[0] is not group.branch or step > self.head[1]:
            assert group.branch is not None
            self.head = (group.branch, step)
        self.commits, self.committed_at = self.commits + 1, self._job.clockwork.now

    def stopped(self, worker: Worker) -> None:
        """A worker has stopped where all were to stop: all at one step."""
        promise, group = worker.state.promise, worker.group
        if promise is not None and group is not None:
            key = (group.generation, promise.proposal.number)
            if self._stops.setdefault(key, worker.step) != worker.step:
                self._break(1, f"{worker.name} stops after step {worker.step}, another after {self._stops[key]}")

    def told(self, id: str, refusal: m.Refusal) -> None:
        """The server tells a worker that there is no way back (law 5)."""
        worker, why = self._job.workers[id], refusal.why
        if not worker.alive or worker.phase == "ended" or refusal.verdict == "dismissed":
            return
        if refusal.verdict == "refused":
            rightful = [one for one in self._job.workers.values() if one.alive and one.signature == self._job.signature]
            if "something else" in why and worker in rightful and any(one.has_state for one in rightful):
                self._break(5, f"{worker.name} was refused, and its signature is right: {why}")
            return
        if worker.signature != self._job.signature or id in self._justly_out:
            return
        if not self._was_touched(worker, why):
            self._break(5, f"{worker.name} was fenced, and no fault had touched it: {why}")

    def counted_out(self, id: str, why: str) -> None:
        """The server has decided so, and the worker may learn it much later."""
        worker = self._job.workers.get(id)
        if worker is not None and self._was_touched(worker, why):
            self._justly_out[id] = True

    def _was_touched(self, worker: Worker, why: str) -> bool:
        touched = self._job.touched.get(worker.machine.name, -TOUCH_S)
        if "cannot reach" in why:
            touched = max(touched, self._job.touched_pairs.get(worker.machine.name, -TOUCH_S))
        return self._job.clockwork.now - touched <= TOUCH_S

    def whole(self, one: Checkpoint) -> None:
        """A checkpoint has become whole (law 6)."""
        self._choice()

    def removing(self, worker: Worker, one: Checkpoint) -> None:
        """A worker is about to remove a checkpoint (law 6)."""
        own = max((group.generation for group in self._job.groups_of(worker)), default=0)
        if one.group.generation > own:
            self._break(6, f"{worker.name} of generation {own} removes the checkpoint of {one}")
        if one.whole and one is self._job.store.newest_whole():
            self._break(6, f"{worker.name} removes the checkpoint that a resume would choose: {one}")

    def _choice(self) -> None:
        chosen = self._job.store.newest_whole()
        if chosen is None or self.head is None:
            return
        branch, step = self.head
        ours = [one for one in self._job.store.all() if one.whole and branch.contains(one.branch, one.step, step)]
        for one in ours:
            if one.step > chosen.step if chosen in ours else one.group.generation > chosen.group.generation:
                self._break(6, f"a resume would choose {chosen}, and the history that goes on has {one}")

    def _on_head(self, branch: Branch | None, step: int) -> bool:
        """Does the history that goes on pass this state, or the other way round?"""
        if self.head is None or branch is None:
            return True
        ours, reached = self.head
        return ours.contains(branch, step, reached) or branch.contains(ours, reached, step)

    def calm(self) -> str | None:
        """With the network whole: what is not as it should be (laws 3 and 4); None where all is."""
        job, server = self._job, self._job.server
        if server is None or not server.alive:
            return "there is no server"
        snapshot = server.rules.snapshot(0)
        living = [worker for worker in job.workers.values() if worker.alive and worker.phase != "ended"]
        if job.clockwork.now - self.committed_at > 5.0 or self.latest is None:
            return f"nothing was committed since {self.committed_at:.1f}: {snapshot.status_text}"
        if self.latest.generation != snapshot.generation:
            return f"generation {self.latest.generation} commits, the server is at {snapshot.generation}"
        seated = set(self.latest.ids)
        waiting = [worker for worker in living if worker.identity.id not in seated]
        if waiting and len(seated) < job.limits.max:
            return f"{', '.join(one.name for one in waiting)} wait, and {len(seated)} of {job.limits.max} train"
        if len(living) < job.limits.max:
            return f"{len(living)} of {job.limits.max} workers are there"
        return None

    def still_broken(self, what: str) -> None:
        """CALM_S have passed."""
        law = 4 if self._job.clockwork.now - self.committed_at > CALM_S / 2 else 3
        waiting = [
            f"{worker.name} {worker.phase} since {worker.since:.1f}, at step {worker.step}"
            for worker in self._job.workers.values()
            if worker.alive
        ]
        self._break(law, f"{CALM_S:g} s after the last fault: {what}. {'; '.join(waiting)}")

    def _break(self, law: int, what: str) -> None:
        self._job.say("LAW BROKEN", f"({law}) {what}")
        raise Broken(f"law {law}: {what}")
