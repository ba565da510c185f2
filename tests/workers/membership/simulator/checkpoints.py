"""The checkpoint store of the job: a model of workers/checkpoints and saving.py, in the order of what happens there.

Each rank writes its shard in the background; rank 0 waits for all, writes the manifest, and removes what is old. Whose
part it does not wait for any more the real Owed tells it (workers/owed.py), which is told of each seat and asks whether
a process that has left has ended. A write that has begun may land later than anything else, also after the death of who
began it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.workers.membership.simulator.group import Branch, Group
from thinwire.workers.checkpoints.writer import COMMIT_TIMEOUT_S
from thinwire.workers.membership.seats import Seat
from thinwire.workers.owed import Owed

if TYPE_CHECKING:
    from tests.workers.membership.simulator.job import Job
    from tests.workers.membership.simulator.worker import Worker

KEEP = 2


@dataclass(eq=False)
class Checkpoint:
    """Of one step of one group. deadline, owed: of rank 0, which waits for the others from when its own is written."""

    group: Group
    branch: Branch
    step: int
    shards: set[int] = field(default_factory=set)
    whole: bool = False
    removed: bool = False
    deadline: float = float("inf")
    owed: Owed | None = None

    @property
    def order(self) -> tuple[int, int]:
        """By what it is compared: token and step."""
        return (self.group.token or 0, self.step)

    def __str__(self) -> str:
        return f"step {self.step} of generation {self.group.generation} (token {self.group.token})"


class Store:
    """Where all workers write. It is always there; a write takes up to delay_s."""

    def __init__(self, job: Job, delay_s: float) -> None:
        self._job = job
        self.delay_s = delay_s
        self._all: dict[tuple[int, int], Checkpoint] = {}

    def highest_generation(self) -> int:
        """That anything here tells of."""
        return max((one.group.generation for one in self.all()), default=0)

    def all(self) -> list[Checkpoint]:
        """What can be seen, oldest first."""
        there = [one for one in self._all.values() if not one.removed and (one.shards or one.whole)]
        return sorted(there, key=lambda one: one.order)

    def newest_whole(self) -> Checkpoint | None:
        """From which a job would resume."""
        return max((one for one in self._all.values() if one.whole), key=lambda one: one.order, default=None)

    def save(self, worker: Worker, group: Group, rank: int, step: int) -> None:
        """A rank begins to write."""
        key = (id(group), step)
        one = self._all.get(key)
        if one is None or one.removed:
            assert group.branch is not None
            one = self._all[key] = Checkpoint(group, group.branch, step)
        if rank == 0:
            if group.token is None:
                group.token = self._job.settings.token(self, worker, group)
            assert worker.seat is not None
            one.owed = Owed(
                worker.seat,
                clock=lambda: self._job.clockwork.now,
                has_ended=lambda _, port: self._job.nobody_listens(worker, port),
            )
            worker.saving.append(one)
        worker.writing += 1
        worker.after(self._job.chance.uniform(0.05, self.delay_s), "writer", lambda: self._written(worker, one, rank))
        if rank == 0:
            worker.after(0.5, "writer", lambda: self._settle(worker, one))

    def seated(self, worker: Worker, seat: Seat) -> None:
        """As Saving.seated: whoever is not of this generation gives no part of those before."""
        for one in worker.saving:
            assert one.owed is not None
            one.owed.seated(seat)

    def _written(self, worker: Worker, one: Checkpoint, rank: int) -> None:
        worker.writing -= 1
        if rank == 0:
            one.deadline = self._job.clockwork.now + COMMIT_TIMEOUT_S
        if not one.removed:
            one.shards.add(rank)

    def _settle(self, worker: Worker, one: Checkpoint) -> None:
        """Rank 0 looks whether all shards are there."""
        if one.removed or one not in worker.saving:
            return
        whole = len(one.shards) == one.group.size
        if whole and self._job.settings.may_save(worker, one):
            late = self._job.chance.random() < 0.1
            delay_s = self._job.chance.uniform(0.02, 60.0 if late else self.delay_s)
            self._job.clockwork.after(delay_s, lambda: self._landed(worker, one))
            return
        assert one.owed is not None
        until, why = one.owed.patience(set(range(one.group.size)) - one.shards)
        if self._job.clockwork.now < min(one.deadline, until):
            worker.after(0.5, "writer", lambda: self._settle(worker, one))
            return
        self._job.say(worker.name, f"gives up the checkpoint of {one}: {why or 'it took too long'}")
        worker.saving.remove(one)
        self._remove(worker, one)

    def _landed(self, worker: Worker, one: Checkpoint) -> None:
        if one.removed or (not worker.alive and self._job.chance.random() < 0.5):
            return
        one.whole = True
        self._job.say(worker.name, f"checkpoint whole: {one}")
        self._job.laws.whole(one)
        worker.do("writer", lambda: self._saved(worker, one))

    def _saved(self, worker: Worker, one: Checkpoint) -> None:
        if one in worker.saving:
            worker.saving.remove(one)
        self._prune(worker, one)

    def _prune(self, worker: Worker, newest: Checkpoint) -> None:
        """As CheckpointStore._prune."""
        kept, earliest = 0, float("inf")
        for one in reversed(self.all()):
            if kept < KEEP and one.step < earliest and one.whole:
                kept, earliest = kept + 1, one.step
                continue
            is_old = kept == KEEP or one.step >= earliest
            if (is_old or not one.whole) and one.order < newest.order and one not in worker.saving:
                self._remove(worker, one)

    def _remove(self, worker: Worker, one: Checkpoint) -> None:
        if one.whole:
            self._job.say(worker.name, f"removes the checkpoint of {one}")
        self._job.laws.removing(worker, one)
        one.removed, one.whole = True, False
