"""gloo and NCCL connect in threads of their own, which nobody has to wait for.

Both wait for peers in C++, up to a time-out, and nothing can end that. So they connect in a thread of their own.
The waiting thread listens to the membership too, and leaves the thread alone when the generation is over: it sleeps
in a system call, ends by itself at its time-out, and what it has made goes with it. A process ends when it has.

torch.distributed takes a transport from outside as a backend of a name of its own (Backend.register_backend). Its
maker runs before torch.distributed has noted anything of the new group, so that an attempt which ends in it leaves
nothing behind. gloo itself, of exactly this worker's address, is what is made; so also for the second communicator.

Measured with torch 2.13: gloo fails at once where a peer's port is closed; where its process is stopped it waits, takes
no processor time, and ends at five times the time-out that it was given.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from thinwire.workers.membership import GenerationOver

T = TypeVar("T")
CONNECT_S = 10.0
"""For a word of the store. gloo gives a connection five times as long: so long may a thread sleep that was left."""
LOOK_S = 0.02
"""How often the membership's word is looked for."""
GLOO = "membership_gloo"
"""The name of the backend."""


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


def connect_nccl(attempt: Attempt, device: torch.device) -> None:
    """Build the communicator of the default group, which NCCL would else do in its first collective."""
    group = dist.group.WORLD
    assert group is not None
    try:
        attempt.wait_for("connects by NCCL", lambda: group._get_backend(device).eager_connect_single_device(device))
    except GenerationOver:
        group.abort()
        raise
