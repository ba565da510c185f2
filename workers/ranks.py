"""The ranks that a worker trains with: the group of the present generation, and the next one after that.

    FixedRanks     the ranks that Ray Train started together; one that is lost ends them all
    ElasticRanks   members of a membership (workers/membership): who is lost is replaced, and who is left goes on

A new group is made for each generation (forming/).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from thinwire.comm import SoloGroup, TorchGroup
from thinwire.comm.protocol import Group
from thinwire.workers.forming.detector import MembershipDetector
from thinwire.workers.forming.door import Door
from thinwire.workers.forming.group import close_group, form_group
from thinwire.workers.forming.pairs import Patience
from thinwire.workers.forming.reach import Reach, Times
from thinwire.workers.membership import Fenced, JoinTimeout, Member, Seat, Standing
from thinwire.workers.whereabouts import Whereabouts

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""How often a worker that waits for its seat looks whether the run has been ended meanwhile."""


OnWait = Callable[[int, bool], None]
"""Of the last committed step, and whether the wait begins."""


def nobody_asks(step: int, waits: bool) -> None:
    """For whom the log is enough."""


class RunEnded(Exception):
    """Another worker has ended the run for good: nobody is to go on with it."""


@dataclass(frozen=True, slots=True)
class Stop:
    """The generation ends after this step, on all ranks, as planned."""

    leaving: bool
    reason: str


class Ranks(Protocol):
    """The ranks that one worker trains with, now and next."""

    @property
    def elastic(self) -> bool:
        """Is there a next generation after a PeerLost?"""

    on_wait: OnWait
    """Called in `look` and `at_boundary` where this worker begins and ends to wait for its right to commit."""

    @property
    def step(self) -> int:
        """The last committed step that form() and at_boundary() were told of."""

    where: Whereabouts
    """What this worker's loop is at: the loop says it here."""

    def form(self, step: int, has_state: bool, signature: dict[str, str]) -> Group:
        """Wait for the next generation, and return its group. The group before must be of no more use.

        step, has_state: what this worker brings. signature: what it trains (workers/signature.py).
        Raises: PeerLost, and then call it again; MembershipError where this worker has no place any more; RunEnded.
        """

    def at_boundary(self, step: int) -> Stop | None:
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
        """End with an error of this worker's own: the others are told at once."""

    @property
    def seat(self) -> Seat | None:
        """The place in the present generation; None where there are none."""


class FixedRanks:
    """One group from first to last."""

    elastic = False
    seat: Seat | None = None

    def __init__(self, group: Group) -> None:
        self._group = group
        self.on_wait: OnWait = nobody_asks
        self.where = Whereabouts()
        self.step = 0

    def form(self, step: int, has_state: bool, signature: dict[str, str]) -> Group:
        """The group. All its ranks were started by one driver, from one job file."""
        self.step = step
        return self._group

    def at_boundary(self, step: int) -> Stop | None:
        """No."""
        self.step = step
        return None

    def look(self, step: int) -> None:
        """Nothing: collectives tell."""

    def may_commit(self) -> bool:
        """Nobody goes on without this rank."""
        return True

    def leave(self) -> None:
        """Nothing: the process ends."""

    def fail(self, reason: str) -> None:
        """Leave the group, where that can be done."""
        if isinstance(self._group, TorchGroup):
            self._group.leave(reason)


