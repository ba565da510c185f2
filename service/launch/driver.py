"""The command line of a driver that shares no folder with the service: in every cluster the same.

It stands where all users of the cluster can read it, so no secret is in it but a ticket, with which the driver fetches
its job's token once; after that it is worth nothing (contract/remote_run.py).
"""

from __future__ import annotations

import hashlib
import hmac
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from thinwire.contract.files import read_plain
from thinwire.contract.run_folder import RunFolder
from thinwire.service.launch.protocol import Code, LauncherError

PYTHON: Final = '"${THINWIRE_PYTHON:-python}"'
"""The cluster's shell finds it: `thinwire up` says which Python a box has, an image has it on its path."""


MOST_BYTES: Final = 4096
"""Of a token or a URL in a file."""


def driver_command(
    run_dir: Path, attempt: int, metadata: Mapping[str, str], code: Code | None, *, fetch: bool = False
) -> str:
    """The shell command line of this attempt's driver. fetch: it brings the job's package to the cluster itself.

    Raises: LauncherError where the run folder cannot be read.
    """
    folder = RunFolder(run_dir)
    try:
        token, url = (read_plain(file, MOST_BYTES).decode().strip() for file in (folder.token, folder.service_url))
    except (OSError, UnicodeDecodeError) as error:
        raise LauncherError(f"the run folder {run_dir} cannot be read: {error}") from error
    package = code.sha256 if fetch and code is not None else None
    return command_line(url, metadata["job_id"], attempt, ticket_of(token, attempt), code, package)


def command_line(url: str, job_id: str, attempt: int, ticket: str, code: Code | None, package: str | None) -> str:
    """The same of words that are known. package: the sha256 of the zip that it is to fetch."""
    words = ["--service", url, "--job", job_id, "--attempt", str(attempt), "--ticket", ticket]
    if package is not None:
        words += ["--package", package]
    python = "python" if code is not None and code.pip else PYTHON  # the one with its packages comes first
    return f"{python} -m thinwire.workers.main {shlex.join(words)}"


def ticket_of(token: str, attempt: int) -> str:
    """The ticket of an attempt of the job that has this token.

    It follows from both, so that a submission can be repeated; nobody can go the other way.
    """
    return hmac.digest(token.encode(), b"ticket of attempt %d" % attempt, hashlib.sha256).hex()
