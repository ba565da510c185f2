"""Files written whole or not at all: a reader sees the old one or the new one, and after a power cut too.

    write_whole     for every reader, as the process's umask has it
    write_private   readable by its owner alone
    write_first     only where there is none yet

And read where others may write, such as in a run folder: `open_plain`, `read_plain` take a regular file and no link, so
that what lies there can neither keep its reader waiting, as a FIFO does, nor lead it elsewhere, nor fill its memory.

What is too large to hold, and what may lie in an object store, is written by workers.checkpoints.storage.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from pathlib import Path
from typing import BinaryIO

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


def data_folder() -> Path:
    """The user's data folder for Thinwire: $XDG_DATA_HOME/thinwire, else ~/.local/share/thinwire."""
    data = os.environ.get("XDG_DATA_HOME", "")
    # The XDG rule: a relative path in the variable is to be ignored.
    base = Path(data) if os.path.isabs(data) else Path.home() / ".local" / "share"
    return base / "thinwire"


class NotPlain(OSError):
    """It is no regular file, or holds more than it may."""


def open_plain(path: Path) -> BinaryIO:
    """The file, opened to be read without waiting. Raises NotPlain, OSError."""
    return os.fdopen(plain_descriptor(path, os.O_RDONLY), "rb")


def open_plain_in(folder: Path, name: str) -> BinaryIO:
    """The same of a file in a folder that is no link either."""
    descriptor = plain_folder(folder)
    try:
        return os.fdopen(plain_descriptor(name, os.O_RDONLY, folder=descriptor), "rb")
    finally:
        os.close(descriptor)


def plain_folder(path: Path) -> int:
    """The folder, opened where it is no link. Raises NotADirectoryError, OSError."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)


def read_plain(path: Path, most: int) -> bytes:
    """All of the file, of up to `most` bytes. Raises NotPlain, OSError."""
    with open_plain(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise NotPlain(errno.EFBIG, f"it has more than {most} bytes", str(path))
    return content


def plain_descriptor(path: Path | str, flags: int, mode: int = 0o600, *, folder: int | None = None) -> int:
    """As os.open, of a regular file alone. folder: where a relative path begins. Raises NotPlain, OSError."""
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, mode, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link; a socket
            raise NotPlain(error.errno, "it is no regular file", str(path)) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotPlain(errno.EINVAL, "it is no regular file", str(path))
    return descriptor


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
