"""A job whose workers are threads that die, leave and come as a plan says: long sequences of faults in seconds."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tests.workers.small_job import Recording
from thinwire.comm import PeerLost, SoloGroup
from thinwire.comm.groups.faults import Fault, FaultyGroup
from thinwire.comm.groups.threads import ThreadGroup
from thinwire.contract.spec import Checkpoint, TrainSpec
from thinwire.optim.kernels.compiled import compile_all
from thinwire.train import session
from thinwire.workers.data.feed import own_part
from thinwire.workers.membership.seats import Change, Identity
from thinwire.workers.membership.state import Fenced
from thinwire.workers.ranks import Alone
from thinwire.workers.recipes import recipe_of
from thinwire.workers.session.body import Bodies
from thinwire.workers.session.job import train
from thinwire.workers.session.session import placed
from thinwire.workers.session.training import Left, Run, Surroundings
from thinwire.workers.whereabouts import Whereabouts

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
    """All workers of the job; `run` gives what they ended with.

    script: called by each worker as a job's worker runs one, with the job and the worker. spec: of a job with a
    built-in recipe, in place of a script, which ends with its parameters.
    """

    def __init__(
        self,
        run_dir: Path,
        script: Callable | None,
        size: int,
        plan: Plan | None = None,
        *,
        checkpoint: dict | None = None,
        spec: TrainSpec | None = None,
    ):
        self.run_dir, self.script, self.spec, self.plan = run_dir, script or trained, spec, plan or Plan()
        self.checkpoint = Checkpoint(**checkpoint) if checkpoint else spec and spec.checkpoint
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
        joins = sorted(self.plan.joins.items())
        self.newcomers = [Worker(self, step) for step, count in joins for _ in range(count)]
        self.ended: dict[Worker, torch.Tensor] = {}
        self.errors: list[BaseException] = []
        self.workers = threading.local()

    def run(self, monkeypatch, tolerate=()):
        """tolerate: errors that workers may end with while the others go on."""
        compile_all(torch.float32)  # by all threads at once it would take long, and some would wait for the others
        if self.spec is not None:
            monkeypatch.setattr(Bodies, "open", self._noting(Bodies.open))
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

    @property
    def here(self) -> Worker:
        """The worker whose thread this is."""
        return self.workers.here

    def _noting(self, plain):
        @contextmanager
        def opened(bodies, share):
            group, batch = self.here.group, self.spec.global_batch
            first, (mine, _) = (share.step - 1) * batch, own_part(batch, group.rank, group.size)
            numbers = range(first + mine.start, first + mine.stop)
            self.attempts.append((share.step, group.generation, numbers))
            with plain(bodies, share):
                yield

        return opened

    def _work(self, worker):
        self.workers.here = worker
        cpu, run = torch.device("cpu"), Run(self.run_dir, time.time())
        start = self.spec and self.spec.start
        reporter = Telling(self.run_dir, self.events)
        place = Surroundings(worker, cpu, run, reporter, self.checkpoint, SoloGroup(), self.spec, start)
        try:
            with placed(place):
                self.ended[worker] = self.script(self, worker)
        except Left:
            return
        except BaseException as error:  # noqa: BLE001 - told to the test
            self.errors.append(error)
            worker.die()

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
    box = Alone()

    def __init__(self, job: ThreadsJob, comes_after: int):
        self.job, self.comes_after = job, comes_after
        slot = next(job.made)
        self.identity = Identity(f"id{slot}", slot, "host", 1)
        self.alive, self.doomed = True, False
        self.standing: tuple[int, bool] | None = None
        self.seat: Seat | None = None
        self.group: FaultyGroup | None = None
        self.where = Whereabouts()

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
        return Change(step, leaving, "as planned by the test")

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


def trained(job: ThreadsJob, worker: Worker) -> torch.Tensor:
    """What a worker of a job with a built-in recipe runs: the parameters at its end."""
    with session() as run:
        train(recipe_of(job.spec), run)
        return run._optimizer.space.p_N


def after_each_step(monkeypatch, look: Callable) -> None:
    """Call look(step, optimizer) when a body has made its step, before it counts."""
    close = Bodies.close

    def closed(bodies):
        step = bodies._open.share.step
        made = close(bodies)
        look(step, bodies._optimizers[0])
        return made

    monkeypatch.setattr(Bodies, "close", closed)


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
