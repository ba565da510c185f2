"""What runs the second half of an exchange while the first goes on: a thread, a stream of a GPU, or the caller later.

Stages are given in order and run in that order, one at a time; the first that raises ends them: those behind it do not
run, and `drain` hands the exception over. On a CPU a thread of its own runs them: they wait for the wire and run
kernels without the interpreter's lock, so it takes nothing from the caller. A drain that a signal has cut short may be
called again. On a GPU the exchange has a stream of its own, fed by events:

    backward's stream   |.. g0 ..|.. g1 ..|.. g2 ..|                               | wait | update ...
                                 v        v        v                                  ^
    side stream                  | encode | encode | serve 0 | encode | serve 1 | ... |
                                       v ^      v ^
    NCCL's streams               | all-to-all | all-gather | ...

The host queues all of it and goes on; the side stream runs a bucket behind (a *lag* of 1), so that no bucket's encoding
waits for the collective of the one before. finish() asks an event whether the GPU is through (groups/watching.py).

Where a peer is lost the group aborts its communicators. Their kernels end, and the serve that is queued behind them
would add garbage to the kept sums, of which nobody could undo it. So each serve looks at a *gate* first, a number on
the GPU that is closed before anything is aborted, and spoils its own input where it is closed:

    closed_K[k] <- closed          queued behind the all-to-all of bucket k, before its serve
    fuse        <- NaN             where closed_K[k]: no block is finite then, and none is written (kernels)

What was found there tells after a failure exactly which buckets were served: the gate was open, so nothing had been
aborted, so the event behind the all-to-all meant that the rows were there. And of the others no rank can have a result,
for a row that was served of spoilt input says so in its flag. An event alone does not tell: it also fires when a
collective was aborted, and what it said before the abort may be different a moment later.

Source: CUDA C++ Programming Guide, "Streams" and "Events"; the rest is ours.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from queue import SimpleQueue

import torch
from torch import Tensor

from thinwire.comm.groups.watching import Watching, await_device, before_abort, hold, poll
from thinwire.comm.protocol import Group, Pending
from thinwire.comm.signals import armed
from thinwire.comm.streams import Event, Streams, streams_for

Stage = Callable[[int], None]
"""One stage of bucket k."""
CLOSE_S = 0.5
"""How long closing the gate may take: one tiny kernel on a stream of its own."""
DRAIN_S = 5.0
"""How long the GPU may take, after a failure, to come to the end of what was queued."""
_NOTHING = nullcontext()


def pipeline_for(group: Group, second: Group, like: Tensor, num_buckets: int) -> Pipeline:
    """What serves buckets of exchanges of such vectors over these two communicators, which may be one.

    The only place where it is decided.
    """
    if second is group:
        return Pipeline()  # one communicator: one order for both phases
    streams = streams_for(like.device)
    return ThreadPipeline() if streams is None else SidePipeline(group, streams, like, num_buckets)


def staged(group: Group, like: Tensor, num_buckets: int) -> Pipeline:
    """What runs stages one bucket behind, in the caller's thread, where all collectives have one order."""
    streams = streams_for(like.device) if isinstance(group, Watching) else None
    return Pipeline(lag=1) if streams is None else SidePipeline(group, streams, like, num_buckets)


class Pipeline:
    """Runs stages in the order in which they were submitted: here in the caller's thread, `lag` stages behind.

    lag: 0 runs a stage at once. What the stages compute on is a pipeline's affair too: here work is done when a call
    returns, and a collective that has failed raises.
    """

    def __init__(self, lag: int = 0) -> None:
        self._lag = lag
        self._waiting: deque[tuple[Stage, int]] = deque()
        self._error: Exception | None = None

    @property
    def failed(self) -> bool:
        """Has a stage raised since the last drain? What is submitted then does not run."""
        return self._error is not None

    def submit(self, stage: Stage, bucket: int) -> None:
        """Run stage(bucket) after all that was submitted before."""
        self._waiting.append((stage, bucket))
        self._run(self._lag)

    def drain(self) -> BaseException | None:
        """Wait until nothing is left to run. Returns what the first stage that failed has raised, and forgets it."""
        self._run(0)
        error, self._error = self._error, None
        return error

    def _run(self, left: int) -> None:
        while len(self._waiting) > left:
            stage, bucket = self._waiting.popleft()
            if self._error is None:
                try:
                    stage(bucket)
                except Exception as error:  # noqa: BLE001 - drain() hands it to the waiting call
                    self._error = error

    def fed(self) -> AbstractContextManager[object]:
        """Inside, the exchange's work is begun, behind all that the caller has begun."""
        return _NOTHING

    def hold(self, pending: Pending) -> None:
        """What is begun from now on comes after this collective. Raises: PeerLost."""
        pending.wait()

    def join(self) -> None:
        """What the caller begins from now on comes after all work of the exchange."""

    def host(self, x: Tensor) -> Tensor:
        """x, small, where the host can read it. Waits for the device. Raises: PeerLost."""
        return x

    def admit(self, k: int, fuse: Callable[[], Tensor]) -> None:
        """Spoil fuse(), by NaN or 0, unless what the collectives of bucket k wrote is what peers have sent."""

    def admitted(self, num: int) -> int | None:
        """After a failure: how many of the first `num` buckets were admitted. None where nobody can tell."""
        return num


