"""A job's run folder, seen from the service: what it writes before it submits, and what it reads when a run is over.

The layout is the contract in thinwire.contract.reports. job.json is written last, so its presence means that the
rest is there.
"""

from __future__ import annotations

import json
import logging
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic.types import JsonValue

from thinwire.contract.files import private_folder, write_private
from thinwire.contract.reports import WANTED_NAME, Failure, WantedWorkers
from thinwire.service.auth import token_hash

logger = logging.getLogger(__name__)

LARGEST_REPORT_BYTES = 1 << 20
_SUMMARY = TypeAdapter(dict[str, JsonValue])


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The folder at `path`; it need not exist yet."""

    path: Path

    def write(self, job: dict[str, Any], wanted: WantedWorkers, token: str, service_url: str) -> None:
        """Write job.json, workers.json, token and service_url, replacing what is there. Raises OSError."""
        private_folder(self.path.parent)
        private_folder(self.path)
        write_private(self.path / "token", token + "\n")
        write_private(self.path / "service_url", service_url + "\n")
        self.write_wanted(wanted)
        write_private(self.path / "job.json", json.dumps(job, indent=1) + "\n")

    def write_service_url(self, service_url: str) -> None:
        """Say where the service listens now. Does nothing where there is no folder yet. Raises OSError."""
        if self.path.is_dir():
            write_private(self.path / "service_url", service_url + "\n")

    def write_wanted(self, wanted: WantedWorkers) -> None:
        """Say how many workers are wanted now. Does nothing where there is no folder yet. Raises OSError."""
        if self.path.is_dir():
            write_private(self.path / WANTED_NAME, wanted.model_dump_json() + "\n")

    def complete(self, expected_token_hash: str) -> bool:
        """True where a run can start from it: all files are there and the token is the one that is stored."""
        try:
            token = (self.path / "token").read_text(encoding="utf-8").strip()
            return (
                (self.path / "job.json").is_file()
                and (self.path / "service_url").is_file()
                and token_hash(token) == expected_token_hash
            )
        except (FileNotFoundError, NotADirectoryError):
            return False

    def wanted(self) -> WantedWorkers | None:
        """workers.json; None where there is none or it cannot be read (which is logged)."""
        text = self._report(WANTED_NAME)
        if text is None:
            return None
        try:
            return WantedWorkers.model_validate_json(text)
        except ValidationError as error:
            logger.warning("wanted_workers_unreadable path=%s error=%s", self.path / WANTED_NAME, error)
            return None

    def summary(self) -> dict[str, JsonValue] | None:
        """summary.json; None where there is none or it cannot be read (which is logged)."""
        text = self._report("summary.json")
        if text is None:
            return None
        try:
            return _SUMMARY.validate_json(text)
        except ValidationError as error:
            logger.warning("summary_unreadable path=%s error=%s", self.path / "summary.json", error)
            return None

    def failure(self) -> Failure | None:
        """failure.json; None where there is none or it cannot be read (which is logged)."""
        text = self._report("failure.json")
        if text is None:
            return None
        try:
            return Failure.model_validate_json(text)
        except ValidationError as error:
            logger.warning("failure_unreadable path=%s error=%s", self.path / "failure.json", error)
            return None

    def _report(self, name: str) -> bytes | None:
        path = self.path / name
        try:
            with path.open("rb") as file:
                data = file.read(LARGEST_REPORT_BYTES + 1)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            logger.warning("report_unreadable path=%s error=%s", path, error)
            return None
        if len(data) > LARGEST_REPORT_BYTES:
            logger.warning("report_too_large path=%s limit_bytes=%d", path, LARGEST_REPORT_BYTES)
            return None
        return data


class RunFolders:
    """All run folders of a home, and the url that the runs report to.

    `lock` keeps the writers of a folder apart: a request that has just made or resized the job, and the reconciler
    that completes what a request could not. The home belongs to one process, so a lock of threads is enough.
    """

    def __init__(self, root: Path, service_url: str) -> None:
        self.root = root
        self.service_url = service_url
        self.lock = threading.Lock()

    def of(self, job_id: str) -> RunFolder:
        """The folder of this job."""
        return RunFolder(self.root / job_id)
