"""A job whose workers are threads that die, leave and come as a plan says: long sequences of faults in seconds."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tests.workers.small_job import Recording
from thinwire.comm import PeerLost
from thinwire.comm.groups.faults import Fault, FaultyGroup
from thinwire.comm.groups.threads import ThreadGroup
from thinwire.workers import loop
from thinwire.workers.crew import Stop
from thinwire.workers.membership import Dismissed, Fenced
from thinwire.workers.telemetry import history

WAIT_S = 60.0


@dataclass
class Plan:
    """What happens after the steps that are the keys. Values name ranks, modulo the size of the generation.

    kills: where a rank dies, as a fault; None: at the boundary. second: the same rank of the next generation dies in
    the regroup. leaves: ranks that leave as planned. joins: how many newcomers come.
    """

    kills: dict[int, tuple[int, Fault | None]] = field(default_factory=dict)
    second: set[int] = field(default_factory=set)
    leaves: dict[int, int] = field(default_factory=dict)
    joins: dict[int, int] = field(default_factory=dict)


@dataclass
class Seat:
    """Of one worker in one generation, as the loop reads it."""

    generation: int
    rank: int
    members: list[Crew]
    reason: str = "as planned by the test"
    lost: tuple = ()


class Fleet:
    """All workers of the job; `run` gives what they ended with."""

    def __init__(self, run_dir: Path, spec, size: int, plan: Plan):
        self.run_dir, self.spec, self.plan = run_dir, spec, plan
        self.changed = threading.Condition()
        self.generation = 0
        self.done: set[int] = set()
        """Planned changes that were made."""
        self.killed: list[int] = []
        self.attempts: list[tuple[int, int, range]] = []
        """Step, generation and sample numbers of each share that was begun."""
        self.events: list[tuple[str, int, dict]] = []
        self.members = [Crew(self, 0) for _ in range(size)]
        self.newcomers = [Crew(self, step) for step, count in sorted(plan.joins.items()) for _ in range(count)]
        self.ended: dict[Crew, torch.Tensor] = {}
        self.errors: list[BaseException] = []

    def run(self, monkeypatch):
        plain = loop.train_step

        def recorded(training, step, meter):
            group = training.group
            numbers = training.batches.order.numbers(step, group.rank, group.size)
            self.attempts.append((step, group.generation, numbers))
            return plain(training, step, meter)

        monkeypatch.setattr(loop, "train_step", recorded)
        threads = [
            threading.Thread(target=self._work, args=(crew,), daemon=True) for crew in self.members + self.newcomers
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(5 * WAIT_S)
        assert not self.errors, self.errors
        assert not any(thread.is_alive() for thread in threads), "a worker waits for ever"
        return self

    def _work(self, crew):
        reporter = Telling(self.run_dir, self.events)
        course = loop.Course(self.spec, loop.Run(self.run_dir, time.time()), crew, torch.device("cpu"), reporter)
        try:
            while True:
                try:
                    course.join()
                    course.run()
                    course.finish()
                    self.ended[crew] = course.training.optimizer.space.p_N
                    return
                except PeerLost:
                    continue
        except (Dismissed, Fenced):
            return
        except BaseException as error:  # noqa: BLE001 - told to the test
            self.errors.append(error)
            crew.die()
        finally:
            course.close(30.0)

    # Under `changed`

    def can_spare_one(self):
        return sum(crew.alive and not crew.doomed for crew in self.members) > 1

    def close_if_all_are_here(self):
        living = [crew for crew in self.members if crew.alive]
        if not living or any(crew.standing is None for crew in living):
            return
        step = max(crew.standing[0] for crew in living)
        due = [crew for crew in self.newcomers if crew.comes_after <= step]
        if any(crew.standing is None for crew in due):
            return
        self.newcomers = [crew for crew in self.newcomers if crew not in due]
        seated = sorted(living, key=lambda crew: (not crew.standing[1], crew.seat.rank if crew.seat else 0)) + due
        self.done |= {at for at in (*self.plan.leaves, *self.plan.joins) if at <= step}
        self.generation += 1
        self.members = seated
        for rank, (crew, group) in enumerate(zip(seated, ThreadGroup.create(len(seated), WAIT_S), strict=True)):
            crew.seat, crew.standing = Seat(self.generation, rank, seated), None
            crew.group = FaultyGroup(group)
            crew.group.generation = self.generation
        if self.killed and self.killed[-1] in self.plan.second and self.can_spare_one():
            self.plan.second.discard(self.killed[-1])
            victim = next(crew for crew in seated if not crew.doomed)
            victim.doomed = True
            victim.group.arm(Fault((victim.seat.rank,), "sum", 0))
        self.changed.notify_all()


class Crew:
    """A worker of the fleet. A thinwire.workers.crew.Crew."""

    elastic = True

    def __init__(self, fleet: Fleet, comes_after: int):
        self.fleet, self.comes_after = fleet, comes_after
        self.alive, self.doomed = True, False
        self.standing: tuple[int, bool] | None = None
        self.seat: Seat | None = None
        self.group: FaultyGroup | None = None

    def form(self, step, has_state):
        fleet = self.fleet
        with fleet.changed:
            if self.doomed:
                self.die()
                raise Fenced("dead")
            before = self.seat
            self.standing = step, has_state
            fleet.close_if_all_are_here()
            assert fleet.changed.wait_for(lambda: self.seat is not before, WAIT_S), "nobody closes the generation"
            return self.group

    def at_boundary(self, step):
        fleet, size = self.fleet, self.group.size
        if step in fleet.plan.kills and step not in fleet.killed:
            rank, fault = fleet.plan.kills[step]
            with fleet.changed:
                struck = rank % size == self.group.rank and not self.doomed and fleet.can_spare_one()
                self.doomed = self.doomed or struck
            if struck:
                fleet.killed.append(step)
                if fault is None:
                    self.group.leave("killed at a boundary")
                    self.die()
                    raise Fenced("dead")
                self.group.arm(Fault((self.group.rank,), fault.collective, fault.call, fault.when))
        self.look(step)
        due = step in fleet.plan.leaves or step in fleet.plan.joins
        if not due or step in fleet.done:
            return None
        leaving = step in fleet.plan.leaves and fleet.plan.leaves[step] % size == self.group.rank and size > 1
        return Stop(leaving, "as planned by the test")

    def look(self, step):
        if self.group._group._meeting.barrier.broken:
            raise PeerLost("a peer has died")

    def leave(self):
        self.die()

    def fail(self, reason):
        self.die()

    def die(self):
        with self.fleet.changed:
            self.alive = False
            self.fleet.close_if_all_are_here()


class Telling(Recording):
    """Writes history where it is rank 0, and keeps the events of rank 0."""

    def __init__(self, run_dir, events):
        super().__init__(run_dir, -1)
        self._run_dir, self._told, self._rank = run_dir, events, None

    def seated(self, group, device):
        self._rank = group.rank
        if group.rank == 0 and self._history is None:
            self._history = history.History(self._run_dir / history.FILE_NAME)

    def went_back(self, step):
        super().went_back(step)
        if self._history is not None and self._rank == 0:
            self._history.truncate_after(step)

    def event(self, kind, step, **fields):
        if self._rank == 0:
            self._told.append((kind, step, fields))


def retained(fleet: Fleet) -> dict[int, Counter]:
    """How often each sample number of a step was used in the generation whose result stays: the last that began it."""
    last: dict[int, int] = {}
    for step, generation, _ in fleet.attempts:
        last[step] = max(generation, last.get(step, 0))
    found: dict[int, Counter] = {step: Counter() for step in last}
    for step, generation, numbers in fleet.attempts:
        if generation == last[step]:
            found[step].update(numbers)
    return found
