"""SIGTERM to a worker's process is a notice: it hands over at the next boundary, and goes.

Whoever sends it, such as a cloud that takes a machine back, gives some time before SIGKILL. A second SIGTERM, or one
before the train function runs, ends the process as Ray would have it.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

logger = logging.getLogger(__name__)

told_to_leave = threading.Event()
"""Set in a worker's process when it has been told to end while its train function runs. A train function that watches
it leaves in order and returns `Left`; the process ends in any case after the job's grace period."""


def heed_sigterm(grace_s: float, is_busy: Callable[[], bool]) -> None:
    """Make SIGTERM a notice from here on. Only in a process's main thread, which must run Python now and then.

    grace_s: from the notice to the end of the process. is_busy: does the train function run?
    """
    before = signal.getsignal(signal.SIGTERM)

    def told(number: int, frame: FrameType | None) -> None:
        if is_busy() and not told_to_leave.is_set():
            told_to_leave.set()
            threading.Thread(target=_end, args=(grace_s,), name="thinwire-notice", daemon=True).start()
        elif callable(before):
            before(number, frame)
        else:
            sys.exit(1)

    signal.signal(signal.SIGTERM, told)


def _end(grace_s: float) -> None:
    logger.warning("told_to_leave pid=%d signal=SIGTERM grace_s=%g", os.getpid(), grace_s)
    time.sleep(grace_s)
    logger.warning("worker_ends pid=%d reason=it has not left within %g s of SIGTERM", os.getpid(), grace_s)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)  # the train function may hang: nothing else is sure
