"""A job's run folder, seen from the service: what it writes before it submits, and what it reads when a run is over.

job.json is written last, so its presence means that the rest is there.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic.types import JsonValue
from pydantic_core import from_json, to_json

from thinwire.contract.files import private_folder, write_private
from thinwire.contract.remote_run import LONGEST_LOG_BYTES
from thinwire.contract.reports import Failure, WantedWorkers
from thinwire.contract.run_folder import RunFolder
from thinwire.service.auth import token_hash

logger = logging.getLogger(__name__)

LARGEST_REPORT_BYTES = 1 << 20
Report = TypeVar("Report")
_WANTED, _SUMMARY, _FAILURE = TypeAdapter(WantedWorkers), TypeAdapter(dict[str, JsonValue]), TypeAdapter(Failure)


@dataclass(frozen=True, slots=True)
class ServiceAt:
    """How runs reach the service. ca: PEM; "" where every machine trusts its certificate, or it speaks plain HTTP."""

    url: str
    ca: str = ""


class JobFolder(RunFolder):
    """What the service does with a run folder."""

    def write(self, job: dict[str, Any], wanted: WantedWorkers, token: str, service: ServiceAt) -> None:
        """Write job.json, workers.json, token and where the service is, replacing what is there. Raises OSError."""
        private_folder(self.path.parent)
        private_folder(self.path)
        write_private(self.token, token + "\n")
        self.write_service(service)
        self.write_wanted(wanted)
        write_private(self.job, json.dumps(job, indent=1) + "\n")

    def write_service(self, service: ServiceAt) -> None:
        """Say where the service listens now. Does nothing where there is no folder yet. Raises OSError."""
        if self.path.is_dir():
            if service.ca:
                write_private(self.service_ca, service.ca)
            else:
                self.service_ca.unlink(missing_ok=True)
            write_private(self.service_url, service.url + "\n")

    def write_wanted(self, wanted: WantedWorkers) -> None:
        """Say how many workers are wanted now. Does nothing where there is no folder yet. Raises OSError."""
        if self.path.is_dir():
            write_private(self.workers, wanted.model_dump_json() + "\n")

    def append_log(self, attempt: int, offset: int, content: bytes) -> int:
        """Add to the log of an attempt what comes from byte `offset` on; its size then. Raises OSError.

        What is there already stays as it is, and after a gap nothing is added. It grows to LONGEST_LOG_BYTES at most.
        One at a time.
        """
        private_folder(private_folder(self.path) / self.logs.name)
        descriptor = os.open(self.log_of(attempt), os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(descriptor, "ab") as file:
            size = file.seek(0, os.SEEK_END)
            new = content[size - offset :][: LONGEST_LOG_BYTES - size] if offset <= size else b""
            file.write(new)
        return size + len(new)

    def log_size(self, attempt: int) -> int:
        """Bytes of the log of an attempt; 0 where there is none. Raises OSError."""
        try:
            return self.log_of(attempt).stat().st_size
        except FileNotFoundError:
            return 0

    def remove(self) -> None:
        """Remove the folder with all that is in it; none is fine. A link is removed, not followed. Raises OSError."""
        if self.path.is_symlink():
            self.path.unlink()
            return
        try:
            shutil.rmtree(self.path)
        except FileNotFoundError:
            if self.path.exists():
                raise  # something else was removed in it meanwhile

    def complete(self, expected_token_hash: str) -> bool:
        """True where a run can start from it: all files are there and the token is the one that is stored."""
        try:
            token = self.token.read_text(encoding="utf-8").strip()
            return self.job.is_file() and self.service_url.is_file() and token_hash(token) == expected_token_hash
        except (FileNotFoundError, NotADirectoryError):
            return False

    def read_wanted(self) -> WantedWorkers | None:
        """workers.json; None where there is none or it cannot be read (which is logged)."""
        return _read(self.workers, _WANTED)

    def read_summary(self) -> dict[str, JsonValue] | None:
        """summary.json; None as for `read_wanted`. In it NaN and infinity become null."""
        found: dict[str, JsonValue] | None = from_json(to_json(_read(self.summary, _SUMMARY), inf_nan_mode="null"))
        return found

    def read_failure(self) -> Failure | None:
        """failure.json; None where there is none or it cannot be read (which is logged)."""
        return _read(self.failure, _FAILURE)


def _read(path: Path, kind: TypeAdapter[Report]) -> Report | None:
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST_REPORT_BYTES + 1)
        if len(data) <= LARGEST_REPORT_BYTES:
            return kind.validate_json(data)
        logger.warning("report_too_large path=%s limit_bytes=%d", path, LARGEST_REPORT_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValidationError) as error:
        logger.warning("report_unreadable path=%s error=%s", path, error)
    return None


class RunFolders:
    """All run folders of a home, and the service that the runs report to.

    `lock` keeps the writers of a folder apart: a request that has just made or resized the job, and the reconciler
    that completes what a request could not. The home belongs to one process, so a lock of threads is enough.
    """

    def __init__(self, root: Path, service: ServiceAt) -> None:
        self.root = root
        self.service = service
        self.lock = threading.Lock()

    def of(self, job_id: str) -> JobFolder:
        """The folder of this job."""
        return JobFolder(self.root / job_id)
