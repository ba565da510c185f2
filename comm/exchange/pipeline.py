"""Who does the second half of an exchange while the first goes on? A thread, or the caller a little later.

Stages are given in order and run in that order, one at a time; the first that raises ends them: those behind it do not
run, and `drain` hands the exception over. The stages wait for the wire and run kernels without the interpreter's lock,
so a thread of their own takes nothing from the caller. A drain that a signal has cut short may be called again.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from queue import SimpleQueue
from typing import Protocol

from torch import Tensor

from thinwire.comm.errors import CommError
from thinwire.comm.protocol import Pending
from thinwire.comm.signals import armed

Stage = Callable[[int], None]
"""One stage of bucket k."""


class Pipeline(Protocol):
    """Runs stages in the order in which they were submitted.

    What it computes on, and when, is also its affair: on a GPU that is a stream of its own (side.py), which says what
    the last five methods are for. Elsewhere they do nothing.
    """

    @property
    def failed(self) -> bool:
        """Has a stage raised since the last drain? What is submitted then does not run."""

    def submit(self, stage: Stage, bucket: int) -> None:
        """Run stage(bucket) after all that was submitted before."""

    def drain(self) -> BaseException | None:
        """Wait until nothing is left to run. Returns what the first stage that failed has raised, and forgets it."""

    def fed(self) -> AbstractContextManager[object]:
        """Inside, the exchange's work is begun, behind all that the caller has begun."""

    def hold(self, pending: Pending) -> None:
        """What is begun from now on comes after this collective. Raises: PeerLost."""

    def join(self) -> None:
        """What the caller begins from now on comes after all work of the exchange."""

    def host(self, x: Tensor) -> Tensor:
        """x, small, where the host can read it. Waits for the device. Raises: PeerLost."""

    def admit(self, k: int, fuse: Callable[[], Tensor]) -> None:
        """Spoil fuse(), by NaN or 0, unless what the collectives of bucket k wrote is what peers have sent."""

    def admitted(self, num: int) -> int | None:
        """After a failure: how many of the first `num` buckets were admitted. None where nobody can tell."""


def settle(pipeline: Pipeline, *waiting: list[Pending | None]) -> BaseException | None:
    """Run all stages, then wait until none of these collectives touches a buffer, on a GPU for the caller's stream.

    waiting: modified: nothing is left in them. Returns the first error; later ones follow from it.
    """
    with pipeline.fed():
        first = pipeline.drain()
        for pendings in waiting:
            for k, pending in enumerate(pendings):
                if pending is not None:
                    try:
                        pipeline.hold(pending)
                    except CommError as error:
                        first = first or error
                    pendings[k] = None
    pipeline.join()
    return first


_NOTHING = nullcontext()


class OnTheSpot:
    """Mixin: work is done when a call returns, and a collective that has failed raises."""

    def fed(self) -> AbstractContextManager[object]:
        """Nothing."""
        return _NOTHING

    def hold(self, pending: Pending) -> None:
        """Wait for it."""
        pending.wait()

    def join(self) -> None:
        """Nothing."""

    def host(self, x: Tensor) -> Tensor:
        """Itself."""
        return x

    def admit(self, k: int, fuse: Callable[[], Tensor]) -> None:
        """Always."""

    def admitted(self, num: int) -> int | None:
        """All."""
        return num


class InlinePipeline(OnTheSpot):
    """The caller's thread, `lag` stages behind what was submitted: 0 runs a stage at once."""

    def __init__(self, lag: int = 0) -> None:
        self._lag = lag
        self._waiting: deque[tuple[Stage, int]] = deque()
        self._error: Exception | None = None

    @property
    def failed(self) -> bool:
        """Has a stage raised since the last drain?"""
        return self._error is not None

    def submit(self, stage: Stage, bucket: int) -> None:
        """Run stages until only `lag` wait."""
        self._waiting.append((stage, bucket))
        self._run(self._lag)

    def drain(self) -> BaseException | None:
        """Run all that waits."""
        self._run(0)
        error, self._error = self._error, None
        return error

    def _run(self, left: int) -> None:
        while len(self._waiting) > left:
            stage, bucket = self._waiting.popleft()
            if self._error is None:
                try:
                    stage(bucket)
                except Exception as error:  # noqa: BLE001 - drain() hands it to whoever waits for the exchange
                    self._error = error


class ThreadPipeline(OnTheSpot):
    """A daemon thread, started at the first submit; it ends with this object."""

    def __init__(self) -> None:
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
            except BaseException as error:  # noqa: BLE001 - drain() hands it to whoever waits for the exchange
                raised.first = error
        item = None
