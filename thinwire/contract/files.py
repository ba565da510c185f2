"""Private files: written whole or not at all, readable by their owner alone."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write_private(path: Path, text: str) -> None:
    """Put `text` at `path`, mode 0600, in one move: a reader sees the old file or the new one. Raises OSError.

    The folder is synced too, so that the file is there after a power cut.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


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
