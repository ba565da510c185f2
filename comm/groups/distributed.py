"""Groups of processes: TorchGroup over torch.distributed (NCCL, gloo).

Bytes are counted here, where a collective is started.
"""

from __future__ import annotations

import ctypes
import logging
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

# torch.optim imports it when the first optimizer is made. If a default group exists by then, default arguments of its
# functions hold that group for good: destroy_process_group does not end gloo's threads, and the process may abort at
# its end.
import torch.distributed.nn.functional
from torch import Tensor

from thinwire.comm.calls import NOWHERE, ON_THE_WIRE, Calls, Place, interrupted
from thinwire.comm.errors import CallMismatch, CommError, PeerLost
from thinwire.comm.groups.failure_detector import FailureDetector, Lost, Seen, StoreDetector
from thinwire.comm.groups.nccl import Communicators, ends_the_process, has_failed, is_nccl
from thinwire.comm.groups.nodes import Part, PartStats
from thinwire.comm.groups.outside import is_outside, more_of
from thinwire.comm.groups.sent_bytes import all_gather_bytes, all_reduce_bytes, all_to_all_bytes, broadcast_bytes
from thinwire.comm.groups.watching import Gate, poll
from thinwire.comm.protocol import Stats
from thinwire.comm.signals import armed
from thinwire.comm.streams import streams_for
from thinwire.comm.wire.link_classes import named_box

logger = logging.getLogger(__name__)

# torch 2.13 renames it and warns at the old name.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_second_communicators: weakref.WeakKeyDictionary[dist.ProcessGroup, weakref.ref[dist.ProcessGroup]] = (
    weakref.WeakKeyDictionary()
)
"""One a process group, however many TorchGroups it has. Weak: torch's own table keeps them until they are destroyed."""
_apart: weakref.WeakKeyDictionary[dist.ProcessGroup, weakref.ref[dist.ProcessGroup]] = weakref.WeakKeyDictionary()
"""What TorchGroup.apart() has made for it, likewise."""
_parts: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], weakref.ref[dist.ProcessGroup]]] = (
    weakref.WeakKeyDictionary()
)
"""Those of some of its ranks, likewise."""
_detectors: weakref.WeakKeyDictionary[dist.ProcessGroup, StoreDetector] = weakref.WeakKeyDictionary()
_ending: weakref.WeakKeyDictionary[dist.ProcessGroup, Communicators] = weakref.WeakKeyDictionary()
"""With which others it ends."""
LEFT_S = 0.01
"""How long a rank that has left, or has failed, waits for what it has begun before: it may be done, or never come."""
ENDED_S = 1.0
"""How long what a rank has sent to a GPU may be on its way after the process has ended."""
PIECE_ELEMENTS = 1 << 20
"""What a relay passes on at a time: 4 MB in fp32, about 30 ms at 1 Gbit/s."""


