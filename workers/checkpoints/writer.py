"""Writes a rank's checkpoints while training goes on: a thread that never raises into it and needs no collective."""

from __future__ import annotations

import logging
import math
import queue
import secrets
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass

from thinwire.workers.checkpoints.manifest import CheckpointId, Refusal, ShardRecord
from thinwire.workers.checkpoints.snapshot import Content, Snapshot, Staging
from thinwire.workers.checkpoints.store import AttemptSuperseded, CheckpointStore

logger = logging.getLogger(__name__)

COMMIT_TIMEOUT_S = 60.0
"""How long rank 0 waits for the shards of the others, from when its own is written."""

POLL_S, LONGEST_POLL_S = 0.02, 1.0
PEERS_LOOK_S = 0.1
"""Between two looks at its peers of a rank that waits for a checkpoint."""

Patience = Callable[[Collection[int]], tuple[float, str]]
"""Of the ranks whose parts are missing: until when they are waited for, of time.monotonic, and why no longer. Asked in
the writer's thread, again and again."""


def without_end(missing: Collection[int]) -> tuple[float, str]:
    """A Patience where nobody knows which ranks have gone: commit_timeout_s has to do."""
    return math.inf, ""


class Ticket:
    """What became of one save. On rank 0 it is over when the checkpoint is whole; on another when its shard is there.

    failure: why there is no checkpoint; None where there is, or where it is not over yet. attempt_over: because a newer
    attempt of the job has gone on from the checkpoints: there will be none any more. patience: with the other ranks.
    """

    def __init__(self, which: CheckpointId, rank: int, address: str, mark: int, patience: Patience) -> None:
        self.which, self.rank, self.address, self.mark, self.patience = which, rank, address, mark, patience
        self.failure: str | None = None
        self.attempt_over = False
        self._over = threading.Event()

    @property
    def over(self) -> bool:
        """Has it succeeded or failed?"""
        return self._over.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Wait until it is over; for a checkpoint that must be there before this process leaves. Returns whether."""
        return self._over.wait(timeout_s)

    def _succeed(self) -> None:
        if self.rank == 0:
            logger.info("checkpoint_saved step=%d path=%s", self.which.step, self.address)
        self._over.set()

    def _fail(self, reason: str) -> None:
        if self.over:  # the first reason stands
            return
        logger.error("checkpoint_failed step=%d path=%s reason=%s", self.which.step, self.address, reason)
        self.failure = reason
        self._over.set()


@dataclass(slots=True)
class _Pending:
    """A checkpoint of which rank 0 waits for the answers of all ranks until `deadline`, of time.monotonic."""

    snapshot: Snapshot
    ticket: Ticket
    since: float
    deadline: float
    answers: dict[int, ShardRecord | Refusal]

    @property
    def missing(self) -> list[int]:
        """Ranks that have not answered."""
        return sorted(set(range(self.snapshot.world_size)) - set(self.answers))

    @property
    def refusals(self) -> list[str]:
        """Why there will be no checkpoint."""
        return [answer.refused for answer in self.answers.values() if isinstance(answer, Refusal)]

    @property
    def receipts(self) -> dict[int, ShardRecord]:
        """Of the shards that are there."""
        return {rank: answer for rank, answer in self.answers.items() if isinstance(answer, ShardRecord)}


class Writer:
    """One rank's background thread. It may outlive a change of membership: rank and size come with each save.

    A rank writes one shard at a time. A save while the one before is still being written waits for it, since the memory
    is the same, and since a rank that left one out would leave all ranks without it; where that has not ended within
    commit_timeout_s of its beginning the new one is refused. The manifest is waited for beside.

    may_commit: is this process still one of those that train? Asked before each manifest; where it says no, the
    manifest waits, until it says yes or commit_timeout_s are over. May be called by any thread; what it raises is why
    there will be no checkpoint.
    """

    def __init__(
        self,
        store: CheckpointStore,
        commit_timeout_s: float = COMMIT_TIMEOUT_S,
        may_commit: Callable[[], bool] = lambda: True,
    ) -> None:
        self.store = store
        self._timeout_s = commit_timeout_s
        self._may_commit = may_commit
        self._staging = Staging()
        self._begun_at = 0.0
        self._free = threading.Event()
        self._free.set()
        self._jobs: queue.SimpleQueue[tuple[Snapshot, Ticket] | None] = queue.SimpleQueue()
        self._pending: list[_Pending] = []
        self._tickets: list[Ticket] = []
        self._latest: Ticket | None = None
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    def save(
        self,
        which: CheckpointId,
        rank: int,
        world_size: int,
        content: Content,
        mark: int = 0,
        patience: Patience = without_end,
    ) -> Ticket:
        """Copy this rank's part of `content` and write it in the background. Every rank calls it; not a collective.

        mark: that of rank 0, see mark(). patience: of rank 0, with the others' parts. Returns when the copy is made,
        which waits for the one before until that is given up. A second call for the same checkpoint and mark returns
        the same ticket. Nothing that a disk or a store does is raised: it is in the ticket and in the log, and older
        checkpoints are intact.
        Raises: ValueError for content that no checkpoint can hold.
        """
        latest = self._latest
        if latest is not None and (latest.which, latest.mark) == (which, mark):
            return latest
        ticket = Ticket(which, rank, self.store.address(which), mark, patience)
        in_writing_s = time.monotonic() - self._begun_at
        if not self._free.wait(max(0.0, self._timeout_s - in_writing_s)):
            ticket._fail(f"the one before has been in writing for {time.monotonic() - self._begun_at:.0f} s")
            self._tickets.append(ticket)
            return ticket
        snapshot = Snapshot.take(which, rank, world_size, content, self._staging, mark)
        self._latest, self._begun_at = ticket, time.monotonic()
        self._tickets.append(ticket)
        self._free.clear()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="checkpoint-writer", daemon=True)
            self._thread.start()
        self._jobs.put((snapshot, ticket))
        return ticket

    def mark(self, which: CheckpointId) -> int:
        """What distinguishes the files of a save from those of any other: rank 0 draws it, all ranks save with it.

        A checkpoint that is being saved, or is saved, has the one that it has.
        """
        latest = self._latest
        if latest is not None and latest.which == which and not latest.failure:
            return latest.mark
        return 1 + secrets.randbelow(2**32 - 1)

    def wait_free(self, look: Callable[[], None]) -> None:
        """Wait until save() need not wait, or for commit_timeout_s; look() is called now and then, and may raise."""
        until = time.monotonic() + self._timeout_s
        while not self._free.wait(PEERS_LOOK_S) and time.monotonic() < until:
            look()

    def ended(self) -> list[Ticket]:
        """Those that are over and were not returned before, oldest first: what a loop reports between two steps."""
        ended = [ticket for ticket in self._tickets if ticket.over]
        self._tickets = [ticket for ticket in self._tickets if ticket not in ended]
        return ended

    def wait(self, timeout_s: float) -> bool:
        """Wait until all saves are over. Returns whether they are."""
        deadline = time.monotonic() + timeout_s
        return all(ticket.wait(max(0.0, deadline - time.monotonic())) for ticket in self._tickets)

    def close(self, timeout_s: float) -> bool:
        """Wait until all saves are over, for so long, then give up the rest. Returns whether they were over."""
        over = self.wait(timeout_s)
        self._closed.set()
        self._jobs.put(None)
        if self._thread is not None and over:
            self._thread.join()
        return over

    def _run(self) -> None:
        poll_s = POLL_S
        while not self._closed.is_set():
            with suppress(queue.Empty):
                job = self._jobs.get(timeout=poll_s if self._pending else None)
                poll_s = POLL_S
                if job is not None:
                    self._deliver(*job)
            self._pending = [one for one in self._pending if not self._settle(one)]
            poll_s = min(1.5 * poll_s, LONGEST_POLL_S)
        for one in self._pending:
            self._end(one, "the writer was closed before all ranks had delivered")

    def _deliver(self, snapshot: Snapshot, ticket: Ticket) -> None:
        """Write this rank's shard; on rank 0 begin to wait for the others'."""
        answer: ShardRecord | Refusal
        try:
            answer = self.store.deliver(snapshot)
        except Exception as error:  # noqa: BLE001 - the border of the thread: training goes on, the ticket says it
            answer = Refusal(rank=snapshot.rank, refused=f"rank {snapshot.rank}: {type(error).__name__}: {error}")
        finally:
            self._free.set()
        if snapshot.rank == 0:
            now = time.monotonic()
            self._pending.append(_Pending(snapshot, ticket, now, now + self._timeout_s, {0: answer}))
        elif isinstance(answer, Refusal):
            self._refuse(snapshot, ticket, answer.refused)
        else:
            ticket._succeed()

    def _settle(self, one: _Pending) -> bool:
        """Make a checkpoint whole if all its shards are there, give it up if one never will be. Returns whether."""
        try:
            one.answers.update(self.store.answers(one.snapshot, one.answers))
            if not one.missing:
                if one.refusals:
                    self._end(one, one.refusals[0])
                    return True
                if self._may_commit():
                    others = [other.snapshot.which for other in self._pending]
                    self.store.commit(one.snapshot, one.receipts, others)
                    one.ticket._succeed()
                    return True
        except Exception as error:  # noqa: BLE001 - as in _deliver
            one.ticket.attempt_over = isinstance(error, AttemptSuperseded)
            self._end(one, f"{type(error).__name__}: {error}")
            return True
        if one.refusals:  # reported at once; what there is of it is removed when nobody writes it any more
            one.ticket._fail(one.refusals[0])
        until, why = one.ticket.patience(one.missing)
        if time.monotonic() < min(one.deadline, until):
            return False
        waited_s = time.monotonic() - one.since
        missing = ", ".join(map(str, one.missing))
        if missing:
            reason = why or "a worker that died, or a place that not all workers share"
            self._end(one, f"no shard of rank {missing} within {waited_s:.1f} s: {reason}")
        else:
            self._end(one, f"for {waited_s:.1f} s this worker could not tell whether others go on without it")
        return True

    def _end(self, one: _Pending, reason: str) -> None:
        """On rank 0: no checkpoint will come of it. What nobody writes any more is removed."""
        others = [other.snapshot.which for other in self._pending if other is not one]
        self.store.give_up(one.snapshot, set(one.answers), others)
        one.ticket._fail(reason)

    def _refuse(self, snapshot: Snapshot, ticket: Ticket, reason: str) -> None:
        """On another rank: let rank 0 know."""
        try:
            self.store.refuse(snapshot, reason)
        except OSError as error:
            reason += f" (and then: {error})"
        ticket._fail(reason)