class ThreadPipeline(Pipeline):
    """A daemon thread, started at the first submit; it ends with this object."""

    def __init__(self) -> None:
        super().__init__()
        self._todo: SimpleQueue[tuple[Stage, int] | threading.Lock | None] = SimpleQueue()
        self._raised = _Raised()
        self._started = False

    @property
    def failed(self) -> bool:
        """Has a stage raised since the last drain?"""
        return self._raised.first is not None

    def submit(self, stage: Stage, bucket: int) -> None:
        """Hand it to the thread."""
        if not self._started:
            self._started = True
            arguments = (self._todo, self._raised)
            threading.Thread(target=_run, args=arguments, name="thinwire-exchange", daemon=True).start()
            weakref.finalize(self, self._todo.put, None)
        self._todo.put((stage, bucket))

    def drain(self) -> BaseException | None:
        """Wait for the thread to have done, or passed over, all that was submitted."""
        if not self._started:
            return None
        reached = threading.Lock()
        reached.acquire()
        self._todo.put(reached)  # behind all that was submitted; the thread releases it when it is there
        with armed():
            reached.acquire()
        first, self._raised.first = self._raised.first, None
        return first


class _Raised:
    """What the first stage that failed has raised."""

    first: BaseException | None = None


def _run(todo: SimpleQueue[tuple[Stage, int] | threading.Lock | None], raised: _Raised) -> None:
    # Knows these two only: a reference to the exchange would keep it, and this thread, alive for good.
    while (item := todo.get()) is not None:
        if not isinstance(item, tuple):
            item.release()
        elif raised.first is None:
            try:
                item[0](item[1])
            except BaseException as error:  # noqa: BLE001 - drain() hands it to the waiting call
                raised.first = error
        item = None


class SidePipeline(Pipeline):
    """A Pipeline on a stream of its own: the caller's thread queues, a stage behind."""

    def __init__(self, group: Group, streams: Streams, like: Tensor, num_buckets: int) -> None:
        super().__init__(lag=1)
        self._group, self._streams = group, streams
        self._side = streams.stream()
        self._closed_K = torch.zeros(num_buckets, dtype=torch.bool, device=like.device)
        """Of each bucket, what its last serve found the gate to be."""
        self._closed_k = list(self._closed_K.unbind())
        self._pinned: dict[tuple[torch.Size, torch.dtype], Tensor] = {}
        """Pinned memory of the host, by what is copied there."""
        self.gate = DeviceGate(streams, like)
        before_abort(group, self.gate)

    def fed(self) -> AbstractContextManager[object]:
        """Inside, work is queued on the side stream, behind all that the caller has queued on its own until now."""
        self._side.wait_event(self._streams.current().record_event())
        return self._streams.on(self._side)

    def hold(self, pending: Pending) -> None:
        """The stream waits, not the host."""
        hold(pending)

    def join(self) -> None:
        """The caller's stream waits for the side stream."""
        self._streams.current().wait_event(self._side.record_event())

    def host(self, x: Tensor) -> Tensor:
        """A copy in pinned memory, read when an event says that it is there. Until the next call for such a tensor."""
        copied, event = self._copied(x)
        await_device(self._group, "finish", event.query)
        return copied

    def admit(self, k: int, fuse: Callable[[], Tensor]) -> None:
        """Two small kernels. fuse: floats, or bytes of which 0 says that a row is unusable."""
        closed, spoilt = self._closed_k[k], fuse()
        closed.copy_(self.gate.closed)
        spoilt.masked_fill_(closed, torch.nan if spoilt.is_floating_point() else 0)

    def admitted(self, num: int) -> int | None:
        """Closes the gate. Waits for the device, DRAIN_S at most: None where that was too short, or the gate stuck."""
        self.gate.close()
        with self.fed():
            copied, event = self._copied(self._closed_K)
        if not poll(event.query, DRAIN_S) or not self.gate.is_closed:
            return None
        found = copied[:num].tolist()
        return found.index(True) if True in found else num

    def _copied(self, x: Tensor) -> tuple[Tensor, Event]:
        key = x.shape, x.dtype
        copied = self._pinned.get(key)
        if copied is None:
            copied = self._pinned[key] = self._streams.pinned(x)
        copied.copy_(x, non_blocking=True)
        return copied, self._streams.current().record_event()


class DeviceGate:
    """A number on the GPU: 0 while open. closed: bool, 0-dim. is_closed: had the GPU written it in time?"""

    def __init__(self, streams: Streams, like: Tensor) -> None:
        self._streams, self._stream = streams, streams.stream()
        self.closed = torch.zeros((), dtype=torch.bool, device=like.device)
        self._stream.wait_event(streams.current().record_event())
        self.is_closed = self._is_asked = False

    def close(self) -> None:
        """Write it, and wait until it is there, CLOSE_S at most. For good: the caller leaves the group.

        On a stream of its own, which waits for no collective, so that it comes before what is queued behind one. Once:
        where it came too late, something may have been aborted meanwhile, and is_closed stays False.
        """
        if self._is_asked:
            return
        self._is_asked = True
        with self._streams.on(self._stream):
            self.closed.fill_(True)
            event = self._stream.record_event()
        self.is_closed = poll(event.query, CLOSE_S)