class TorchGroup:
    """A torch.distributed process group (None: the default one) as a Group."""

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        answer_s: float = 1.0,
        detector: FailureDetector | None = None,
        box: str | None = None,
    ) -> None:
        """answer_s: how long, after a failure, peers may take to say that they live (comm.groups.failure_detector).

        detector: who tells which ranks are gone, where a service of the caller's knows; None: ranks ask one another.
        box: a name for where this rank is: the ranks that have one name share a box; None: those that share a network
        namespace of one machine do.
        """
        if not dist.is_initialized():
            raise ValueError("torch.distributed is not initialised: call init_process_group first, or use SoloGroup()")
        # Weak: a group that outlives its destruction keeps gloo's threads, and the process may abort at its end.
        self._given = None if process_group is None else weakref.ref(process_group)
        self.rank = dist.get_rank(process_group)
        self.size = dist.get_world_size(process_group)
        self.box = None if box is None else named_box(box)
        self.stats = Stats()
        self._detector = detector or _detector_of(self._process_group(), self.rank, self.size)
        self._communicators = _communicators_of(self._process_group())
        self._answer_s = answer_s
        self._second: TorchGroup | None = None
        self._communicator = 0
        self._parts: dict[Part, TorchGroup] = {}
        self._told = (self.rank, self.size)
        """Rank and size in the whole group, of which this may be a part: errors name ranks by these."""
        self.abandoned: list[dist.Work] = []
        """Collectives that nobody waits for any more, since a peer was lost: some may still run."""

    @classmethod
    def apart(cls, process_group: dist.ProcessGroup | None = None) -> TorchGroup:
        """All ranks of a process group (None: the default one), in one that is not their users': neither waits for the

        other's. One for all that ask. Collective at its first call for a process group, as second_communicator(); of
        one rank it is the group itself. With NCCL both end together. Raises: PeerLost.
        """
        whole = cls(process_group)
        if whole.size == 1:
            return whole
        first = whole._process_group()
        with whole._peers("apart"):
            made = cls(_another(_apart, first))
        made._communicators.add(first)
        return made

    @property
    def ranks(self) -> list[int]:
        """Which ranks of the world they are, in order."""
        return dist.get_process_group_ranks(self._process_group())

    @property
    def process_group(self) -> dist.ProcessGroup:
        """What it is over. Raises: ValueError where that was destroyed."""
        return self._process_group()

    def carries(self, device: torch.device) -> bool:
        """Has it a backend for tensors that lie there?"""
        return device.type in {known.type for known in self._process_group()._device_types}

    @property
    def calls(self) -> Calls:
        """What this rank is doing, of all TorchGroups of this process group and their second communicators."""
        return self._detector.calls

    def all_to_all(self, out_nB: Tensor, in_nB: Tensor) -> None:
        """out[i] on rank j <- in[j] of rank i. Raises: PeerLost."""
        self.start_all_to_all(out_nB, in_nB).wait()

    def all_gather(self, out_nB: Tensor, in_B: Tensor) -> None:
        """out[i] <- in of rank i. Raises: PeerLost."""
        self.start_all_gather(out_nB, in_B).wait()

    def mean_(self, x: Tensor) -> None:
        """x <- mean over ranks of x. Raises: PeerLost."""
        self.stats.count("mean", all_reduce_bytes(x, self.size))
        self._start("mean", x, lambda pg: dist.all_reduce(x, dist.ReduceOp.SUM, group=pg, async_op=True)).wait()
        x.div_(x.new_full((), self.size))  # by a number, CUDA takes the reciprocal: another last bit

    def broadcast_(self, x: Tensor, src: int = 0) -> None:
        """x <- x of rank `src` of this group. Raises: PeerLost."""
        self.stats.count("broadcast", broadcast_bytes(x, self.size, self.rank, src), src, x.nbytes)
        self._start("broadcast", x, lambda pg: dist.broadcast(x, group=pg, group_src=src, async_op=True)).wait()

    def relay_(self, x: Tensor, path: Sequence[int], piece_elements: int = PIECE_ELEMENTS) -> None:
        """X of all ranks on the path <- x of its first, from one to the next in pieces. Others send and get nothing.

        Collective, with x of one length. Each sends on what it has while it receives more, so that it takes about one
        transfer however many there are. Not in the ledger. A piece is an exchange of all ranks, as gloo gives up all
        connections when somebody stops waiting for a message of one rank to another, only to look at the others.
        Raises: PeerLost.
        """
        at = path.index(self.rank) if self.rank in path else None
        pieces = [piece.view(torch.uint8) for piece in torch.split(x.view(-1), piece_elements)]
        nothing = torch.empty(0, dtype=torch.uint8, device=x.device)
        for turn in range(len(pieces) + len(path) - 2):
            out, given, to, of = nothing, nothing, [0] * self.size, [0] * self.size
            if at is not None and at + 1 < len(path) and 0 <= turn - at < len(pieces):
                given = pieces[turn - at]
                to[path[at + 1]] = given.numel()
                self.stats.count_sent("relay", given.nbytes)
            if at and 0 <= turn - at + 1 < len(pieces):
                out = pieces[turn - at + 1]
                of[path[at - 1]] = out.numel()
            self._start("relay", x, partial(_pass_on, out, given, of, to)).wait()

    def start_all_to_all_v(
        self, out_B: Tensor, in_B: Tensor, of: Sequence[int], to: Sequence[int], num_bytes: int
    ) -> TorchPending:
        """As Uneven of comm.protocol. Raises: PeerLost."""
        for row_B, lengths in ((out_B, of), (in_B, to)):
            _check_row(row_B, lengths, self.size)
        self.stats.count_sent("all_to_all_v", sum(to) - to[self.rank])
        return self._start("all_to_all_v", in_B, partial(_pass_on, out_B, in_B, list(of), list(to)), num_bytes)

    def start_all_to_all(self, out_nB: Tensor, in_nB: Tensor) -> TorchPending:
        """all_to_all in the background. Raises: PeerLost."""
        _check_rows(out_nB, in_nB, self.size)
        self.stats.count("all_to_all", all_to_all_bytes(in_nB, self.size))
        return self._start(
            "all_to_all", in_nB, lambda pg: dist.all_to_all_single(out_nB, in_nB, group=pg, async_op=True)
        )

    def start_all_gather(self, out_nB: Tensor, in_B: Tensor) -> TorchPending:
        """all_gather in the background. Raises: PeerLost."""
        _check_rows(out_nB, in_B.view(1, -1).expand(self.size, -1), self.size)
        self.stats.count("all_gather", all_gather_bytes(in_B, self.size))
        return self._start(
            "all_gather", in_B, lambda pg: all_gather_single(out_nB.view(-1), in_B.view(-1), group=pg, async_op=True)
        )

    def start_sum_(self, x: Tensor) -> TorchPending:
        """x <- sum over ranks of x, not divided, in the background. Raises: PeerLost."""
        self.stats.count("sum", all_reduce_bytes(x, self.size))
        return self._start("sum", x, lambda pg: dist.all_reduce(x, dist.ReduceOp.SUM, group=pg, async_op=True))

    def second_communicator(self) -> TorchGroup:
        """Another process group of the same ranks, with the same backend, time-out and `stats`.

        Collective at its first call for a process group: all its ranks connect once more. Over gloo each
        also has threads of its own. Raises: PeerLost.
        """
        if self._second is None:
            with self._peers("second_communicator"):
                process_group = _another(_second_communicators, self._process_group())
            self._second = self._like(process_group)
            self._second.stats, self._second._communicator = self.stats, self._communicator + 1
        return self._second

    def part(self, part: Part, ranks: Sequence[int]) -> TorchGroup:
        """The group of these ranks (comm.groups.nodes): a process group with the same backend and time-out.

        Collective among them at its first call for a process group. The ranks of all parts tell one another who is
        gone. Raises: PeerLost.
        """
        if part not in self._parts:
            with self._peers(f"part {part}"):
                process_group = _process_group_of(self._process_group(), ranks)
            made = self._parts[part] = self._like(process_group)
            made.stats, made._communicator = PartStats(self.stats, part), part.communicator
        return self._parts[part]

    def _like(self, process_group: dist.ProcessGroup) -> TorchGroup:
        """A group of ranks of this one that shares what this one knows of peers."""
        made = TorchGroup(process_group, answer_s=self._answer_s, detector=self._detector)
        made.abandoned, made._told, made.box = self.abandoned, self._told, self.box
        made._communicators = self._communicators
        self._communicators.add(process_group)
        return made

    def leave(self, reason: str = "it raised, or was stopped") -> None:
        """Say that this rank stops though its process lives: peers that wait for it raise PeerLost, and so does it.

        For all TorchGroups of this process group, second communicators too. Not collective. The process group itself
        stays, to be destroyed by its maker; NCCL's are aborted. A process that ends need not call it. The first
        reason stands. A rank leaves by itself where a signal's handler raises while it waits for the others.
        """
        if self._detector.left is not None:
            return
        self.calls.left = reason
        self._detector.leave(reason)
        self._communicators.abort()

    def before_abort(self, gate: Gate) -> None:
        """Close this before communicators of NCCL are aborted, as they are when a peer is lost or this rank leaves."""
        self._communicators.before_abort(gate)

    def await_device(self, what: str, done: Callable[[], bool]) -> None:
        """Return when done(), as an event on a GPU behind all that this rank has begun. what: for messages.

        Signals are handled. Raises: PeerLost, CallMismatch where a peer is gone, NCCL tells of an error, or it takes
        longer than the time-out of the process group; what done() raises, then this rank leaves. All communicators are
        aborted then.
        """
        calls, detector, process_group = self.calls, self._detector, self._process_group()
        at = calls.recent[-1] if calls.recent else NOWHERE
        looked = time.monotonic()
        until = looked + self._timeout_s(process_group)
        watch: Seen | None = None
        ended_since: float | None = None

        def look() -> None:
            nonlocal looked, watch, ended_since
            now = time.monotonic()
            if detector.left is not None or (watch is not None and watch.seen):
                raise RuntimeError("a peer has failed, so what this rank waits for will not come")
            if now < looked + detector.look_s:
                return
            looked = now
            if watch is None:
                calls.waits.add(at)
                watch = detector.watch(at)
            if has_failed(process_group):
                raise RuntimeError("NCCL tells of an error")
            # Over shared memory NCCL does not notice. But a rank may end well while its last rows are on their way.
            ended_since = (ended_since or now) if detector.ended() else None
            if ended_since is not None and now > ended_since + ENDED_S:
                raise RuntimeError("a peer has ended, and what this rank waits for does not come")
            if now > until:
                raise RuntimeError("it took longer than the time-out of the process group")

        broken: list[RuntimeError] = []

        def is_done() -> bool:
            try:
                return done()
            except RuntimeError as error:  # of the device, such as an assertion in a kernel of the user's: no peer's
                broken.append(error)
                return True

        try:
            with self._peers(what, at):
                poll(is_done, look=look)
            if broken:
                raise broken[0]
        except CommError:
            raise
        except BaseException as error:  # a signal's: the others wait for what this rank does not go on with
            self.leave(interrupted(error, calls))
            raise
        finally:
            if watch is not None:
                calls.waits.discard(at)
                watch.stop()

    def _timeout_s(self, process_group: dist.ProcessGroup) -> float:
        timeout: timedelta = process_group._get_backend(process_group._device_types[0]).options._timeout
        return timeout.total_seconds()

    def _start(
        self,
        collective: str,
        x: Tensor,
        start: Callable[[dist.ProcessGroup], dist.Work],
        num_bytes: int | None = None,
    ) -> TorchPending:
        process_group, detector = self._process_group(), self._detector
        if detector.left is not None:
            raise self._has_left()
        if detector.calls.mismatch:
            raise CallMismatch(detector.calls.mismatch)
        number = detector.calls.begun[self._communicator] + 1
        at = Place(self._communicator, number, ON_THE_WIRE.get(collective, collective), num_bytes or x.nbytes)
        with self._peers(collective, at):
            work = start(process_group)
        detector.calls.begin(at)
        return TorchPending(self, collective, at, work, x.device)

    def _has_left(self) -> PeerLost:
        rank, size = self._told
        return PeerLost(f"rank {rank} of {size} has left the group: {self._detector.left}", rank)

    def _process_group(self) -> dist.ProcessGroup:
        process_group = dist.group.WORLD if self._given is None else self._given()
        if process_group is None:
            raise ValueError("the process group of this TorchGroup was destroyed: make both again")
        return process_group

    @contextmanager
    def _peers(self, collective: str, at: Place = NOWHERE) -> Iterator[None]:
        # Shapes are checked before, so what torch raises here is the transport's: a peer is gone or silent.
        try:
            yield
        except CommError:
            raise
        except RuntimeError as error:
            self._communicators.failures += 1
            if self._detector.left is not None:
                self._communicators.abort()
                raise self._has_left() from error
            lost = self._aborted_and_asked(at)
            if lost.mismatch:
                _hold_for_good(dist.distributed_c10d._world.pg_map)
            raise lost.error(*self._told, collective, error, self.calls) from error

    def _aborted_and_asked(self, at: Place) -> Lost:
        """Who is gone. Beside the abort, which may take seconds: others wait for a word of this rank no longer."""
        if not self._communicators.to_abort:
            return self._detector.find_lost(self._answer_s, at)
        with ThreadPoolExecutor(1, "thinwire-lost") as asking:
            lost = asking.submit(self._detector.find_lost, self._answer_s, at)
            self._communicators.abort()
            return lost.result()


