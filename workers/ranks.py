"""With whom does a worker train? The group of the present generation, and the next one when that is over.

    FixedRanks     the ranks that Ray Train started together; one that is lost ends them all
    ElasticRanks   members of a membership (workers/membership): who is lost is replaced, and who is left goes on

A new group is made for each generation: a process group over a store of its own, at rank 0.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from thinwire.comm import PeerLost, SoloGroup, TorchGroup
from thinwire.comm.calls import NOWHERE, Calls, Place
from thinwire.comm.groups.failure_detector import Lost
from thinwire.comm.protocol import Group
from thinwire.workers.membership import GenerationOver, JoinTimeout, Member, Seat, Standing, StoreTimeout

logger = logging.getLogger(__name__)

LISTEN_S = 30.0
"""How long rank 0 may take to open the store of a generation, and a peer to connect to it."""


LOOK_S = 1.0
"""How often a worker that waits for its seat looks whether the run has been ended meanwhile."""


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

    @property
    def step(self) -> int:
        """The last committed step that form() and at_boundary() were told of."""

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
        """May a step count, or a checkpoint become whole? Where not, others may go on without this worker."""

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

    timeout_s: of a collective; a peer that lives and does not come is found by it. ended: has a worker ended the run?
    """

    elastic = True

    def __init__(
        self,
        member: Member,
        host: str,
        device: torch.device,
        *,
        timeout_s: float = 60.0,
        ended: Callable[[], bool] = lambda: False,
    ) -> None:
        self._ended = ended
        self._member, self._host, self._device, self._timeout_s = member, host, device, timeout_s
        self.seat: Seat | None = None
        self.step = 0
        self._group: TorchGroup | None = None

    def form(self, step: int, has_state: bool, signature: dict[str, str]) -> Group:
        """As Ranks.form."""
        self.step = step
        _close_group(self._group, self._timeout_s + LISTEN_S)
        self._group = None
        last = self.seat
        standing = Standing(
            None if last is None else last.generation, None if last is None else last.rank, step, has_state
        )
        self.seat = seat = self._join(standing, signature)
        logger.info(
            "seated generation=%d rank=%d size=%d reason=%r", seat.generation, seat.rank, seat.size, seat.reason
        )
        if seat.size == 1:
            self._member.formed()
            return SoloGroup()
        try:
            dist.init_process_group(
                "nccl" if self._device.type == "cuda" else "gloo",
                store=self._store(seat),
                rank=seat.rank,
                world_size=seat.size,
                timeout=timedelta(seconds=self._timeout_s),
            )
        except (RuntimeError, GenerationOver, StoreTimeout) as error:
            raise PeerLost(f"generation {seat.generation} did not come together: {error}") from error
        self._group = TorchGroup(detector=MembershipDetector(self._member, seat))
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
        _close_group(self._group, self._timeout_s)

    def fail(self, reason: str) -> None:
        """As Ranks.fail."""
        self._member.fail(reason)
        _close_group(self._group, self._timeout_s)

    def may_commit(self) -> bool:
        """As Ranks.may_commit."""
        return self._member.may_commit()

    def _wait_to_commit(self, step: int) -> None:
        logger.warning("may_not_commit step=%d reason=the membership was not heard of for too long: waiting", step)
        began = time.monotonic()
        while not self._member.wait_to_commit(LOOK_S) and self._member.over is None:
            if self._ended():
                raise RunEnded("another worker has ended the run")
        what = "may_commit_again" if self._member.over is None else "counted_out"
        logger.warning("%s step=%d waited_s=%.1f", what, step, time.monotonic() - began)

    def _join(self, standing: Standing, signature: dict[str, str]) -> Seat:
        while True:
            if self._ended():
                raise RunEnded("another worker has ended the run")
            try:
                return self._member.join(standing, LOOK_S, signature=signature)
            except JoinTimeout:  # for as long as it takes
                continue

    def _store(self, seat: Seat) -> Store:
        timeout = timedelta(seconds=LISTEN_S)
        if seat.rank == 0:
            # The port is told once it listens: a client that comes too early would back off for most of a second.
            store = dist.TCPStore(self._host, 0, None, True, timeout, wait_for_workers=False)  # type: ignore[attr-defined]
            self._member.announce_store(store.port)
        else:
            host, port = self._member.store_address(LISTEN_S)
            store = dist.TCPStore(host, port, None, False, timeout, wait_for_workers=False)  # type: ignore[attr-defined]
        return PrefixStore(f"generation-{seat.generation}", store)


class MembershipDetector:
    """Which ranks of a generation are gone, as the membership says: at once and alike on all."""

    look_s = 0.05

    def __init__(self, member: Member, seat: Seat) -> None:
        self._member, self._seat = member, seat
        self.left: str | None = None
        self.calls = Calls()

    def leave(self, reason: str) -> None:
        """Tell the membership."""
        self.left = reason
        self._member.fail(reason)

    def find_lost(self, answer_s: float, at: Place = NOWHERE) -> Lost:
        """Who is gone. The membership may take `answer_s` to find out."""
        self._member.wait_over(answer_s)
        lost = {rank: why for rank, why in sorted(self._member.lost.items()) if rank != self._seat.rank}
        return Lost(lost, "The job goes on with the ranks that are left. The log of the one that stopped says why")

    def watch(self, at: Place = NOWHERE) -> _Look:
        """Look at what the membership has said."""
        return _Look(self._member)


class _Look:
    def __init__(self, member: Member) -> None:
        self._member = member

    @property
    def seen(self) -> bool:
        return self._member.over is not None

    def stop(self) -> None:
        """Nothing runs."""


def _close_group(group: TorchGroup | None, linger_s: float) -> None:
    """Forget torch.distributed's groups. What still runs in them ends by itself, at its time-out."""
    if not dist.is_initialized():
        return
    if "nccl" in dist.get_backend_config() and dist.group.WORLD is not None:
        dist.group.WORLD.abort()
    # A gloo group that goes waits for its collectives, holding the interpreter's lock; with a peer that hangs that
    # takes the whole time-out. So it stays until they are over, and nobody waits. Not longer: its threads take time.
    last = list(dist.distributed_c10d._world.pg_map)
    running = [] if group is None else group.abandoned
    dist.destroy_process_group()
    if all(work.is_completed() for work in running):
        return
    threading.Thread(target=_linger, args=(last, running, linger_s), name="thinwire-linger", daemon=True).start()


def _linger(last: list[dist.ProcessGroup], running: list[dist.Work], most_s: float) -> None:
    until = time.monotonic() + most_s
    while time.monotonic() < until and not all(work.is_completed() for work in running):
        time.sleep(0.05)
    last.clear()
