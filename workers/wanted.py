"""How many workers does the owner of the job want now? The service says so in workers.json, and may say so again."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError

from thinwire.contract.reports import WantedWorkers
from thinwire.contract.run_folder import RunFolder
from thinwire.contract.spec import Workers

logger = logging.getLogger(__name__)

LOOK_S = 0.5


def wanted_workers(run_dir: Path, workers: Workers) -> WantedWorkers:
    """What workers.json says; what the spec says where there is no such file, or it cannot be read."""
    file = RunFolder(run_dir).workers
    if file.exists():
        try:
            return WantedWorkers.model_validate_json(file.read_text())
        except (OSError, ValidationError) as error:
            logger.warning("wanted_workers_unreadable path=%s reason=%r: the spec's are taken", file, str(error))
    return WantedWorkers(min=workers.min, max=workers.max, revision=0)


class WantedFollower:
    """Looks at workers.json every LOOK_S, in a thread, and hands on what has changed. `tell` may raise; then again."""

    def __init__(self, run_dir: Path, workers: Workers, tell: Callable[[WantedWorkers], None]) -> None:
        self._run_dir, self._workers, self._tell = run_dir, workers, tell
        self._told = wanted_workers(run_dir, workers)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="thinwire-wanted", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._closing.set()
        self._thread.join(5.0)

    def _run(self) -> None:
        while not self._closing.wait(LOOK_S):
            now = wanted_workers(self._run_dir, self._workers)
            if now == self._told:
                continue
            try:
                self._tell(now)
            except Exception:  # whatever Ray raises: the actor is being started again, and then it is told
                logger.warning("wanted_workers_untold min=%d max=%d", now.min, now.max, exc_info=True)
                continue
            logger.info("wanted_workers min=%d max=%d revision=%d", now.min, now.max, now.revision)
            self._told = now