class TorchPending:
    """A collective of torch.distributed that was started. On a GPU `hold` holds up the current stream, not the host."""

    __slots__ = ("_at", "_collective", "_device", "_failures", "_group", "_work")

    def __init__(self, group: TorchGroup, collective: str, at: Place, work: dist.Work, device: torch.device) -> None:
        self._group, self._collective, self._at, self._device = group, collective, at, device
        self._work: dist.Work | None = work
        self._failures = group._communicators.failures

    @property
    def _is_over(self) -> bool:
        """Has this rank left, or failed, since this was begun? Of a bucket each a look would add up to minutes."""
        return self._group._detector.left is not None or self._failures < self._group._communicators.failures

    def wait(self) -> None:
        """Block until the result is there; at once where it was waited for before. Raises: PeerLost."""
        if self._work is None:
            return
        work, self._work = self._work, None  # it holds connections, which would outlive the process group
        self._group.abandoned.append(work)
        if self._group.calls.mismatch:
            raise CallMismatch(self._group.calls.mismatch)
        try:
            with self._group._peers(self._collective, self._at):
                self._wait(work)
        except CommError:
            raise
        except BaseException as error:  # a signal's: the others wait for what this rank does not go on with
            self._group.leave(interrupted(error, self._group.calls))
            raise
        self._group.abandoned.remove(work)

    def hold(self) -> None:
        """Make what is queued on the current stream from now on wait for the result; on a CPU as wait().

        A peer that is lost later is not reported here: code that asks an event whether it is done uses await_device().
        Raises: PeerLost.
        """
        if self._device.type == "cpu":
            self.wait()
            return
        if self._work is not None:
            work, self._work = self._work, None
            with self._group._peers(self._collective, self._at):
                work.wait()  # without a time-out it is the stream that waits

    def _wait(self, work: dist.Work) -> None:
        detector = self._group._detector
        streams = streams_for(self._device)
        if streams is not None:
            work.wait()
            self._group.await_device(self._collective, streams.current().record_event().query)
        elif not _done_within(work, LEFT_S if self._is_over else detector.look_s):
            self._wait_and_watch(work)

    def _wait_and_watch(self, work: dist.Work) -> None:
        over = "a peer has failed, so what this rank waits for will not come"
        if self._is_over:
            raise RuntimeError(over)
        waits = self._group.calls.waits
        waits.add(self._at)
        watch = self._group._detector.watch(self._at)
        try:
            while True:
                if watch.seen or self._is_over:
                    raise RuntimeError(over)
                if _done_within(work, self._group._detector.look_s):
                    return
        finally:
            waits.discard(self._at)
            watch.stop()


