"""A job whose workers are threads that die, leave and come as a plan says: long sequences of faults in seconds."""

from __future__ import annotations

import itertools
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
from thinwire.optim.kernels.compiled import compile_all
from thinwire.workers import loop
from thinwire.workers.membership import Dismissed, Fenced, Identity
from thinwire.workers.ranks import Stop

WAIT_S = 200.0
"""For whoever does not come; long, for on a busy machine all these threads take turns."""


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
    members: list[Worker]
    reason: str = "as planned by the test"
    lost: tuple = ()
    furthest: int = 0


class ThreadsJob:
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
        self.made = itertools.count()
        self.members = [Worker(self, 0) for _ in range(size)]
        self.newcomers = [Worker(self, step) for step, count in sorted(plan.joins.items()) for _ in range(count)]
        self.ended: dict[Worker, torch.Tensor] = {}
        self.errors: list[BaseException] = []

    def run(self, monkeypatch, tolerate=()):
        """tolerate: errors that workers may end with while the others go on."""
        compile_all(torch.float32)  # by all threads at once it would take long, and some would wait for the others
        plain = loop.train_step

        def recorded(training, step, meter):
            group = training.group
            numbers = training.feed.numbers(step, group.rank, group.size)
            self.attempts.append((step, group.generation, numbers))
            return plain(training, step, meter)

        monkeypatch.setattr(loop, "train_step", recorded)
        threads = [
            threading.Thread(target=self._work, args=(worker,), daemon=True) for worker in self.members + self.newcomers
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(1.4 * WAIT_S)
        assert all(isinstance(error, tolerate) for error in self.errors), self.errors
        assert not any(thread.is_alive() for thread in threads), "a worker waits for ever"
        return self

    def _work(self, worker):
        reporter = Telling(self.run_dir, self.events)
        course = loop.Course(self.spec, loop.Run(self.run_dir, time.time()), worker, torch.device("cpu"), reporter)
        try:
            while True:
                try:
                    course.train()
                    course.finish()
                    self.ended[worker] = course.training.optimizer.space.p_N
                    return
                except PeerLost:
                    continue
        except (Dismissed, Fenced):
            return
        except BaseException as error:  # noqa: BLE001 - told to the test
            self.errors.append(error)
            worker.die()
        finally:
            course.close(30.0)

    # Under `changed`

    def can_spare_one(self):
        return sum(worker.alive and not worker.doomed for worker in self.members) > 1

    def close_if_all_are_here(self):
        living = [worker for worker in self.members if worker.alive]
        if not living or any(worker.standing is None for worker in living):
            return
        step = max(worker.standing[0] for worker in living)
        due = [worker for worker in self.newcomers if worker.comes_after <= step]
        if any(worker.standing is None for worker in due):
            return
        self.newcomers = [worker for worker in self.newcomers if worker not in due]
        seated = (
            sorted(living, key=lambda worker: (not worker.standing[1], worker.seat.rank if worker.seat else 0)) + due
        )
        self.done |= {at for at in (*self.plan.leaves, *self.plan.joins) if at <= step}
        self.generation += 1
        self.members = seated
        for rank, (worker, group) in enumerate(zip(seated, ThreadGroup.create(len(seated), WAIT_S), strict=True)):
            worker.seat, worker.standing = Seat(self.generation, rank, seated), None
            worker.group = FaultyGroup(group)
            worker.group.generation = self.generation
        if self.killed and self.killed[-1] in self.plan.second and self.can_spare_one():
            self.plan.second.discard(self.killed[-1])
            victim = next(worker for worker in seated if not worker.doomed)
            victim.doomed = True
            victim.group.arm(Fault((victim.seat.rank,), "sum", 0))
        self.changed.notify_all()


class Worker:
    """A worker of the job, as its loop sees it: a thinwire.workers.ranks.Ranks."""

    elastic = True

    def __init__(self, job: ThreadsJob, comes_after: int):
        self.job, self.comes_after = job, comes_after
        slot = next(job.made)
        self.identity = Identity(f"id{slot}", slot, "host", 1)
        self.alive, self.doomed = True, False
        self.standing: tuple[int, bool] | None = None
        self.seat: Seat | None = None
        self.group: FaultyGroup | None = None

    def form(self, step, has_state, signature):
        job = self.job
        with job.changed:
            if self.doomed:
                self.die()
                raise Fenced("dead")
            before = self.seat
            self.standing = step, has_state
            job.close_if_all_are_here()
            assert job.changed.wait_for(lambda: self.seat is not before, WAIT_S), "nobody closes the generation"
            return self.group

    def at_boundary(self, step):
        job, size = self.job, self.group.size
        if step in job.plan.kills and step not in job.killed:
            rank, fault = job.plan.kills[step]
            with job.changed:
                struck = rank % size == self.group.rank and not self.doomed and job.can_spare_one()
                self.doomed = self.doomed or struck
            if struck:
                job.killed.append(step)
                if fault is None:
                    self.group.leave("killed at a boundary")
                    self.die()
                    raise Fenced("dead")
                self.group.arm(Fault((self.group.rank,), fault.collective, fault.call, fault.when))
        self.look(step)
        due = step in job.plan.leaves or step in job.plan.joins
        if not due or step in job.done:
            return None
        leaving = step in job.plan.leaves and job.plan.leaves[step] % size == self.group.rank and size > 1
        return Stop(leaving, "as planned by the test")

    def look(self, step):
        if self.group._group._meeting.barrier.broken:
            raise PeerLost("a peer has died")

    def may_commit(self):
        return True

    def leave(self):
        self.die()

    def fail(self, reason):
        self.die()

    def die(self):
        with self.job.changed:
            self.alive = False
            self.job.close_if_all_are_here()


class Telling(Recording):
    """Keeps the events of rank 0."""

    def __init__(self, run_dir, events):
        super().__init__(run_dir)
        self._told, self._rank = events, None

    def seated(self, group, device):
        super().seated(group, device)
        self._rank = group.rank

    def event(self, kind, step, **fields):
        if self._rank == 0:
            self._told.append((kind, step, fields))


def retained(job: ThreadsJob) -> dict[int, Counter]:
    """How often each sample number of a step was used in the generation whose result stays: the last that began it."""
    last: dict[int, int] = {}
    for step, generation, _ in job.attempts:
        last[step] = max(generation, last.get(step, 0))
    found: dict[int, Counter] = {step: Counter() for step in last}
    for step, generation, numbers in job.attempts:
        if generation == last[step]:
            found[step].update(numbers)
    return found
