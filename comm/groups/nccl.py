"""What torch's NCCL process groups do about a lost peer, and what they are configured to do instead: nothing.

A process group of NCCL has a thread that looks after its collectives, the *watchdog*. Read in PyTorch's
ProcessGroupNCCL.cpp, of a version whose names, those below, are in the header of torch 2.13; not tried:

* The watchdog ends the process where NCCL tells of an error, or a collective takes longer than the group's time-out
  (handleException), unless TORCH_NCCL_ASYNC_ERROR_HANDLING is 0 or 2. The default is 3, and torchrun sets 1. With 2 it
  aborts communicators by itself (abortComms), at a moment of its own: kernels end, and what is queued behind them runs
  on garbage, before a gate (watching.py) is closed. So it is 0: nobody aborts but us.
* Before it does any of that it sleeps, four times TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC: a minute by default. It holds
  the lock meanwhile that the start of every collective takes (workMetaListMutex_), and the end of the process group
  waits for it (join). So it is 0.
* Another thread, the *heartbeat monitor*, ends the process where the watchdog hangs, or where any rank has written
  into the store that it saw an error (kStoreDumpKey): one rank's watchdog would end all. TORCH_NCCL_ENABLE_MONITORING=0
  and TORCH_NCCL_DUMP_ON_TIMEOUT=0 keep both from it.
* Work.wait() makes the current stream wait, not the host. TORCH_NCCL_BLOCKING_WAIT would hold up the host, and there is
  no watchdog then. Where Work.is_completed() has been asked before, wait() aborts the communicator of a failed
  collective (exception(), abort()): so that is not asked here of what runs on NCCL, events are.
* An event's query() may hang where another thread is in a synchronize() of the device (finishedGPUExecutionInternal).
* abort() of a process group waits for its communicators up to the group's time-out, ten minutes by default. One
  communicator's abort may wait for kernels of another one, so they are aborted beside one another
  (pytorch issue 119797), each in a thread that nobody waits for longer than ABORT_S.

All of these variables are read where a process group is made.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref

import torch.distributed as dist

from thinwire.comm.groups.watching import Gate
from thinwire.comm.signals import deferred

logger = logging.getLogger(__name__)

SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
}
"""With these a lost peer is a PeerLost, and never the end of this process."""
ABORT_S = 2.0
"""How long an abort waits for it. NCCL's own threads see the flag within a second. For the kernels themselves the
exchange waits after that (exchange/pipeline.py)."""


def prepare_nccl() -> None:
    """Set SETTINGS in this process's environment, over what is there: torchrun sets one of them otherwise.

    Before a process group of NCCL is made; what is made before keeps what it has read.
    """
    os.environ.update(SETTINGS)


def ends_the_process() -> bool:
    """Would a process group of NCCL that is made now end this process where a peer is lost?"""
    return os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3") not in ("0", "2")


def is_nccl(process_group: dist.ProcessGroup) -> bool:
    """Does NCCL carry what lies on GPUs?"""
    return "nccl" in dist.get_backend_config(process_group)


class Communicators:
    """All process groups of the same ranks, or of some of them, that end together: the first, the second, the parts."""

    def __init__(self) -> None:
        self._made: list[weakref.ref[dist.ProcessGroup]] = []
        self._gates: weakref.WeakSet[Gate] = weakref.WeakSet()
        self._lock = threading.Lock()
        self.aborted = False
        self.failures = 0
        """Collectives that have failed here, of any of them, whatever carries them."""

    def add(self, process_group: dist.ProcessGroup) -> None:
        """One more; nothing where it is known, or where NCCL carries nothing of it. Weak."""
        if is_nccl(process_group) and all(known() is not process_group for known in self._made):
            self._made.append(weakref.ref(process_group))

    def before_abort(self, gate: Gate) -> None:
        """Close this first. Weak."""
        self._gates.add(gate)

    @property
    def to_abort(self) -> bool:
        """Would abort() have something to do?"""
        return not self.aborted and any(known() is not None for known in self._made)

    def abort(self) -> None:
        """Close all gates, then abort all that NCCL carries; the kernels of their collectives end. Once.

        Takes ABORT_S at most, and what each gate takes. An abort that takes longer goes on in a thread of its own.
        Signals wait for the end of it: half of it would leave kernels that never end.
        """
        with deferred(to_the_end=True), self._lock:
            if self.aborted:
                return
            alive = [one for known in self._made if (one := known()) is not None]
            if not alive:
                return
            self.aborted = True
            for gate in list(self._gates):
                gate.close()
            until = time.monotonic() + ABORT_S
            threads = [threading.Thread(target=_abort, args=(one,), daemon=True) for one in alive]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(max(0.0, until - time.monotonic()))
            if any(thread.is_alive() for thread in threads):
                logger.warning("nccl_abort_hangs seconds=%.0f communicators=%d", ABORT_S, len(threads))


def has_failed(process_group: dist.ProcessGroup) -> bool:
    """Has the watchdog seen an error of NCCL's, or a collective beyond its time-out?"""
    for backend in process_group._device_types:
        error_of = getattr(process_group._get_backend(backend), "get_error", None)
        if error_of is not None and error_of().name != "SUCCESS":
            return True
    return False


def _abort(process_group: dist.ProcessGroup) -> None:
    try:
        process_group.abort()
    except RuntimeError as error:  # of torch, after the time-out of the group
        logger.warning("nccl_abort_failed reason=%s", error)
