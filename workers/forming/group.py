"""An attempt to make the process group of a generation, which the membership ends at any moment; the end of a group.

Rank 0 opens a store, every pair is proved (pairs.py), and only then a transport connects: what it would wait for is
known to be there, but for a death in just that moment, which the membership reports.

gloo and NCCL wait for peers in C++, up to a time-out, and nothing can end that. So they connect in a thread of their
own. The waiting thread listens to the membership too, and leaves the thread alone when the generation is over: it
sleeps in a system call, ends by itself at its time-out, and what it has made goes with it. A process ends when it has.

torch.distributed takes a transport from outside as a backend of a name of its own (Backend.register_backend). Its
maker runs before torch.distributed has noted anything of the new group, so that an attempt which ends in it leaves
nothing behind. gloo itself, of exactly this worker's address, is what is made; so also for the second communicator.

Measured with torch 2.13: gloo fails at once where a peer's port is closed; where its process is stopped it waits, takes
no processor time, and ends at five times the time-out that it was given.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from thinwire.comm import PeerLost, SoloGroup, TorchGroup, prepare_nccl
from thinwire.comm.calls import NOWHERE, Calls, Place
from thinwire.comm.groups.distributed import abort_nccl
from thinwire.comm.groups.failure_detector import Lost
from thinwire.comm.groups.outside import close_outside, new_outside
from thinwire.comm.protocol import Group
from thinwire.workers.forming.pairs import Door, Pairs, Patience, Reach, Times
from thinwire.workers.membership.member import Member
from thinwire.workers.membership.seats import Change, Seat, Standing
from thinwire.workers.membership.state import Fenced, GenerationOver, JoinTimeout
from thinwire.workers.ranks import Alone, Box, OnWait, RunEnded, only_logged
from thinwire.workers.whereabouts import Whereabouts

logger = logging.getLogger(__name__)

T = TypeVar("T")
CONNECT_S = 10.0
"""For a word of the store. gloo gives a connection five times as long: so long may a thread sleep that was left."""
LOOK_S = 0.02
"""Between two looks at what the membership says."""
SEAT_LOOK_S = 1.0
"""How often a worker that waits for its seat looks whether the run has been ended meanwhile."""
GLOO = "membership_gloo"
"""The name of the backend."""
LINGER_S = 30.0
"""Beyond its time-out, for a collective that has been given up."""
_CONNECT = timedelta(seconds=CONNECT_S)


@dataclass(frozen=True, slots=True)
class Attempt:
    """Of one generation. host: this worker's own address. over: why the generation is over; None while it is not."""

    generation: int
    host: str
    over: Callable[[], str | None]

    def wait_for(self, what: str, work: Callable[[], T]) -> T:
        """What work() returns or raises, done in another thread. Raises GenerationOver as soon as it is over."""
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(work())
            except BaseException as error:  # noqa: BLE001 - raised where it is waited for
                done.set_exception(error)

        # No daemon: the interpreter waits for it at its end. One that came back from C++ after that would abort.
        threading.Thread(target=run, name=f"thinwire-{what.replace(' ', '-')}").start()
        while not wait([done], LOOK_S).done:
            if (why := self.over()) is not None:
                raise GenerationOver(f"generation {self.generation} is over: {why} (while this worker {what})")
        return done.result()


_present: Attempt | None = None
"""Of this process: torch calls the maker of a backend with nothing of ours."""


def begin(attempt: Attempt) -> None:
    """What is made from now on belongs to that attempt."""
    global _present
    _present = attempt
    if not hasattr(dist.Backend, GLOO.upper()):
        dist.Backend.register_backend(GLOO, _make_gloo, devices=["cpu"])


def _make_gloo(store: Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroupGloo:
    attempt = _present
    assert attempt is not None
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=attempt.host)]
    options._timeout = timedelta(seconds=CONNECT_S)
    gloo = attempt.wait_for("connects by gloo", lambda: dist.ProcessGroupGloo(store, rank, size, options))
    gloo._set_default_timeout(timeout)
    gloo._set_sequence_number_for_group()
    return gloo


