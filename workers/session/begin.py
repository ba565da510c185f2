"""A session where this process runs: under python, torchrun, or in a job, whose worker says so before it begins."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

import torch
import torch.distributed as dist

from thinwire.comm import SoloGroup, TorchGroup, prepare_nccl
from thinwire.comm.protocol import Group
from thinwire.contract.spec import Checkpoint
from thinwire.workers.ranks import FixedRanks
from thinwire.workers.session.session import Session
from thinwire.workers.session.training import Run, ScriptError, Surroundings
from thinwire.workers.telemetry.reporter import Reporter

_placed: ContextVar[tuple[Callable[[], Session], list[Session]] | None] = ContextVar("place of a script", default=None)


@contextmanager
def placed(around: Surroundings, make: Callable[[Surroundings], Session] = Session) -> Iterator[list[Session]]:
    """Inside, a session of this thread is of these surroundings. Gives the sessions that were begun."""
    begun: list[Session] = []
    token = _placed.set((lambda: make(around), begun))
    try:
        yield begun
    finally:
        _placed.reset(token)


def begin(folder: str | os.PathLike[str] | None = None, save_every: int = 500, keep: int = 2) -> Session:
    """A session where this script runs. In a job its file says what is kept and where.

    Raises: ScriptError for a second session in a job; RuntimeError where torch.distributed cannot be initialised.
    """
    there = _placed.get()
    if there is not None:
        make, begun = there
        if begun:
            raise ScriptError("session() for a second time in a job: a script trains one run")
        begun.append(make())
        return begun[0]
    return Session(_outside_of_a_job(folder, save_every, keep))


def _outside_of_a_job(folder: str | os.PathLike[str] | None, save_every: int, keep: int) -> Surroundings:
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    local = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    made = False
    if launched and not dist.is_initialized():
        if device.type == "cuda":
            torch.cuda.set_device(device)
            prepare_nccl()
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        made = True
    group: Group = TorchGroup() if dist.is_initialized() else SoloGroup()
    if save_every < 1 or keep < 1:
        raise ValueError(f"session(save_every={save_every}, keep={keep}): give numbers from 1")
    checkpoint = None if folder is None else Checkpoint(every_steps=save_every, keep=keep)
    directory = Path(tempfile.gettempdir()) if folder is None else Path(folder).resolve()
    if folder is not None:
        directory.mkdir(parents=True, exist_ok=True)
    return Surroundings(
        ranks=FixedRanks(group),
        device=device,
        run=Run(directory, created_at=time.time()),
        reporter=Reporter(),
        checkpoint=checkpoint,
        group=group,
        close=dist.destroy_process_group if made else lambda: None,
    )
