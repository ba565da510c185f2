"""Keeps Ray of a box running, until it is asked to end: `python -m thinwire.boxes.supervisor FOLDER`.

Ray that ends is started again, soon at first, then a little later each time. A head goes on from what it has written
down; a box whose head is away tries to join it until it is back.
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
from thinwire.service.launch.protocol import LauncherError
from thinwire.service.launch.ray_head import Head

_log = logging.getLogger("thinwire.boxes")

WATCH_S: Final = 1.0
LONGEST_WAIT_S: Final = 5.0


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
        ray.end()
    finally:
        ray.release()


if __name__ == "__main__":
    sys.exit(main())