def connect_nccl(attempt: Attempt, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
    """Build the communicator of a group (None: the default one), which NCCL would else do in its first collective."""
    group = group or dist.group.WORLD
    assert group is not None
    try:
        attempt.wait_for("connects by NCCL", lambda: group._get_backend(device).eager_connect_single_device(device))
    except GenerationOver:
        group.abort()
        raise


def form_group(
    seat: Seat,
    door: Door,
    member: Member,
    device: torch.device,
    timeout_s: float,
    patience: Patience | None = None,
    reach: Reach | None = None,
    *,
    beside: bool = False,
) -> TorchGroup:
    """The group of this generation, of two members or more, as torch.distributed's default one. Collective.

    Waits for as long as the membership does. timeout_s: of its collectives. reach: who asks for the peers that one of
    them waits for; None: nobody. beside: the default one is there, and another is made (lane_group). Raises: PeerLost,
    and then nothing of the attempt is left but threads that sleep until a time-out (CONNECT_S).
    """
    attempt = Attempt(seat.generation, door.host, lambda: member.over)
    began = time.perf_counter()
    try:
        store = _serve_store(door.host) if seat.rank == 0 else None
        report = partial(member.unreachable, seat.generation)
        port = Pairs(seat, door, attempt.over, report, patience).prove(store.port if store else 0)
        proved = time.perf_counter()
        if store is None:
            store = reach_store(attempt, seat.members[0].identity.host, port)
        kept = PrefixStore(f"generation-{seat.generation}", store)
        made = None
        if beside:
            made = lane_group(attempt, kept, seat, 0, device, timeout_s)
        else:
            _init(attempt, kept, seat, device, timeout_s)
    except (RuntimeError, OSError) as error:  # the membership's word, the store's and the transport's errors
        raise PeerLost(f"generation {seat.generation} did not come together: {error}") from error
    logger.info(
        "formed generation=%d size=%d pairs_ms=%.1f connect_ms=%.1f",
        seat.generation,
        seat.size,
        1e3 * (proved - began),
        1e3 * (time.perf_counter() - proved),
    )
    return TorchGroup(made, detector=MembershipDetector(member, seat, reach))


def lane_group(
    attempt: Attempt, store: Store, seat: Seat, lane: int, device: torch.device, timeout_s: float
) -> dist.ProcessGroup:
    """Those of one rank in all boxes of a generation: beside the default groups, which are their boxes. Collective.

    store: of the generation. Raises: GenerationOver, RuntimeError; and then nothing of the attempt is left.
    """
    begin(attempt)
    cuda = device.type == "cuda"
    name, backend = f"generation-{seat.generation}/{lane}", "nccl" if cuda else GLOO
    if cuda:
        prepare_nccl()
    made = new_outside(store, seat.rank, seat.size, name, backend, timedelta(seconds=timeout_s))
    if cuda:
        try:
            connect_nccl(attempt, device, made)
        except (RuntimeError, GenerationOver):
            close_outside(made)
            raise
    return made


def reach_store(attempt: Attempt, host: str, port: int) -> Store:
    """The store of a generation, where rank 0 of it serves that. Raises: GenerationOver, RuntimeError."""
    return attempt.wait_for("connects to the store", lambda: _reach_store(host, port))


def _init(attempt: Attempt, store: Store, seat: Seat, device: torch.device, timeout_s: float) -> None:
    begin(attempt)
    # torch numbers its groups, and names the keys of the store by that. An attempt that failed has counted: a rank that
    # was in one, and a rank that was not, would look for each other under two names.
    dist.distributed_c10d._world.group_count = 0
    cuda = device.type == "cuda"
    if cuda:
        prepare_nccl()
    dist.init_process_group(
        "nccl" if cuda else GLOO,
        store=store,
        rank=seat.rank,
        world_size=seat.size,
        timeout=timedelta(seconds=timeout_s),
    )
    if cuda:
        try:
            connect_nccl(attempt, device)
        except (RuntimeError, GenerationOver):
            close_group(None, 0.0)
            raise


def _serve_store(host: str) -> dist.TCPStore:  # type: ignore[name-defined]
    return dist.TCPStore(host, 0, None, True, _CONNECT, wait_for_workers=False)  # type: ignore[attr-defined]


def _reach_store(host: str, port: int) -> Store:
    return dist.TCPStore(host, port, None, False, _CONNECT, wait_for_workers=False)  # type: ignore[attr-defined]


def close_group(group: TorchGroup | None, timeout_s: float) -> None:
    """Forget torch.distributed's groups. What still runs in them ends by itself, at its time-out of `timeout_s`."""
    if not dist.is_initialized():
        return
    if dist.group.WORLD is not None:
        abort_nccl(dist.group.WORLD)
    # A gloo group that goes waits for its collectives, holding the interpreter's lock; with a peer that hangs that
    # takes the whole time-out. So it stays until they are over, and nobody waits. Not longer: its threads take time.
    last = list(dist.distributed_c10d._world.pg_map)
    running = [] if group is None else group.abandoned
    dist.destroy_process_group()
    _let_end(last, running, timeout_s)


def close_lane(group: TorchGroup | None, timeout_s: float) -> None:
    """As close_group() of one that was made beside the default one, which stays."""
    if group is None:
        return
    process_group = group.process_group
    abort_nccl(process_group)
    running = group.abandoned
    _let_end(close_outside(process_group), running, timeout_s)


def _let_end(last: list[dist.ProcessGroup], running: list[dist.Work], timeout_s: float) -> None:
    if all(work.is_completed() for work in running):
        return
    threading.Thread(
        target=_linger, args=(last, running, timeout_s + LINGER_S), name="thinwire-linger", daemon=True
    ).start()


def _linger(last: list[dist.ProcessGroup], running: list[dist.Work], most_s: float) -> None:
    until = time.monotonic() + most_s
    while time.monotonic() < until and not all(work.is_completed() for work in running):
        time.sleep(0.05)
    last.clear()


class MembershipDetector:
    """Which ranks of a generation are gone, as the membership says: at once and alike on all.

    reach: hears of waits that take long; None: nobody does.
    """

    look_s = 0.05

    def __init__(self, member: Member, seat: Seat, reach: Reach | None = None) -> None:
        self._member, self._seat, self._reach = member, seat, reach
        self.left: str | None = None
        self.calls = Calls()

    def leave(self, reason: str) -> None:
        """Report it to the membership."""
        self.left = reason
        self._member.fail(reason)

    def find_lost(self, answer_s: float, at: Place = NOWHERE) -> Lost:
        """Who is gone. The membership may take `answer_s` to find out."""
        self._member.wait_over(answer_s)
        lost = {rank: why for rank, why in sorted(self._member.lost.items()) if rank != self._seat.rank}
        return Lost(lost, "The job goes on with the ranks that are left. The log of the one that stopped says why")

    def ended(self) -> dict[int, str]:
        """Nobody that the membership does not report at once."""
        return {}

    def watch(self, at: Place = NOWHERE) -> _Look:
        """Look at what the membership has said."""
        return _Look(self._member, self._reach)


class _Look:
    """At one wait in a collective."""

    def __init__(self, member: Member, reach: Reach | None) -> None:
        self._member, self._reach = member, reach
        self._began, self._is_long = time.monotonic(), False

    @property
    def seen(self) -> bool:
        if self._reach is not None and not self._is_long:
            self._is_long = time.monotonic() - self._began >= self._reach.times.waited_s
            if self._is_long:
                self._reach.begin()
        return self._member.over is not None

    def stop(self) -> None:
        if self._reach is not None and self._is_long:
            self._reach.end()


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
        beside: bool = False,
    ) -> None:
        self.box: Box = Alone()
        self._ended, self._floor, self._beside = ended, floor, beside
        self._member, self._door, self._device, self.timeout_s = member, door, device, timeout_s
        self._patience, self._times = patience, times
        self._reach: Reach | None = None
        self.on_wait: OnWait = only_logged
        self.where = Whereabouts()
        member.doing = lambda after_s: self.where.doing(after_s)
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
            seat,
            self._door,
            self._member,
            self._device,
            self.timeout_s,
            self._patience,
            self._reach,
            beside=self._beside,
        )
        self._member.formed()
        return self._group

    def at_boundary(self, step: int) -> Change | None:
        """As Ranks.at_boundary."""
        self.step = step
        change = self._member.at_boundary(step)
        if change is None:
            self.look(step)
        return change

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
        if self._beside:
            close_lane(self._group, self.timeout_s)
            self._group = None
        else:
            close_group(self._group, self.timeout_s)

    def _wait_to_commit(self, step: int) -> None:
        logger.warning("may_not_commit step=%d reason=the membership was not heard of for too long: waiting", step)
        began = time.monotonic()
        self.where.at("the wait for its right to commit")
        self.on_wait(step, True)
        while not self._member.wait_to_commit(SEAT_LOOK_S) and self._member.over is None:
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
                return self._member.join(standing, SEAT_LOOK_S, signature=signature, floor=floor)
            except JoinTimeout:  # for as long as it takes
                continue
