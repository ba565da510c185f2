"""The command line of a driver that shares no folder with the service: in every cluster the same.

It stands where all users of the cluster can read it, so no secret is in it but a ticket, with which the driver fetches
its job's token once; after that it is worth nothing (contract/remote_run.py).
"""

from __future__ import annotations

import hashlib
import hmac
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from thinwire.contract.files import read_plain
from thinwire.contract.run_folder import RunFolder
from thinwire.contract.tls import LONGEST_CA, as_word
from thinwire.service.launch.protocol import Code, LauncherError

PYTHON: Final = '"${THINWIRE_PYTHON:-python}"'
"""The cluster's shell finds it: `thinwire up` says which Python a box has, an image has it on its path."""


MOST_BYTES: Final = 4096
"""Of a token or a URL in a file."""


def driver_command(
    run_dir: Path, attempt: int, metadata: Mapping[str, str], words: Sequence[str] = (), python: str = PYTHON
) -> str:
    """The shell command line of this attempt's driver. words: what else it is told.

    Raises: LauncherError where the run folder cannot be read.
    """
    folder = RunFolder(run_dir)
    try:
        token, url = (read_plain(file, MOST_BYTES).decode().strip() for file in (folder.token, folder.service_url))
        ca = read_plain(folder.service_ca, LONGEST_CA).decode() if folder.service_ca.exists() else None
    except (OSError, UnicodeDecodeError) as error:
        raise LauncherError(f"the run folder {run_dir} cannot be read: {error}") from error
    if ca is not None:
        words = [*words, "--service-ca", as_word(ca)]
    return command_line(url, metadata["job_id"], attempt, ticket_of(token, attempt), words, python)


def command_line(
    url: str, job_id: str, attempt: int, ticket: str, words: Sequence[str] = (), python: str = PYTHON
) -> str:
    """The same of words that are known."""
    words = ["--service", url, "--job", job_id, "--attempt", str(attempt), "--ticket", ticket, *words]
    return f"{python} -m thinwire.workers.main {shlex.join(words)}"


def script_of_workers(code: Code | None) -> list[str]:
    """What tells a driver to bring a script to the job's workers alone: nothing of it comes to where the driver runs,
    neither its package nor its requirements nor its variables.
    """
    if code is None:
        return []
    return ["--script-of-workers", *([] if code.sha256 is None else ["--package", code.sha256])]


def ticket_of(token: str, attempt: int) -> str:
    """The ticket of an attempt of the job that has this token.

    It follows from both, so that a submission can be repeated; nobody can go the other way.
    """
    return hmac.digest(token.encode(), b"ticket of attempt %d" % attempt, hashlib.sha256).hex()
