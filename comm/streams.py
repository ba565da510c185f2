"""On which stream of a GPU does work go? A *stream* is a queue that a GPU runs in order; two run beside each other.

    event = streams.current().record_event()      what has been queued so far, on the stream that is current
    side.wait_event(event)                        what is queued on `side` from here on runs after that
    with streams.on(side): ...                    what is queued inside goes there
    event.query()                                 has the GPU come so far? Asks, and does not wait

The exchange knows these few calls only, so that tests give it streams that run late and out of order, on a CPU. What
they are on a device is decided here, in streams_for().
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol, cast

import torch
from torch import Tensor


class Event(Protocol):
    """A place in a stream."""

    def query(self) -> bool:
        """Has all that was queued before it been run?"""


class Stream(Protocol):
    """A queue of work."""

    def record_event(self) -> Event:
        """The place behind all that is queued here."""

    def wait_event(self, event: Event) -> None:
        """Run what is queued from now on after that event, on whatever stream it is. The host does not wait."""


class Streams(Protocol):
    """The streams of one device."""

    def stream(self) -> Stream:
        """A new one."""

    def current(self) -> Stream:
        """That on which work goes now, in this thread."""

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        """Inside, in this thread, work goes there."""

    def pinned(self, like: Tensor) -> Tensor:
        """Memory of the host, like this tensor, to which a copy with non_blocking=True is queued as work is."""


class CudaStreams:
    """torch.cuda's. AMD's GPUs too, which torch calls cuda."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def stream(self) -> Stream:
        """As Streams.stream."""
        return cast(Stream, torch.cuda.Stream(self._device))  # type: ignore[no-untyped-call]

    def current(self) -> Stream:
        """As Streams.current."""
        return cast(Stream, torch.cuda.current_stream(self._device))

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        """As Streams.on."""
        return torch.cuda.stream(cast(torch.cuda.Stream, stream))

    def pinned(self, like: Tensor) -> Tensor:
        """As Streams.pinned."""
        return torch.empty_like(like, device="cpu", pin_memory=True)


def streams_for(device: torch.device) -> Streams | None:
    """Those of this device; None where work is done when a call returns, as on CPUs."""
    return CudaStreams(device) if device.type == "cuda" else None