def _done_within(work: dist.Work, seconds: float) -> bool:
    """Wait so long. Raises what the collective raised."""
    try:
        with armed():
            work.wait(timedelta(seconds=seconds))
    except RuntimeError:
        if work.is_completed():
            work.wait()  # the collective's own error, which this one may not be
            return True
        return False
    return True


def _pass_on(out: Tensor, given: Tensor, of: list[int], to: list[int], process_group: dist.ProcessGroup) -> dist.Work:
    work: dist.Work = dist.all_to_all_single(out, given, of, to, group=process_group, async_op=True)
    return work


def _check_row(row_B: Tensor, lengths: Sequence[int], size: int) -> None:
    if row_B.dtype != torch.uint8 or len(lengths) != size or row_B.numel() != sum(lengths):
        raise ValueError(
            f"expected uint8[sum of {list(lengths)}] for {size} ranks, got {row_B.dtype}{list(row_B.shape)}"
        )


def _check_rows(out_nB: Tensor, in_nB: Tensor, size: int) -> None:
    for name, rows in (("out", out_nB), ("in", in_nB)):
        if rows.dtype != torch.uint8 or rows.shape[0] != size:
            raise ValueError(f"{name}: expected uint8[{size}, B], got {rows.dtype}{list(rows.shape)}")
    if out_nB.shape != in_nB.shape:
        raise ValueError(f"rows of {list(in_nB.shape)} bytes do not fit into {list(out_nB.shape)}")


