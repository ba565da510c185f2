"""The checkpoints in a run's own folder, file by file, for who is on another machine.

Only where the job names no checkpoint.store: what is elsewhere is read there. The files are as the workers write them
(workers/checkpoints); a folder without manifest.json is not whole. Of a run that goes on, a folder may go at any time.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from thinwire.contract.files import NotPlain, open_plain_in, plain_folder
from thinwire.contract.jobs import CheckpointFile, CheckpointFiles
from thinwire.service.errors import CheckpointNotFound, Unavailable

_FOLDER = re.compile(r"step-\d{8,}-[0-9a-f]{12}")
_FILE = re.compile(r"[a-z0-9][a-z0-9._-]*")
MOST_FILES, MOST_IN_ALL = 20_000, 100_000
"""Of one checkpoint, and of all in one answer: of a folder that holds more the last are listed."""


def list_checkpoints(folder: Path) -> list[CheckpointFiles]:
    """What lies in the folder of checkpoints, by name; files that are half-written are left out. Raises Unavailable."""
    return checkpoints_before(folder, MOST_IN_ALL)[0]


def checkpoints_before(folder: Path, limit: int, before: str | None = None) -> tuple[list[CheckpointFiles], str | None]:
    """The last `limit` of them, by name, and the name before which there are more, or None. before: only those whose
    name comes before this one. Raises Unavailable.
    """
    found: list[CheckpointFiles] = []
    left = MOST_IN_ALL
    first = None
    try:
        names = [name for name in os.listdir(folder) if _FOLDER.fullmatch(name) and (before is None or name < before)]
        for count, name in enumerate(sorted(names, reverse=True)):
            if left <= 0 or count == limit:
                break
            first = name
            with suppress(FileNotFoundError, NotADirectoryError):  # gone meanwhile, or none of ours
                found.append(CheckpointFiles(folder=name, files=_files(folder / name)))
                left -= 1 + len(found[-1].files)
    except FileNotFoundError:
        return [], None  # none yet, or the folder of the job has been removed
    except OSError as error:
        raise Unavailable(f"the checkpoints in {folder} cannot be listed: {error.strerror}; try again") from error
    return found[::-1], first if first is not None and first != min(names) else None


def open_checkpoint(folder: Path, name: str, file: str) -> tuple[BinaryIO, int]:
    """A file of a checkpoint, and its size. Links are not followed. Raises: CheckpointNotFound, Unavailable."""
    if not _FOLDER.fullmatch(name) or not _FILE.fullmatch(file):
        raise CheckpointNotFound(name, file)
    try:
        opened = open_plain_in(folder / name, file)
        return opened, os.fstat(opened.fileno()).st_size
    except (FileNotFoundError, NotADirectoryError, NotPlain) as error:
        raise CheckpointNotFound(name, file) from error
    except OSError as error:
        raise Unavailable(f"{folder / name / file} cannot be read: {error.strerror}; try again") from error


def _files(folder: Path) -> list[CheckpointFile]:
    found: list[CheckpointFile] = []
    descriptor = plain_folder(folder)
    try:
        with os.scandir(descriptor) as entries:
            for entry in entries:
                if _FILE.fullmatch(entry.name) and entry.is_file(follow_symlinks=False) and len(found) < MOST_FILES:
                    found.append(CheckpointFile(name=entry.name, bytes=entry.stat(follow_symlinks=False).st_size))
    finally:
        os.close(descriptor)
    return sorted(found, key=lambda one: one.name)