class ElasticRanks:
    """Members of a membership. One a process: it owns torch.distributed's default group.

    door: where its peers find it, as its identity at the membership says. timeout_s: of a collective; a peer that lives
    and does not come is found by it. patience: with peers while a group forms; times: with those that it cannot reach
    while it waits for them. ended: has a worker ended the run?
    floor: the highest generation that outlives the membership, in a checkpoint; the next one has a larger number.
    """

    elastic = True

    def __init__(
        self,
        member: Member,
        door: Door,
        device: torch.device,
        *,
        timeout_s: float = 60.0,
        patience: Patience | None = None,
        times: Times | None = None,
        ended: Callable[[], bool] = lambda: False,
        floor: Callable[[], int] = lambda: 0,
    ) -> None:
        self._ended, self._floor = ended, floor
        self._member, self._door, self._device, self._timeout_s = member, door, device, timeout_s
        self._patience, self._times = patience, times
        self._reach: Reach | None = None
        self.on_wait: OnWait = nobody_asks
        self.where = Whereabouts()
        member.doing = lambda after_s: self.where.told(after_s)
        self.seat: Seat | None = None
        self.step = 0
        self._group: TorchGroup | None = None

    def form(self, step: int, has_state: bool, signature: dict[str, str]) -> Group:
        """As Ranks.form."""
        self.step = step
        self._let_go()
        self._group = None
        last = self.seat
        standing = Standing(
            None if last is None else last.generation, None if last is None else last.rank, step, has_state
        )
        self.where.at("the wait for its seat")
        self.seat = seat = self._join(standing, signature, 0 if has_state else self._read_floor())
        logger.info(
            "seated generation=%d rank=%d size=%d reason=%r", seat.generation, seat.rank, seat.size, seat.reason
        )
        self.where.at(f"the forming of generation {seat.generation}")
        if seat.size == 1:
            self._member.formed()
            return SoloGroup()
        self._reach = Reach(seat, self._door.host, partial(self._member.unreachable, seat.generation), self._times)
        self._group = form_group(
            seat, self._door, self._member, self._device, self._timeout_s, self._patience, self._reach
        )
        self._member.formed()
        return self._group

    def at_boundary(self, step: int) -> Stop | None:
        """As Ranks.at_boundary."""
        self.step = step
        change = self._member.at_boundary(step)
        if change is not None:
            return Stop(change.leaving, change.reason)
        self.look(step)
        return None

    def look(self, step: int) -> None:
        """As Ranks.look. Under 10 microseconds while the lease holds."""
        if not self._member.may_commit() and self._member.over is None:
            self._wait_to_commit(step)
        if self._member.over is not None and self.seat is not None:  # of one alone too: the others go on without it
            raise (
                MembershipDetector(self._member, self.seat)
                .find_lost(0)
                .error(self.seat.rank, self.seat.size, f"the steps up to {step}", self._member.over)
            )

    def leave(self) -> None:
        """As Ranks.leave."""
        self._member.finish()
        self._let_go()

    def fail(self, reason: str) -> None:
        """As Ranks.fail."""
        self._member.fail(reason)
        self._let_go()

    def may_commit(self) -> bool:
        """As Ranks.may_commit."""
        if self._member.fenced:
            raise Fenced(self._member.over)
        return self._member.may_commit()

    def _let_go(self) -> None:
        if self._reach is not None:  # before the others form their next group: else its connections hang at their doors
            self._reach.close()
        close_group(self._group, self._timeout_s)

    def _wait_to_commit(self, step: int) -> None:
        logger.warning("may_not_commit step=%d reason=the membership was not heard of for too long: waiting", step)
        began = time.monotonic()
        self.where.at("the wait for its right to commit")
        self.on_wait(step, True)
        while not self._member.wait_to_commit(LOOK_S) and self._member.over is None:
            if self._ended():
                raise RunEnded("another worker has ended the run")
        what = "may_commit_again" if self._member.over is None else "counted_out"
        logger.warning("%s step=%d waited_s=%.1f", what, step, time.monotonic() - began)
        self.on_wait(step, False)

    def _read_floor(self) -> int:
        """A place that is away for a moment ends no worker: what begins below what is there is refused later."""
        try:
            return self._floor()
        except OSError as error:
            logger.warning("generations_not_read reason=%s", error)
            return 0

    def _join(self, standing: Standing, signature: dict[str, str], floor: int) -> Seat:
        while True:
            if self._ended():
                raise RunEnded("another worker has ended the run")
            try:
                return self._member.join(standing, LOOK_S, signature=signature, floor=floor)
            except JoinTimeout:  # for as long as it takes
                continue