def _another(
    made: weakref.WeakKeyDictionary[dist.ProcessGroup, weakref.ref[dist.ProcessGroup]], first: dist.ProcessGroup
) -> dist.ProcessGroup:
    """The one of the same ranks that is in `made`, or goes there."""
    known = made.get(first)
    other = known() if known else None
    if other is None:
        other = _new_group(first, dist.get_process_group_ranks(first))
        made[first] = weakref.ref(other)
    return other


def _process_group_of(whole: dist.ProcessGroup, ranks: Sequence[int]) -> dist.ProcessGroup:
    """That of these ranks of the whole."""
    parts = _parts.setdefault(whole, {})
    known = parts.get(tuple(ranks))
    part = known() if known else None
    if part is None:
        of_world = dist.get_process_group_ranks(whole)
        part = _new_group(whole, [of_world[rank] for rank in ranks])
        parts[tuple(ranks)] = weakref.ref(part)
    return part


def _new_group(first: dist.ProcessGroup, ranks: list[int]) -> dist.ProcessGroup:
    """Another one of these ranks of the world, in this order, with the backend and time-out of the first."""
    device = first._device_types[0]
    timeout: timedelta = first._get_backend(device).options._timeout
    if is_outside(first):
        return more_of(first, ranks, timeout)
    # In their order, which sorting, the default, would lose; torch 2.11 may not have the argument.
    order: dict[str, Any] = {} if ranks == sorted(ranks) else {"sort_ranks": False}
    # Local: other ranks of the world need not know of it.
    backend = dist.get_backend_config(first)
    made: dist.ProcessGroup = dist.new_group(ranks, timeout, backend, use_local_synchronization=True, **order)
    return made


