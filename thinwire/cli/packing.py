"""The folder of a script, made into a package and brought to the service.

A package is a zip of what is not ignored, the same bytes for the same content.

Files stand in it by name, without times and owners; of their modes only whether they can be executed. A link inside of
the folder is packed as what it leads to; one that leads out is refused, as is what is neither a file nor a folder.

Left out is what .gitignore and .rayignore say, as git and Ray read them, where one of the two kinds says so. Within a
kind the deepest ignore file that knows a path decides, and in a file the last line that does; what lies in a folder
that is left out cannot be taken back in. The .gitignore files above the folder count as far up as its git repository
goes. The patterns themselves are pathspec's.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Self
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

from pathspec import GitIgnoreSpec
from pydantic import JsonValue
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from thinwire.cli.job_file import JobFileError
from thinwire.cli.quantities import bytes_text
from thinwire.cli.screen import note
from thinwire.client import Client
from thinwire.contract.packages import MOST_BYTES, MOST_ENTRIES, MOST_UNPACKED_BYTES, odd_name

_WAYS_OUT = (
    "leave out what is no code by .gitignore or .rayignore, name a smaller folder by --working-dir, or read data from "
    "where it is; or put the folder on all boxes and name it in recipe.working_dir of a job file"
)
_LEVEL = 6
LARGE_BYTES = 5 << 20
"""Above it the progress is shown."""
_MOST_NAMED = 5


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


def folder_of(job: Mapping[str, JsonValue], job_file: Path) -> Path | None:
    """The folder on this machine that a job file names; None where it names none, or one on the boxes."""
    recipe = job.get("recipe")
    if not isinstance(recipe, dict) or recipe.get("name") != "script":
        return None
    folder = recipe.get("working_dir")
    if not isinstance(folder, str) or recipe.get("package") is not None or folder.startswith("/"):
        return None
    return job_file.parent / folder


def packed_job(client: Client, job: Mapping[str, JsonValue], folder: Path) -> dict[str, JsonValue]:
    """The job with a package of the folder, which the service has now. It says on stderr what it does.

    Raises: Unpackable, ClientError.
    """
    listing = list_folder(folder)
    recipe = job["recipe"]
    assert isinstance(recipe, dict)
    _check_entry(listing, recipe.get("entry"))
    with _progress("packing", listing.size) as packing:
        packed = pack(listing, packing)
    with packed.file:
        note(_summary(listing, packed))
        if client.has_package(packed.sha256):
            note("The service has this package already.")
        else:
            with _progress("uploading", packed.size) as uploading:
                client.put_package(packed.sha256, packed.file, packed.size, uploading)
    kept = {field: value for field, value in recipe.items() if field != "working_dir"}
    return {**job, "recipe": {**kept, "package": packed.sha256}}


def _check_entry(listing: Listing, entry: JsonValue) -> None:
    if entry in {one.name for one in listing.entries} or not isinstance(entry, str):
        return
    for left_out in listing.left_out:
        if entry == left_out or entry.startswith(f"{left_out}/"):
            raise Unpackable(
                f"{listing.folder / left_out} is left out by .gitignore or .rayignore, and {entry} with it"
            )
    raise Unpackable(f"there is no file {entry} in {listing.folder}: recipe.entry is the script, seen from its folder")


def _summary(listing: Listing, packed: Packed) -> str:
    files = sum(not entry.name.endswith("/") for entry in listing.entries)
    text = (
        f"Packed {files} {'file' if files == 1 else 'files'} of {listing.folder}: {bytes_text(listing.size)}, "
        f"{bytes_text(packed.size)} as a zip."
    )
    if not listing.left_out:
        return text
    more = f" and {len(listing.left_out) - _MOST_NAMED} more" if len(listing.left_out) > _MOST_NAMED else ""
    return f"{text} Left out: {', '.join(listing.left_out[:_MOST_NAMED])}{more}."


@contextmanager
def _progress(what: str, size: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr for what is large, where somebody looks; it takes how many bytes more are done."""
    columns, hidden = (TextColumn("{task.description}"), BarColumn(), DownloadColumn()), size < LARGE_BYTES
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=hidden or not sys.stderr.isatty()) as shown:
        task = shown.add_task(what, total=size)
        yield lambda done: shown.advance(task, done)


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
    """Make the zip. progress: called with how many bytes more have been packed. Raises Unpackable."""
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


KINDS = (".gitignore", ".rayignore")
_NOTHING = re.compile(r"^! *$|(?<!\\)(\\\\)*\\$")
"""Lines that git reads as patterns which no name matches, and pathspec as errors: a lone !, a \\ at the end."""

ALWAYS = frozenset({".git", ".hg", ".venv", "venv", "__pycache__"})
"""Never part of a package, wherever they lie: histories, and what other machines cannot use."""


@dataclass(frozen=True, slots=True)
class _Patterns:
    """One ignore file. A path is given to it as seen from its own folder: without `below`, behind `above`."""

    spec: GitIgnoreSpec
    above: str
    below: str

    def says(self, path: str) -> bool | None:
        """True: left out; False: taken back in; None: nothing."""
        return self.spec.check_file(self.above + path.removeprefix(self.below)).include


@dataclass(frozen=True, slots=True)
class Ignored:
    """What holds in one folder. kinds: for each kind the ignore files that count there, the deepest last."""

    kinds: tuple[tuple[_Patterns, ...], ...]

    @classmethod
    def above(cls, folder: Path) -> Self:
        """What the git repository around the folder says, which does not reach the folder's own files. Raises OSError.

        folder: absolute. Nothing where the repository leaves the folder out as a whole: it was named all the same.
        """
        found: list[_Patterns] = []
        repository = next((one for one in (folder, *folder.parents) if (one / ".git").exists()), folder)
        between = [one for one in (*reversed(folder.parents), folder) if one.is_relative_to(repository)]
        for outer in between[:-1]:
            spec = _read(outer / KINDS[0])
            if spec is not None:
                found.append(_Patterns(spec, f"{folder.relative_to(outer).as_posix()}/", ""))
        made = cls((tuple(found), ()))
        return cls(((), ())) if made.leaves_out("") else made

    def inside(self, folder: Path, path: str) -> Ignored:
        """The same with what the ignore files of a folder below say. path: of it, with a slash; "" for the top.

        Raises OSError, ValueError (a pattern that cannot be read).
        """
        specs = [_read(folder / name) for name in KINDS]
        return Ignored(
            tuple(
                (*known, _Patterns(spec, "", path)) if spec is not None else known
                for known, spec in zip(self.kinds, specs, strict=True)
            )
        )

    def leaves_out(self, path: str) -> bool:
        """Is it left out? path: from the top of the folder; a folder's ends with a slash."""
        return any(
            next((said for one in reversed(kind) if (said := one.says(path)) is not None), False) for kind in self.kinds
        )


def _read(path: Path) -> GitIgnoreSpec | None:
    try:
        # -sig: the mark with which editors of Windows begin a file is no part of its first line; git skips it too.
        text = path.read_text(encoding="utf-8-sig", errors="surrogateescape")
    except (FileNotFoundError, IsADirectoryError):
        return None
    lines = [line.removesuffix("\r") for line in text.split("\n")]  # as git ends lines: not at a form feed
    try:
        return GitIgnoreSpec.from_lines(line for line in lines if _NOTHING.search(line) is None)
    except (ValueError, re.error) as error:  # of [z-a], in which git finds a z
        raise ValueError(f"{path}: {error}: mend the pattern, or leave it out") from error
