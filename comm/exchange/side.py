"""The exchange on a GPU: on a stream of its own, fed by events, and safe from what an aborted collective leaves.

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

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from thinwire.comm.exchange.pipeline import InlinePipeline, Pipeline, ThreadPipeline
from thinwire.comm.groups.watching import Watching, await_device, before_abort, hold, poll
from thinwire.comm.protocol import Group, Pending
from thinwire.comm.streams import Event, Streams, streams_for

CLOSE_S = 0.5
"""How long closing the gate may take: one tiny kernel on a stream of its own."""
DRAIN_S = 3.0
"""How long the GPU may take, after a failure, to come to the end of what was queued."""


def pipeline_for(group: Group, second: Group, like: Tensor, num_buckets: int) -> Pipeline:
    """What serves buckets of exchanges of such vectors over these two communicators, which may be one.

    The only place where it is decided.
    """
    if second is group:
        return InlinePipeline()  # one communicator: one order for both phases
    streams = streams_for(like.device)
    return ThreadPipeline() if streams is None else SidePipeline(group, streams, like, num_buckets)


def staged(group: Group, like: Tensor, num_buckets: int) -> Pipeline:
    """What runs stages one bucket behind, in the caller's thread, where all collectives have one order."""
    streams = streams_for(like.device) if isinstance(group, Watching) else None
    return InlinePipeline(lag=1) if streams is None else SidePipeline(group, streams, like, num_buckets)


class SidePipeline(InlinePipeline):
    """A Pipeline on a stream of its own: the caller's thread queues, a stage behind."""

    def __init__(self, group: Group, streams: Streams, like: Tensor, num_buckets: int) -> None:
        super().__init__(lag=1)
        self._group, self._streams = group, streams
        self._side = streams.stream()
        self._closed_K = torch.zeros(num_buckets, dtype=torch.bool, device=like.device)
        """Of each bucket, what its last serve found the gate to be."""
        self._closed_k = list(self._closed_K.unbind())
        self._told: dict[tuple[torch.Size, torch.dtype], Tensor] = {}
        """Pinned memory of the host, by what is copied there."""
        self.gate = DeviceGate(streams, like)
        before_abort(group, self.gate)

    @contextmanager
    def fed(self) -> Iterator[None]:
        """Inside, work is queued on the side stream, behind all that the caller has queued on its own."""
        self._side.wait_event(self._streams.current().record_event())
        with self._streams.on(self._side):
            yield

    def hold(self, pending: Pending) -> None:
        """The stream waits, not the host."""
        hold(pending)

    def join(self) -> None:
        """The caller's stream waits for the side stream."""
        self._streams.current().wait_event(self._side.record_event())

    def host(self, x: Tensor) -> Tensor:
        """A copy in pinned memory, read when an event says that it is there. Until the next call for such a tensor."""
        told, event = self._copied(x)
        await_device(self._group, "finish", event.query)
        return told

    def admit(self, k: int, fuse: Callable[[], Tensor]) -> None:
        """Two small kernels. fuse: floats, or bytes of which 0 says that a row is unusable."""
        closed, spoilt = self._closed_k[k], fuse()
        closed.copy_(self.gate.closed)
        spoilt.masked_fill_(closed, torch.nan if spoilt.is_floating_point() else 0)

    def admitted(self, num: int) -> int | None:
        """Closes the gate. Waits for the device, DRAIN_S at most: None where that was too short, or the gate stuck."""
        self.gate.close()
        with self.fed():
            told, event = self._copied(self._closed_K)
        if not poll(event.query, DRAIN_S) or not self.gate.is_closed:
            return None
        found = told[:num].tolist()
        return found.index(True) if True in found else num

    def _copied(self, x: Tensor) -> tuple[Tensor, Event]:
        key = x.shape, x.dtype
        told = self._told.get(key)
        if told is None:
            told = self._told[key] = self._streams.pinned(x)
        told.copy_(x, non_blocking=True)
        return told, self._streams.current().record_event()


class DeviceGate:
    """A number on the GPU: 0 while open. closed: bool, 0-dim. is_closed: had the GPU written it in time?"""

    def __init__(self, streams: Streams, like: Tensor) -> None:
        self._streams, self._stream = streams, streams.stream()
        self.closed = torch.zeros((), dtype=torch.bool, device=like.device)
        self._stream.wait_event(streams.current().record_event())
        self.is_closed = self._is_asked = False

    def close(self) -> None:
        """Write it, and wait until it is there, CLOSE_S at most. For good: whoever closes it leaves the group.

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
