"""Waiting for a GPU without being held up for good: a collective whose peer is gone never ends by itself.

NCCL's kernels spin on the GPU until the peer's data comes. A thread that asks the GPU for a number behind one, by
.item() or a synchronize(), is held up in the driver, where no exception of Python comes through. So the host asks an
event whether the GPU has come so far, and its group meanwhile looks whether a peer is gone. If one is, the group aborts
all of its communicators, which ends the kernels, and raises PeerLost.

What those kernels were to write is garbage then, and what is queued behind them runs on it. A Gate is how the exchange
bears that: it is closed before anything is aborted, and what was queued behind a collective looks first whether it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from thinwire.comm.protocol import Group, Pending
from thinwire.comm.signals import armed

PAUSE_S = 50e-6, 1e-3
"""Between two questions to an event: at first, and at most."""


class Gate(Protocol):
    """What is closed before communicators are aborted."""

    def close(self) -> None:
        """From now on nothing that is queued behind a collective takes what that has written for true."""


@runtime_checkable
class Watching(Protocol):
    """A Group of which collectives may run on a GPU."""

    def await_device(self, what: str, done: Callable[[], bool]) -> None:
        """Return when done(), an event's query. what: for messages.

        Raises: PeerLost, CallMismatch where that will never be; then every communicator of the group is aborted.
        """

    def before_abort(self, gate: Gate) -> None:
        """Close this before anything is aborted. Held weakly."""


def await_device(group: Group, what: str, done: Callable[[], bool]) -> None:
    """Return when done(). Raises: PeerLost, where the group looks after its peers."""
    awaits = getattr(group, "await_device", None)  # to ask for the protocol takes 15 us, and each step waits
    if awaits is None:
        poll(done)
    else:
        awaits(what, done)


def before_abort(group: Group, gate: Gate) -> None:
    """Have this group close the gate before it aborts anything, if it ever does."""
    if isinstance(group, Watching):
        group.before_abort(gate)


def hold(pending: Pending) -> None:
    """Make the current stream wait for it where it runs on a GPU, if it has a hold(); else wait. Raises: PeerLost."""
    held = getattr(pending, "hold", pending.wait)  # to ask for the protocol takes 15 us, and each bucket has two
    held()


def poll(done: Callable[[], bool], limit_s: float | None = None, look: Callable[[], None] = lambda: None) -> bool:
    """Ask until done(), or so long; look() between two questions. Returns whether it is done. Signals are handled."""
    until = None if limit_s is None else time.monotonic() + limit_s
    pause_s, most_s = PAUSE_S
    while not done():
        look()
        if until is not None and time.monotonic() >= until:
            return False
        with armed():
            time.sleep(pause_s)
        pause_s = min(2 * pause_s, most_s)
    return True
