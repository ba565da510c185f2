"""A job's run folder, seen from the service: what it writes before it submits, and what it reads when a run is over.

job.json is written last, so its presence means that the rest is there.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic.types import JsonValue
from pydantic_core import from_json, to_json

from thinwire.contract.files import NotPlain, plain_descriptor, private_folder, read_plain, write_private
from thinwire.contract.remote_run import LONGEST_LOG_BYTES
from thinwire.contract.reports import Failure, WantedWorkers
from thinwire.contract.run_folder import RunFolder
from thinwire.contract.traces import TRACEPARENT, Traces, submitted, told
from thinwire.service.auth import token_hash

logger = logging.getLogger(__name__)

LARGEST_REPORT_BYTES = 1 << 20
MOST_TOKEN_BYTES = 4096
REMOVED = ".removed-"
"""Before the name of a folder that is being removed."""
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

    def append_log(self, attempt: int, offset: int, content: bytes, room: int) -> tuple[int, int]:
        """Add to the log of an attempt what comes from byte `offset` on; its size then, and how much was added.

        What is there already stays as it is, and after a gap nothing is added. It grows to LONGEST_LOG_BYTES at most,
        and by `room` bytes. One at a time. The run folder is not made: that of a job that was deleted stays away.
        Raises OSError.
        """
        self.logs.mkdir(mode=0o700, exist_ok=True)
        descriptor = plain_descriptor(self.log_of(attempt), os.O_RDWR | os.O_CREAT | os.O_APPEND)
        with os.fdopen(descriptor, "ab") as file:
            size = file.seek(0, os.SEEK_END)
            most = max(0, min(room, LONGEST_LOG_BYTES - size))
            new = content[size - offset :][:most] if offset <= size else b""
            file.write(new)
        return size + len(new), len(new)

    def log_size(self, attempt: int) -> int:
        """Bytes of the log of an attempt; 0 where there is none. Raises OSError."""
        try:
            return self.log_of(attempt).lstat().st_size
        except FileNotFoundError:
            return 0

    def remove(self) -> None:
        """Remove the folder with all that is in it, or what lies in its place; none is fine. A link is not followed.
        Raises OSError.

        It is moved away first: who still writes to it finds no folder, and cannot keep it from going.
        """
        removed = self.path.with_name(REMOVED + self.path.name)
        _remove_tree(removed)  # what could not be removed the last time
        with suppress(FileNotFoundError):
            self.path.rename(removed)
        _remove_tree(removed)

    def read_token(self) -> str:
        """The job's token. Raises OSError."""
        return read_plain(self.token, MOST_TOKEN_BYTES).decode("utf-8", "replace").strip()

    def complete(self, expected_token_hash: str) -> bool:
        """True where a run can start from it: all files are there and the token is the one that is stored."""
        try:
            known = token_hash(self.read_token()) == expected_token_hash
            return known and self.job.is_file() and self.service_url.is_file()
        except (FileNotFoundError, NotADirectoryError, NotPlain):
            return False

    def read_trace(self) -> str | None:
        """The trace that the job belongs to, as job.json names it; None where there is none."""
        try:
            found = json.loads(read_plain(self.job, LARGEST_REPORT_BYTES)).get(TRACEPARENT)
        except (OSError, ValueError, AttributeError):
            return None
        return found if isinstance(found, str) else None

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
        return kind.validate_json(read_plain(path, LARGEST_REPORT_BYTES))
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValidationError) as error:
        logger.warning("report_unreadable path=%s error=%s", path, error)
    return None


def _remove_tree(path: Path) -> None:
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        if path.exists():
            raise  # something else was removed in it meanwhile


class RunFolders:
    """All run folders of a home, and the service that the runs report to.

    `lock` keeps the writers of a folder apart: a request that has just made or resized the job, and the reconciler
    that completes what a request could not. The home belongs to one process, so a lock of threads is enough.
    """

    def __init__(
        self,
        root: Path,
        service: ServiceAt,
        told: Mapping[str, Any] = MappingProxyType({}),
        traces: Traces | None = None,
    ) -> None:
        """told: what the processes of all jobs are told beside their job (run_folder.py: job.json). traces: of jobs."""
        self.root = root
        self.service = service
        self._told, self._traces = told, traces
        self.lock = threading.Lock()

    def of(self, job_id: str) -> JobFolder:
        """The folder of this job."""
        return JobFolder(self.root / job_id)

    def told_to(self, job_id: str) -> dict[str, Any]:
        """What the processes of this job are told beside it."""
        trace = self.of(job_id).read_trace() if self._traces is not None else None
        return {**self._told, **(told() if trace is None else {TRACEPARENT: trace})}

    def handing_over(self, job_id: str, accepted_at: float, attempt: int) -> AbstractContextManager[None]:
        """The launcher is handed this job, in its trace."""
        parent = self.of(job_id).read_trace() if self._traces is not None else None
        return submitted(self._traces, parent, accepted_at, attempt, job_id)

    def job_of(self, path: Path) -> str | None:
        """Whose folder this path is in, links followed; None where it is in none."""
        real, root = Path(os.path.realpath(path)), Path(os.path.realpath(self.root))
        return real.relative_to(root).parts[0] if root in real.parents else None

    def job_ids(self) -> set[str]:
        """Of whom there is a folder, or what is left of one. Raises OSError."""
        names = os.listdir(self.root) if self.root.is_dir() else []
        return {name.removeprefix(REMOVED) for name in names}