def _hold_for_good(process_groups: Iterable[dist.ProcessGroup]) -> None:
    """Never let go of these: they have collectives that will never end, and to let go of one waits for those, until
    their time-out. So a destroy_process_group() after a CallMismatch, as in a `finally`, would hide for half an hour
    what was raised; and so would the end of the program, with connections that its peers take for alive."""
    for process_group in process_groups:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(process_group))


def abort_nccl(process_group: dist.ProcessGroup) -> None:
    """End all communicators of NCCL that TorchGroups of this process group have. Nothing where gloo carries all."""
    _communicators_of(process_group).abort()


def _communicators_of(process_group: dist.ProcessGroup) -> Communicators:
    found = _ending.get(process_group)
    if found is None:
        found = _ending[process_group] = Communicators()
        found.add(process_group)
        if is_nccl(process_group) and ends_the_process():
            logger.warning(
                "nccl_ends_the_process reason=%r instead=%r",
                "TORCH_NCCL_ASYNC_ERROR_HANDLING is neither 0 nor 2: the loss of a peer ends this process",
                "thinwire.comm.prepare_nccl() before init_process_group()",
            )
    return found


def _detector_of(process_group: dist.ProcessGroup, rank: int, size: int) -> StoreDetector:
    if process_group not in _detectors:
        store = dist.distributed_c10d._get_process_group_store(process_group)
        detector = _detectors[process_group] = StoreDetector(store, rank, size)
        weakref.finalize(process_group, _end, weakref.ref(process_group), detector)
    return _detectors[process_group]


def _end(process_group: weakref.ref[dist.ProcessGroup], detector: StoreDetector) -> None:
    """At the end of the process group, or of the program."""
    if process_group() is None:
        detector.end("it destroyed its process group")
        return
    error = getattr(sys, "last_value", None)  # what the interpreter ends by, if by an exception
    ended_by = "" if error is None or hasattr(sys, "ps1") else f" with {type(error).__name__}: {error}"[:500]
    detector.end(f"its program ended{ended_by}")
