"""What a train function of an elastic job asks, in its worker's process.

Ray is imported in the calls: a function that only reads its config needs none of it.

SIGTERM to a worker's process is a notice: it hands over at the next boundary, and goes. The sender, such as a
cloud that takes a machine back, gives some time before SIGKILL. A second SIGTERM, or one before the train function
runs, ends the process as Ray would have it.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

logger = logging.getLogger(__name__)

CALL_S = 10.0
"""One question to the membership actor may take so long, for its process may be starting."""
_PAUSE_S = 0.2

lease_expired = threading.Event()
"""Set in a worker's process when nobody has asked for it during the lease. A train function that watches it may save
and return; the process ends soon after, in any case."""


class Lease:
    """Something happens unless it is renewed in time. The worker's process and the membership actor have one.

    Calls `on_expiry` in a thread of its own, when `lease_s` have gone without `renew`.

    repeats: again whenever so much time has gone; else once.
    """

    def __init__(self, lease_s: float, on_expiry: Callable[[], None], *, repeats: bool = False) -> None:
        self._lease_s = lease_s
        self._repeats = repeats
        self._tick_s = min(lease_s / 10, 0.5)
        self._on_expiry = on_expiry
        self._lock = threading.Lock()
        self._renewed = time.monotonic()
        self._holders = 0
        threading.Thread(target=self._watch, name="lease", daemon=True).start()

    def renew(self) -> None:
        """Start the lease again."""
        with self._lock:
            self._renewed = time.monotonic()

    @contextmanager
    def held(self) -> Iterator[None]:
        """The lease does not run within this block, and starts again after it."""
        with self._lock:
            self._holders += 1
        try:
            yield
        finally:
            with self._lock:
                self._holders -= 1
                self._renewed = time.monotonic()

    def _watch(self) -> None:
        before = time.monotonic()
        while True:
            time.sleep(self._tick_s)
            now = time.monotonic()
            with self._lock:
                # A process that was stopped or starved could not be asked: the gap does not count.
                if self._holders or now - before > 4 * self._tick_s:
                    self._renewed = now
                expired = now - self._renewed > self._lease_s
            if expired:
                self._on_expiry()
                if not self._repeats:
                    return
                self.renew()
            before = time.monotonic()


_facts: dict[str, Any] = {}
_lease: Lease | None = None


@dataclass(frozen=True)
class Left:
    """What a train function returns when this worker is to go while the job goes on: it was dismissed, or fenced.

    Its slot is then filled again, if so many workers are wanted. Whatever else is returned means that the training has
    come to its end: nobody is replaced any more, and the job ends when all have returned. fenced: it was not asked to
    go; its next one may be cut off from the others too, and waits for longer and longer.
    """

    reason: str
    fenced: bool = False


@dataclass(frozen=True)
class Failed:
    """What a train function returns that ended with an error of its own. Whose error that is says failures.py.

    kind: the error's class. step: the last that it has committed, generation: the last in which it was seated; 0: none.
    of_all: the ranks of that generation know of each other that it is the error of every one of them.
    """

    kind: str
    message: str
    step: int = 0
    generation: int = 0
    of_all: bool = False


_adopted_by = 0


def adopt(attempt: int) -> None:
    """This worker belongs to this attempt of the job from here on. By the worker, when its driver says so."""
    global _adopted_by
    _adopted_by = max(_adopted_by, attempt)


def adopted_by() -> int:
    """The attempt of the job whose driver has adopted this worker; 0 where none has but its own."""
    return _adopted_by


def seat(facts: dict[str, Any], lease: Lease | None = None) -> None:
    """Say what this process is, and what ends it. By the worker, before its train function runs."""
    global _lease
    _facts.clear()
    _facts.update(facts)
    _lease = lease


def renew_lease() -> None:
    """The membership has answered this worker, whose process goes on: who wants the job no more says so to it.

    The controller's own questions may be late by a minute where the network was away for less: TCP doubles the time
    between its tries. A membership that no driver asks dismisses its members, and its janitor ends what stays.
    """
    if _lease is not None:
        _lease.renew()


def with_facts(config: dict[str, Any]) -> dict[str, Any]:
    """The config of a train function with what this process is under "elastic"."""
    return {**config, "elastic": dict(_facts)}


def slot_of(config: dict[str, Any]) -> int:
    """The slot of the job that this worker fills; a replacement has the slot of whom it replaces."""
    return int(_elastic(config)["slot"])


def resolve(config: dict[str, Any], within_s: float = 60.0) -> tuple[str, int]:
    """Where the membership server listens now. Asked again whenever a connection fails: the server may have moved.

    Raises: TimeoutError after `within_s` without an answer.
    """
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError

    elastic = _elastic(config)
    until = time.monotonic() + within_s
    why: Exception | None = None
    while time.monotonic() < until:
        try:
            actor = ray.get_actor(elastic["membership"], namespace=elastic["namespace"])
            host, port = ray.get(actor.address.remote(), timeout=CALL_S)
            return str(host), int(port)
        except (ValueError, RayActorError, GetTimeoutError) as error:  # not there yet, or being restarted
            why = error
        time.sleep(_PAUSE_S)
    raise TimeoutError(
        f"the membership actor {elastic['membership']!r} gave no address in {within_s:g} s: see whether the head node "
        f"lives ({why})"
    )


def _elastic(config: dict[str, Any]) -> dict[str, Any]:
    elastic = config.get("elastic")
    if not isinstance(elastic, dict):
        raise ValueError(f"config has no 'elastic' ({sorted(config)}): start the train function by ElasticTrainer")
    return elastic


told_to_leave = threading.Event()
"""Set in a worker's process when it has been signalled to end while its train function runs. A train function that
watches it leaves in order and returns `Left`; the process ends in any case after the job's grace period."""


def heed_sigterm(grace_s: float, is_busy: Callable[[], bool]) -> None:
    """Make SIGTERM a notice from here on. Only in a process's main thread, which must run Python now and then.

    grace_s: from the notice to the end of the process. is_busy: does the train function run?
    """
    before = signal.getsignal(signal.SIGTERM)

    def notice(number: int, frame: FrameType | None) -> None:
        if is_busy() and not told_to_leave.is_set():
            told_to_leave.set()
            threading.Thread(target=_end, args=(grace_s,), name="thinwire-notice", daemon=True).start()
        elif callable(before):
            before(number, frame)
        else:
            sys.exit(1)

    signal.signal(signal.SIGTERM, notice)


def _end(grace_s: float) -> None:
    logger.warning("told_to_leave pid=%d signal=SIGTERM grace_s=%g", os.getpid(), grace_s)
    time.sleep(grace_s)
    logger.warning("worker_ends pid=%d reason=it has not left within %g s of SIGTERM", os.getpid(), grace_s)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)  # the train function may hang: nothing else is sure
