"""The checkpoint store of the job: a model of workers/checkpoints and saving.py, in the order of what happens there.

Each rank writes its shard in the background; rank 0 waits for all, writes the manifest, and removes what is old. A
write that has begun may land later than anything else, also after the death of who began it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.workers.membership.simulator.group import Branch, Group

if TYPE_CHECKING:
    from tests.workers.membership.simulator.job import Job
    from tests.workers.membership.simulator.worker import Worker

KEEP = 2
COMMIT_S = 60.0
BROKEN_S = 5.0


@dataclass(eq=False)
class Checkpoint:
    """Of one step of one group."""

    group: Group
    branch: Branch
    step: int
    shards: set[int] = field(default_factory=set)
    whole: bool = False
    removed: bool = False
    deadline: float = float("inf")

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
            one.deadline = self._job.clockwork.now + COMMIT_S
            worker.saving.append(one)
        worker.after(self._job.chance.uniform(0.05, self.delay_s), "writer", lambda: self._written(worker, one, rank))
        if rank == 0:
            worker.after(0.5, "writer", lambda: self._settle(worker, one))

    def hurry(self, worker: Worker) -> None:
        """A worker was lost: what lacks its part is soon given up."""
        for one in worker.saving:
            one.deadline = min(one.deadline, self._job.clockwork.now + BROKEN_S)

    def _written(self, worker: Worker, one: Checkpoint, rank: int) -> None:
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
        if self._job.clockwork.now < one.deadline:
            worker.after(0.5, "writer", lambda: self._settle(worker, one))
            return
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
