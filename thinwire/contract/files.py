"""Files written whole or not at all: a reader sees the old one or the new one, and after a power cut too.

    write_whole     for every reader, as the process's umask has it
    write_private   readable by its owner alone
    write_first     only where there is none yet

What is too large to hold, and what may lie in an object store, is written by workers.checkpoints.storage.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

_SHARED, _PRIVATE = 0o666, 0o600


def write_whole(path: Path, content: str | bytes) -> None:
    """Put `content` at `path` in one move, in the place of what is there. Raises OSError, and leaves that."""
    _replace(path, content, _SHARED)


def write_private(path: Path, content: str | bytes) -> None:
    """The same, mode 0600. Raises OSError."""
    _replace(path, content, _PRIVATE)


def write_first(path: Path, content: str | bytes) -> bool:
    """Put `content` at `path` unless there is a file: of several writers the first one stands. Raises OSError.

    Returns whether it was this one.
    """
    temporary = _temporary(path, content, _SHARED)
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        temporary.unlink()
    sync_folder(path.parent)
    return True


def private_folder(path: Path) -> Path:
    """The folder, made with mode 0700 where it is missing. A folder that exists keeps its mode. Raises OSError."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


def unusable_home(home: Path, error: OSError) -> str:
    """Why the home folder cannot be used and what to do, for a person."""
    if os.path.isfile(home):  # unlike Path.is_file, no error for a folder that may not be searched
        return f"{home} cannot be the home: it is a file, not a folder: set THINWIRE_HOME to a folder you can write"
    why = error.strerror or str(error)
    return f"the home folder {home} cannot be used: {why}: set THINWIRE_HOME to a folder you can write"


def _replace(path: Path, content: str | bytes, mode: int) -> None:
    temporary = _temporary(path, content, mode)
    try:
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def _temporary(path: Path, content: str | bytes, mode: int) -> Path:
    """The content on the disk, in a file beside `path` whose name no other writer has."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def sync_folder(path: Path) -> None:
    """Bring the folder's entries to the disk: what was renamed into it outlives a loss of power. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
