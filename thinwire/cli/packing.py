"""The folder of a script made into a package: a zip of what is not ignored, the same bytes for the same content.

Files stand in it by name, without times and owners; of their modes only whether they can be executed. A link inside of
the folder is packed as what it leads to; one that leads out is refused, as is what is neither a file nor a folder.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

from thinwire.cli.ignored import ALWAYS, Ignored
from thinwire.cli.job_file import JobFileError
from thinwire.cli.quantities import bytes_text
from thinwire.contract.packages import MOST_BYTES, MOST_ENTRIES, MOST_UNPACKED_BYTES, odd_name

_WAYS_OUT = (
    "leave out what is no code by .gitignore or .rayignore, name a smaller folder by --working-dir, or read data from "
    "where it is; or put the folder on all boxes and name it in recipe.working_dir of a job file"
)
_LEVEL = 6


class Unpackable(JobFileError):
    """The folder cannot be made into a package; the message names it, says why and what to do."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A file, or an empty folder, of a package. name: with slashes, a folder's with one at its end."""

    name: str
    path: Path
    size: int
    executable: bool


@dataclass(frozen=True, slots=True)
class Listing:
    """What of a folder goes into its package. left_out: files and folders that were not looked into."""

    folder: Path
    entries: list[Entry]
    left_out: list[str]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.entries)


@dataclass(frozen=True, slots=True)
class Packed:
    """A package in a temporary file, which goes when it is closed."""

    file: BinaryIO
    sha256: str
    size: int


def list_folder(folder: Path) -> Listing:
    """Look at all that is not ignored. Raises Unpackable."""
    try:
        top = folder.resolve(strict=True)
        if not top.is_dir():
            raise Unpackable(f"{folder} is no folder: name the folder of the script")
        listing = Listing(top, [], [])
        _walk(listing, top, "", Ignored.above(top), (top,))
    except OSError as error:
        raise Unpackable(f"{error.filename or folder} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise Unpackable(str(error)) from error
    if listing.size > MOST_UNPACKED_BYTES:
        raise Unpackable(_too_large(listing, f"has {bytes_text(listing.size)}", bytes_text(MOST_UNPACKED_BYTES)))
    return listing


def pack(listing: Listing, progress: Callable[[int], None] = lambda size: None) -> Packed:
    """Make the zip. progress is told how many bytes more have been packed. Raises Unpackable."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller that uploads it closes it
    try:
        with ZipFile(file, "w", ZIP_DEFLATED, compresslevel=_LEVEL) as archive:
            for entry in sorted(listing.entries, key=lambda one: one.name):
                _add(archive, entry)
                progress(entry.size)
        size = file.seek(0, os.SEEK_END)
        if size > MOST_BYTES:
            raise Unpackable(_too_large(listing, f"has {bytes_text(size)} as a zip", bytes_text(MOST_BYTES)))
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        file.seek(0)
    except OSError as error:
        file.close()
        raise Unpackable(f"{error.filename or listing.folder} cannot be packed: {error.strerror or error}") from error
    except BaseException:
        file.close()
        raise
    return Packed(file, digest, size)


def _add(archive: ZipFile, entry: Entry) -> None:
    info = ZipInfo(entry.name, (1980, 1, 1, 0, 0, 0))
    info.create_system = 3  # as on Linux, wherever it is made
    info.compress_type = ZIP_DEFLATED
    if entry.name.endswith("/"):
        info.external_attr = (stat.S_IFDIR | 0o755) << 16
        archive.writestr(info, b"")
        return
    info.external_attr = (stat.S_IFREG | (0o755 if entry.executable else 0o644)) << 16
    info.file_size = entry.size
    with entry.path.open("rb") as source, archive.open(info, "w") as target:
        shutil.copyfileobj(source, target, 1 << 20)


def _walk(listing: Listing, folder: Path, path: str, ignored: Ignored, above: tuple[Path, ...]) -> None:
    """Add what is in a folder. path: of it in the package, with a slash. above: the real folders that it lies in."""
    here = ignored.inside(folder, path)
    inside = sorted(os.scandir(folder), key=lambda one: one.name)
    for found in inside:
        entry = _entry(listing, found, path + found.name, here)
        if entry is None:
            continue
        if not entry.name.endswith("/"):
            listing.entries.append(entry)
        elif (real := entry.path.resolve()) in above:
            raise Unpackable(f"the link {entry.path} leads to {real}, which it lies in: leave it out in .rayignore")
        else:
            _walk(listing, entry.path, entry.name, here, (*above, real))
        if len(listing.entries) > MOST_ENTRIES:
            raise Unpackable(_too_large(listing, f"has more than {MOST_ENTRIES} files", f"{MOST_ENTRIES} files"))
    if path and not inside:
        listing.entries.append(Entry(path, folder, 0, executable=False))


def _entry(listing: Listing, found: os.DirEntry[str], name: str, ignored: Ignored) -> Entry | None:
    """The entry, a folder's name with a slash; None where it is left out. Raises: Unpackable, OSError."""
    path = Path(found.path)
    if found.name in ALWAYS or ignored.leaves_out(f"{name}/" if found.is_dir(follow_symlinks=False) else name):
        listing.left_out.append(name)
        return None
    if (wrong := odd_name(name)) is not None:
        raise Unpackable(f"{found.path!a} {wrong}: give it another name, or leave it out in .rayignore")
    if found.is_symlink():
        _check_link(listing.folder, path)
    kept = path.stat()
    if stat.S_ISDIR(kept.st_mode):
        return Entry(f"{name}/", path, 0, executable=False)
    if not stat.S_ISREG(kept.st_mode):
        raise Unpackable(f"{path} is neither a file nor a folder: leave it out in .rayignore")
    return Entry(name, path, kept.st_size, executable=bool(kept.st_mode & stat.S_IXUSR))


def _check_link(top: Path, path: Path) -> None:
    try:
        target = path.resolve(strict=True)
    except (FileNotFoundError, RuntimeError):
        raise Unpackable(f"the link {path} leads to nothing: mend it, or leave it out in .rayignore") from None
    if not target.is_relative_to(top):
        raise Unpackable(
            f"the link {path} leads to {target}, out of the folder {top}: copy what is needed into it, or leave the "
            "link out in .rayignore"
        )


def _too_large(listing: Listing, what: str, most: str) -> str:
    largest = ", ".join(f"{name} ({bytes_text(size)})" for name, size in _largest(listing))
    return f"{listing.folder} {what}; a package may have {most}. The largest: {largest}. Do one of these: {_WAYS_OUT}"


def _largest(listing: Listing) -> Iterator[tuple[str, int]]:
    """The largest parts at the top of the folder."""
    sizes: dict[str, int] = {}
    for entry in listing.entries:
        top, slash, _ = entry.name.partition("/")
        sizes[top + slash] = sizes.get(top + slash, 0) + entry.size
    yield from sorted(sizes.items(), key=lambda one: -one[1])[:5]
