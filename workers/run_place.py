"""Where does a process of a run keep its files, and how do the processes of a run hear of each other?

    SharedPlace   one folder, that the service and all processes of the run see
    RemotePlace   a folder of this process's own; what others have to know goes through the service

Both begin with a run folder, which most of what runs in a process is content with.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from pydantic import ValidationError

from thinwire.contract.files import write_first
from thinwire.contract.reports import Failure, Telemetry, WantedWorkers
from thinwire.contract.run_folder import RunFolder
from thinwire.workers.telemetry.delivery import ServiceClient, ServiceError, ServiceUnavailable
from thinwire.workers.telemetry.remote import Papers, RemoteRun

logger = logging.getLogger(__name__)

LAST_WORD_S = 60.0
"""How long the end of a run waits for a service that does not answer."""
ASK_S = 5.0
"""Between two questions whether another process has failed, while one waits."""


class Place(Protocol):
    """What a process of a run has. wanted_look_s: how often to look whether other workers are wanted."""

    run_dir: Path
    wanted_look_s: float

    @property
    def papers(self) -> Papers | None:
        """What makes a place of its own for another process; None where all share this one."""

    def begin(self) -> None:
        """Bring into the run folder what an earlier process of the run has left, before a worker begins."""

    def wanted(self) -> WantedWorkers | None:
        """How many workers are wanted now; None where that cannot be found out now."""

    def has_failed(self) -> bool:
        """Has a process of this run said that it cannot go on?"""

    def fail(self, failure: Failure) -> None:
        """Say so: the first one to say it is heard. Raises OSError."""

    def failure(self) -> Failure | None:
        """What was said."""

    def has_succeeded(self) -> bool:
        """Is the summary there?"""


def place_of(run_dir: Path, papers: Papers | None, attempt: int | Callable[[], int]) -> Place:
    """The place of this process. papers: where it shares no folder; run_dir is then its own."""
    return SharedPlace(run_dir) if papers is None else RemotePlace(run_dir, papers, attempt)


class SharedPlace:
    """The folder is all there is."""

    papers: Papers | None = None
    wanted_look_s: float = 0.5

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self._folder = run_dir, RunFolder(run_dir)

    def begin(self) -> None:
        """It is there."""

    def wanted(self) -> WantedWorkers | None:
        """What workers.json says."""
        file = self._folder.workers
        if file.exists():
            try:
                return WantedWorkers.model_validate_json(file.read_text())
            except (OSError, ValidationError) as error:
                logger.warning("wanted_workers_unreadable path=%s reason=%r", file, str(error))
        return None

    def has_failed(self) -> bool:
        """Is there a failure.json?"""
        return self._folder.failure.exists()

    def fail(self, failure: Failure) -> None:
        """Write failure.json, whole or not at all."""
        if not write_first(self._folder.failure, failure.model_dump_json(indent=2) + "\n"):
            logger.info("failure_already_told path=%s", self._folder.failure)

    def failure(self) -> Failure | None:
        """failure.json."""
        return Failure.model_validate_json(self._folder.failure.read_text()) if self.has_failed() else None

    def has_succeeded(self) -> bool:
        """Is there a summary.json?"""
        return self._folder.summary.exists()


class RemotePlace:
    """Asks the service, with the job's token."""

    wanted_look_s: float = 1.0

    def __init__(self, run_dir: Path, papers: Papers, attempt: int | Callable[[], int]) -> None:
        self.run_dir, self._papers, self._folder = run_dir, papers, RunFolder(run_dir)
        self.client = ServiceClient(run_dir, 0, attempt)
        self.run = RemoteRun(run_dir, self.client)
        self._asked_at, self._failed = -ASK_S, False

    @property
    def papers(self) -> Papers | None:
        """Those that it was made of."""
        return self._papers

    def begin(self) -> None:
        """Fetch the size of buckets."""
        self.run.fetch("buckets.json")

    def wanted(self) -> WantedWorkers | None:
        """What the service says."""
        try:
            return self.run.now().wanted
        except ServiceError:  # the client tells of it, once
            return None

    def has_failed(self) -> bool:
        """What the service says, asked every ASK_S; of this process itself, at once."""
        if not self._failed and time.monotonic() - self._asked_at >= ASK_S:
            self._asked_at = time.monotonic()
            try:
                self._failed = self.run.now().failure is not None
            except ServiceError:
                return False
        return self._failed

    def fail(self, failure: Failure) -> None:
        """Post it, trying for LAST_WORD_S; what is left of it then is the log."""
        self._failed = True
        write_first(self._folder.failure, failure.model_dump_json(indent=2) + "\n")
        until = time.monotonic() + LAST_WORD_S
        while True:
            try:
                if self.run.now().failure is None:
                    self.client.post(Telemetry(attempt=self.client.attempt, failure=failure))
                return
            except ServiceUnavailable as error:
                if time.monotonic() > until:
                    logger.error("failure_undelivered reason=%r", str(error))
                    return
                time.sleep(1.0)
            except ServiceError as error:
                logger.error("failure_undelivered reason=%r", str(error))
                return

    def failure(self) -> Failure | None:
        """What the service says, else what this process itself has said."""
        try:
            return self.run.now().failure
        except ServiceError:
            own = self._folder.failure
            return Failure.model_validate_json(own.read_text()) if own.exists() else None

    def has_succeeded(self) -> bool:
        """Has the service the summary? It is asked for LAST_WORD_S."""
        until = time.monotonic() + LAST_WORD_S
        while True:
            try:
                return self.run.now().succeeded
            except ServiceError:
                if time.monotonic() > until:
                    return False
                time.sleep(1.0)
