"""The checkpoints in a run's own folder, file by file, for who is on another machine.

Only where the job names no checkpoint.store: what is elsewhere is read there. The files are as the workers write them
(workers/checkpoints); a folder without manifest.json is not whole. Of a run that goes on, a folder may go at any time.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import BinaryIO

from thinwire.contract.jobs import CheckpointFile, CheckpointFiles
from thinwire.service.errors import CheckpointNotFound, Unavailable

_FOLDER = re.compile(r"step-\d{8,}-[0-9a-f]{12}")
_FILE = re.compile(r"[a-z0-9][a-z0-9._-]*")
MOST_FILES = 20_000


def list_checkpoints(folder: Path) -> list[CheckpointFiles]:
    """What lies in the folder of checkpoints, by name; files that are half-written are left out. Raises Unavailable."""
    found: list[CheckpointFiles] = []
    try:
        for name in sorted(os.listdir(folder)):
            if _FOLDER.fullmatch(name):
                found.append(CheckpointFiles(folder=name, files=_files(folder / name)))
    except FileNotFoundError:
        pass  # none yet, or the folder of the job has been removed
    except OSError as error:
        raise Unavailable(f"the checkpoints in {folder} cannot be listed: {error.strerror}; try again") from error
    return found


def open_checkpoint(folder: Path, name: str, file: str) -> tuple[BinaryIO, int]:
    """A file of a checkpoint, and its size. Links are not followed. Raises: CheckpointNotFound, Unavailable."""
    if not _FOLDER.fullmatch(name) or not _FILE.fullmatch(file):
        raise CheckpointNotFound(name, file)
    try:
        opened = os.open(folder / name / file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        size = os.fstat(opened)
        if not stat.S_ISREG(size.st_mode):
            os.close(opened)
            raise CheckpointNotFound(name, file)
        return os.fdopen(opened, "rb"), size.st_size
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointNotFound(name, file) from error
    except OSError as error:
        raise Unavailable(f"{folder / name / file} cannot be read: {error.strerror}; try again") from error


def _files(folder: Path) -> list[CheckpointFile]:
    found: list[CheckpointFile] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if _FILE.fullmatch(entry.name) and entry.is_file(follow_symlinks=False) and len(found) < MOST_FILES:
                found.append(CheckpointFile(name=entry.name, bytes=entry.stat(follow_symlinks=False).st_size))
    return sorted(found, key=lambda one: one.name)
