"""Keeps Ray of a box running, until it is asked to end: `python -m thinwire.boxes.supervisor FOLDER`.

Ray that ends is started again, soon at first, then a little later each time. A head goes on from what it has written
down; a box whose head is away tries to join it until it is back. A box that is to end tells its workers first, so that
they hand over what they hold to those on other boxes.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import threading
from pathlib import Path
from typing import Final

from thinwire.boxes.box import BoxError, BoxFolder, BoxRay
from thinwire.service.launch import processes
from thinwire.service.launch.protocol import LauncherError
from thinwire.service.launch.ray_head import Head

_log = logging.getLogger("thinwire.boxes")

WATCH_S: Final = 1.0
LONGEST_WAIT_S: Final = 5.0
LEAVE_S: Final = 35.0
"""How long workers that are told may take: a little longer than the default of workers.grace_s."""
WORKER: Final = b"ray::ElasticWorker"
"""How Ray calls a worker's process."""


def main(arguments: list[str] | None = None) -> int:
    """Supervise the box of a folder until SIGTERM, SIGINT or SIGHUP. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="thinwire.boxes.supervisor", description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path)
    folder = BoxFolder(parser.parse_args(arguments).folder)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    closing = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: closing.set())
    try:
        supervise(folder, closing)
    except (BoxError, LauncherError) as error:
        _log.error("supervisor_ends reason=%s", error)
        return 1
    return 0


def supervise(folder: BoxFolder, closing: threading.Event) -> None:
    """Have Ray of this box run until `closing`, and then end it. Raises BoxError, LauncherError."""
    box = folder.box()
    if box is None:
        raise BoxError(f"{folder.path} is no box: `thinwire up` makes one")
    ray = BoxRay(folder, box)
    ray.acquire()
    try:
        serving: Head | None = None
        starts, wait_s = 0, 0.0
        folder.say(False, "it is starting", starts)
        while not closing.wait(wait_s):
            wait_s = WATCH_S
            ray.touch()
            if serving is not None and serving.alive():
                continue
            if serving is not None:
                _log.error("ray_lost keeper_pid=%d", serving.pid)
                folder.say(False, "Ray has ended, and is started again", starts)
            try:
                serving, starts = ray.adopt_or_start(closing), starts + 1
                folder.say(True, None, starts)
            except (LauncherError, OSError) as error:  # the head is away, the disk is full: it may pass
                serving, wait_s = None, LONGEST_WAIT_S
                if not closing.is_set():
                    _log.error("ray_start_failed next_in_s=%g error=%s", wait_s, error)
                    folder.say(False, str(error), starts)
        if box.role == "joined" and serving is not None:
            tell_workers(serving)
        ray.end()
    finally:
        ray.release()


def tell_workers(head: Head, leave_s: float = LEAVE_S) -> int:
    """Let the workers on this box hand over what they hold, and leave: SIGTERM, and SIGKILL after leave_s. How many.

    A head's own are not told: the driver of their job and its membership end with it, so there is nobody to hand to.
    """
    workers = [found for found in processes.descendants(head.pid) if _called(found.pid).startswith(WORKER)]
    if workers:
        _log.info("workers_told_to_leave pids=%s leave_s=%g", [one.pid for one in workers], leave_s)
        processes.end(lambda: workers, leave_s, leave_s + LONGEST_WAIT_S)
    return len(workers)


def _called(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has gone
        return b""


if __name__ == "__main__":
    sys.exit(main())
