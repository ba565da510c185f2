"""The ranks that a worker trains with: the group of the present generation, and the next one after that.

FixedRanks     the ranks that Ray Train started together; one that is lost ends them all
ElasticRanks   members of a membership, with a group for each generation (forming/group.py)
BoxRanks       one process of a member that is a box, with a group for each generation (forming/box.py)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from thinwire.comm import TorchGroup
from thinwire.comm.protocol import Group
from thinwire.workers.membership.seats import Change, Seat
from thinwire.workers.whereabouts import Whereabouts

OnWait = Callable[[int, bool], None]
"""Of the last committed step, and whether the wait begins."""


def only_logged(step: int, waits: bool) -> None:
    """For whom the log is enough."""


class RunEnded(Exception):
    """Another worker has ended the run for good: nobody is to go on with it."""


class Box(Protocol):
    """The processes of this worker, which hold the other shards of what it trains, and live and are lost with it.

    rank: of this process among them; size: how many there are. Each trains with those of its rank in other boxes, so
    that one may lose a peer where another does not. They must not part: before any of them calls what all of them take
    part in, as FSDP's forward, they tell one another here whether they have.
    """

    rank: int
    size: int

    def share(self, what: str, text: str = "") -> list[str]:
        """The texts of all, by rank. what: where in its course each is, the same on all. Collective in the box.

        Raises: PeerLost, alike on all, where one of them has lost a peer since the last time.
        """


class Alone:
    """A worker of one process."""

    rank, size = 0, 1

    def share(self, what: str, text: str = "") -> list[str]:
        """Its own."""
        return [text]


class Ranks(Protocol):
    """The ranks that one worker trains with, now and next."""

    box: Box
    """The processes of this worker."""

    @property
    def elastic(self) -> bool:
        """Is there a next generation after a PeerLost?"""

    on_wait: OnWait
    """Called in `look` and `at_boundary` where this worker begins and ends to wait for its right to commit."""

    @property
    def step(self) -> int:
        """The last committed step that form() and at_boundary() were given."""

    where: Whereabouts
    """What this worker's loop is at: the loop says it here."""

    def form(self, step: int, has_state: bool, signature: dict[str, str]) -> Group:
        """Wait for the next generation, and return its group. The group before must be of no more use.

        step, has_state: what this worker brings. signature: what it trains (workers/signature.py).
        Raises: PeerLost, and then call it again; MembershipError where this worker has no place any more; RunEnded.
        """

    def at_boundary(self, step: int) -> Change | None:
        """After each committed step: is it the last of this generation? Else as `look`."""

    def look(self, step: int) -> None:
        """At any time. Waits while this worker may not commit. Raises: PeerLost where a peer was lost, or this one."""

    def may_commit(self) -> bool:
        """May a step count, or a checkpoint become whole? Where not, others may go on without this worker.

        From any thread. Raises: Fenced where they have.
        """

    def leave(self) -> None:
        """End well: the others do not wait for this worker any more."""

    def fail(self, reason: str) -> None:
        """End with an error of this worker's own: the others hear of it at once."""

    @property
    def seat(self) -> Seat | None:
        """The place in the present generation; None where there are none."""


class FixedRanks:
    """One group from first to last."""

    elastic = False
    seat: Seat | None = None

    def __init__(self, group: Group) -> None:
        self.box: Box = Alone()
        self._group = group
        self.on_wait: OnWait = only_logged
        self.where = Whereabouts()
        self.step = 0

    def form(self, step: int, has_state: bool, signature: dict[str, str]) -> Group:
        """The group. All its ranks were started by one driver, from one job file."""
        self.step = step
        return self._group

    def at_boundary(self, step: int) -> Change | None:
        """No."""
        self.step = step
        return None

    def look(self, step: int) -> None:
        """Nothing: collectives find out."""

    def may_commit(self) -> bool:
        """Nobody goes on without this rank."""
        return True

    def leave(self) -> None:
        """Nothing: the process ends."""

    def fail(self, reason: str) -> None:
        """Leave the group, where that can be done."""
        if isinstance(self._group, TorchGroup):
            self._group.leave(reason)
