"""Where packages lie, and which: one file each, named by its hash, whole or not there at all.

An upload goes to a file of its own beside them and is moved to its place when its hash and its content are right, so
two uploads of one package do not meet. That file is locked while its upload lives: one that is not was left by a
process that is gone, and is removed. A package goes when no job names it and it has not been used for a while.
Who has sent it first is said by an empty file, of/NAME/SHA256: one person does not fill the store for all. Whose it
is, of projects, is said by files in/PROJECT/SHA256: a project has what was sent to it, and one that has not sent it
cannot take it by its hash. Of a package of an earlier version, which no such file names, it is `default`.

Whether a zip may be unpacked on a worker is found out from its directory alone; nothing is unpacked. The worker that
unpacks it goes by the same directory: no entry gives more bytes than stand there. The directory is read only
when its length, which stands at the end of the file, is within bounds, so a hostile one costs no memory. Taken are the
plain zips that `thinwire submit`, zip and Python write: one disk, no comment, nothing before or between.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import re
import secrets
import shutil
import stat
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import BinaryIO
from zipfile import ZIP_DEFLATED, ZIP_STORED, BadZipFile, ZipFile, ZipInfo

from thinwire.contract.files import private_folder, sync_folder
from thinwire.contract.packages import (
    MOST_BYTES,
    MOST_ENTRIES,
    MOST_RATIO,
    MOST_UNPACKED_BYTES,
    Package,
    PackageList,
    odd_name,
)
from thinwire.contract.projects import DEFAULT, ProjectSettings, whose_limits
from thinwire.contract.script import SHA256
from thinwire.service.cursors import cursor, key_of
from thinwire.service.errors import BodyTooLarge, InsufficientStorage, InvalidRequest, QuotaReached, Unavailable
from thinwire.service.occasions import Occasion

logger = logging.getLogger(__name__)

DAY_S = 86_400.0
ABOUT_TO_BE_USED_S = 3600.0
"""A package as young as this stays however full the store is: the job that names it may be on its way."""
LEAST_FREE_BYTES = 64 << 20
"""Stays free on the disk: a job that is accepted must be written down."""
_UPLOAD = ".upload-"
_NAME = re.compile(SHA256)
PACKAGES = "packages"
"""The list's name in its cursors."""


class PackageGone(Exception):
    """A package that a job names is not here, or not as it came. The message says what to do."""


class Packages:
    """The packages of a service. Methods may be called from any thread.

    max_bytes: of one; total_bytes: of all; person_bytes: of those that one person has sent. keep_days: how long one
    stays that no job names. named: the hashes that jobs name. confirm_owner: raises where another service owns the
    database, and takes the packages. limits: what a project may have. clock: unix seconds.
    """

    def __init__(
        self,
        folder: Path,
        *,
        max_bytes: int,
        total_bytes: int,
        person_bytes: int,
        keep_days: float,
        named: Callable[[], set[str]],
        confirm_owner: Callable[[], None],
        limits: Callable[[str], ProjectSettings],
        clock: Callable[[], float],
    ) -> None:
        self._limits = limits
        self.max_bytes = max_bytes
        self._folder, self._total_bytes, self._keep_s = folder, total_bytes, keep_days * DAY_S
        self._person_bytes = person_bytes
        self._named, self._confirm_owner, self._clock = named, confirm_owner, clock
        self._lock = threading.Lock()
        self._reserved: dict[Upload, int] = {}
        self._prunes = Occasion(clock)

    def find(self, sha256: str, project: str | None) -> Package | None:
        """The package; None where there is none, or the project has it not. project: None for any.

        Raises Unavailable.
        """
        try:
            if project is not None and not self._is_of(sha256, project):
                return None
            return Package(sha256=sha256, bytes=self._path(sha256).stat().st_size)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise Unavailable(f"the packages in {self._folder} cannot be read: {error.strerror}") from error

    def list(self, limit: int, after: str | None, project: str | None) -> PackageList:
        """Up to `limit` packages, in order of their hashes; with `after`, `next` of an earlier list, those that follow.

        project: of this one alone. Raises: InvalidRequest, Unavailable.
        """
        last = "" if after is None else key_of(PACKAGES, after, (str,), "after")[0]
        try:
            names = sorted(
                path.stem
                for path in self._folder.glob("*.zip")
                if path.stem > last
                and _NAME.fullmatch(path.stem)
                and (project is None or self._is_of(path.stem, project))
            )
        except OSError as error:
            raise Unavailable(f"the packages in {self._folder} cannot be listed: {error.strerror}") from error
        found = [
            package for name in names[:limit] if (package := self.find(name, None)) is not None
        ]  # or it has just gone
        return PackageList(packages=found, next=cursor(PACKAGES, names[limit - 1]) if len(names) > limit else None)

    def has_some(self, project: str) -> bool:
        """Does it keep a package of this project?"""
        return self.bytes_of(project) > 0

    def bytes_of(self, project: str, who: str | None = None) -> int:
        """Of the packages of a project; who: of those alone that this person has sent."""
        marks = {path.name for path in self._in(project).glob("*")}
        if project == DEFAULT:
            marked = {path.name for path in self._folder.glob("in/*/*")}
            marks |= {path.stem for path in self._folder.glob("*.zip")} - marked
        if who is not None:
            marks &= {path.name for path in self._of(who).glob("*")}
        return sum(self._size(sha256) for sha256 in marks)

    def use(self, sha256: str, project: str) -> bool:
        """Keep it for a while from now on. False where the project has none. Raises Unavailable."""
        with self._lock:
            found = self.find(sha256, project)
            if found is not None:
                now = self._clock()
                with suppress(OSError):  # of another user, in a folder that is shared: it is as old as it was
                    os.utime(self._path(sha256), (now, now))
        return found is not None

    def lacks(self, sha256: str, entry: str) -> str | None:
        """Why this script cannot be run from the package; None where it can. Raises Unavailable."""
        try:
            with ZipFile(self._path(sha256)) as archive:
                names = archive.namelist()
        except (OSError, BadZipFile) as error:
            raise Unavailable(f"the package {sha256} in {self._folder} cannot be read: {error}") from error
        if entry in names:
            return None
        scripts = sorted(name for name in names if name.endswith(".py"))
        near = get_close_matches(entry, scripts, n=3, cutoff=0.0)
        return f"the package has no file {entry!r}; it has {', '.join(near) or 'no script'}"

    def whole(self, sha256: str) -> Path:
        """The file, held against its hash. One that is damaged is removed, or its upload would be left out.

        Raises: PackageGone, OSError.
        """
        path = self._path(sha256)
        try:
            with path.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except FileNotFoundError:
            raise PackageGone(
                f"the package {sha256} is not in {self._folder}: submit the same folder again, which uploads it, and "
                "this job goes on; or cancel the job"
            ) from None
        if found == sha256:
            return path
        path.unlink(missing_ok=True)
        logger.error("package_damaged sha256=%s found=%s", sha256, found)
        raise PackageGone(
            f"the package {sha256} was damaged in {self._folder} and has been removed: submit the same folder again, "
            "which uploads it, and this job goes on"
        )

    def upload(self, sha256: str, declared: int | None, who: str, project: str) -> Upload:
        """Begin to take a package. declared: its length; None where the sender does not say. who: sends it, to which
        project.

        Raises: NotOwner, BodyTooLarge, InsufficientStorage, QuotaReached, ProjectNotFound, Unavailable.
        """
        self._confirm_owner()
        settings = self._limits(project)
        size = self.max_bytes if declared is None else declared
        if size > self.max_bytes:
            raise self.too_large(size)
        try:
            private_folder(self._folder)
            with self._lock:
                self._refuse_beyond(settings, size, who, project)
                self._make_room(size, who)
                upload = Upload(self, self._path(sha256), size, who, project)
                self._reserved[upload] = size
        except OSError as error:
            raise self.refusal(error) from error
        return upload

    def prune(self) -> None:
        """Remove what was left of uploads, and packages that no job names any more. Raises OSError."""
        if not self._folder.is_dir() or not self._prunes.has_come():
            return
        with self._lock:
            self._remove_leftovers()
            self._remove_unnamed(older_than=self._keep_s)

    def too_large(self, size: int) -> BodyTooLarge:
        """The error for a package of so many bytes."""
        return BodyTooLarge(
            f"the package has at least {size} bytes; at most {self.max_bytes} are taken, and Ray takes no more than "
            f"{MOST_BYTES}. Leave data out by .gitignore or .rayignore and read it from where it is, or put the folder "
            "on the boxes and name it in recipe.working_dir"
        )

    def refusal(self, error: OSError) -> InsufficientStorage | Unavailable:
        """The error for a disk that does not take what comes."""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return InsufficientStorage(f"the disk of {self._folder} is full: free some of it, and try again")
        return Unavailable(
            f"the package cannot be written to {self._folder}: {error.strerror}; mend that, and try again"
        )

    def _take_in(self, upload: Path, target: Path, who: str, project: str) -> None:
        now = self._clock()
        os.utime(upload, (now, now))
        with self._lock:  # while nobody looks for what is old
            if target.exists() and self._is_of(target.stem, DEFAULT):  # no longer by having no mark
                (private_folder(self._in(DEFAULT)) / target.stem).touch(mode=0o600)
            (private_folder(self._in(project)) / target.stem).touch(mode=0o600)
            (private_folder(self._of(who)) / target.stem).touch(mode=0o600)
            upload.replace(target)
        sync_folder(self._folder)

    def _ended(self, upload: Upload) -> None:
        with self._lock:
            self._reserved.pop(upload, None)

    def _path(self, sha256: str) -> Path:
        return self._folder / f"{sha256}.zip"

    def _of(self, who: str) -> Path:
        return self._folder / "of" / who

    def _in(self, project: str) -> Path:
        return self._folder / "in" / project

    def _is_of(self, sha256: str, project: str) -> bool:
        if (self._in(project) / sha256).exists():
            return True
        return project == DEFAULT and next(self._folder.glob(f"in/*/{sha256}"), None) is None

    def _size(self, sha256: str) -> int:
        with suppress(FileNotFoundError):
            return self._path(sha256).stat().st_size
        return 0

    def _refuse_beyond(self, settings: ProjectSettings, size: int, who: str, project: str) -> None:
        """Raises QuotaReached where so many bytes more are too many for the project, or for this person in it."""
        for limit, whose in ((settings.limits.package_bytes, None), (settings.person_limits.package_bytes, who)):
            if limit is None:
                continue
            coming = [
                reserved
                for upload, reserved in self._reserved.items()
                if upload.project == project and whose in (None, upload.who)
            ]
            used = self.bytes_of(project, whose) + sum(coming)
            if used + size > limit:
                raise QuotaReached(
                    f"the packages of {whose_limits(project, whose)} have {used} bytes, and with these {size} they "
                    f"would have more than the {limit} of package_bytes: `thinwire delete` jobs whose packages are not "
                    "needed any more, or have an operator raise it (`thinwire quotas`)"
                )

    def _make_room(self, size: int, who: str) -> None:
        """See that so many more bytes fit: theirs, among the packages, on the disk.

        Raises: InsufficientStorage, OSError.
        """
        under_way = sum(self._reserved.values())
        theirs = sum(reserved for upload, reserved in self._reserved.items() if upload.who == who)
        of_all, of_one = self._total_bytes - under_way - size, self._person_bytes - theirs - size
        if self._stored() > of_all or self._sent_by(who) > of_one:
            self._remove_leftovers()
            self._remove_unnamed(older_than=ABOUT_TO_BE_USED_S)
        if (sent := self._sent_by(who)) > of_one:
            raise InsufficientStorage(
                f"the packages that {who} has sent have {sent + theirs} bytes, and with these {size} they would have "
                f"more than the {self._person_bytes} of THINWIRE_PACKAGES_PERSON_MAX_BYTES: `thinwire delete` jobs "
                "whose packages are not needed any more, or have the operator raise it"
            )
        stored = self._stored()
        if stored > of_all:
            raise InsufficientStorage(
                f"the packages have {stored + under_way} bytes, and with these {size} they would have more than the "
                f"{self._total_bytes} of THINWIRE_PACKAGES_MAX_BYTES: `thinwire delete` jobs whose packages are not "
                "needed any more, or raise it"
            )
        free = shutil.disk_usage(self._folder).free
        if free - under_way - size < LEAST_FREE_BYTES:
            raise InsufficientStorage(
                f"the disk of {self._folder} has {free >> 20} MiB left, too few for a package of {size} bytes: free "
                "some of it, and try again"
            )

    def _stored(self) -> int:
        return sum(found.stat().st_size for found in self._folder.glob("*.zip"))

    def _sent_by(self, who: str) -> int:
        """Bytes of the packages that this person has sent; what is said of others that have gone is removed."""
        size = 0
        for mark in self._of(who).glob("*"):
            try:
                size += self._path(mark.name).stat().st_size
            except FileNotFoundError:
                mark.unlink(missing_ok=True)
        return size

    def _remove_leftovers(self) -> None:
        for path in self._folder.glob(f"{_UPLOAD}*"):
            with suppress(FileNotFoundError), path.open("rb") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue  # its upload lives
                path.unlink(missing_ok=True)
                logger.info("package_leftover_removed path=%s", path)

    def _remove_unnamed(self, older_than: float) -> None:
        now = self._clock()
        old = {path for path in self._folder.glob("*.zip") if now - path.stat().st_mtime > older_than}
        named = self._named() if old else set()
        for path in old:
            if path.stem not in named:
                path.unlink(missing_ok=True)
                for kind in ("of", "in"):
                    for mark in self._folder.glob(f"{kind}/*/{path.stem}"):
                        mark.unlink(missing_ok=True)
                logger.info("package_expired sha256=%s", path.stem)


class Upload:
    """A package that is on its way. Close it in any case: what is not finished then leaves nothing."""

    def __init__(self, packages: Packages, target: Path, most: int, who: str, project: str) -> None:
        """Raises OSError."""
        self._packages, self._target, self._most = packages, target, most
        self.who, self.project = who, project
        self._path = target.with_name(f"{_UPLOAD}{secrets.token_hex(8)}")
        self._file: BinaryIO = open(os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")  # noqa: SIM115
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._digest = hashlib.sha256()
        self._size = 0

    def close(self) -> None:
        """Drop what is not finished. Safe to call twice."""
        self._path.unlink(missing_ok=True)
        with suppress(OSError):  # what could not be written is not wanted any more
            self._file.close()
        self._packages._ended(self)

    def write(self, part: bytes) -> None:
        """Add a part. Raises: BodyTooLarge, InsufficientStorage, Unavailable."""
        self._size += len(part)
        if self._size > self._most:
            raise self._packages.too_large(self._size)
        self._digest.update(part)
        try:
            self._file.write(part)
        except OSError as error:
            raise self._packages.refusal(error) from error

    def finish(self) -> Package:
        """Take it in. Raises: InvalidRequest (another hash, an unfit zip), InsufficientStorage, Unavailable."""
        sha256 = self._target.stem
        if self._digest.hexdigest() != sha256:
            raise InvalidRequest.at(
                "sha256", sha256, f"the {self._size} bytes that came have the sha256 {self._digest.hexdigest()}"
            )
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            check_zip(self._path)
            self._packages._take_in(self._path, self._target, self.who, self.project)
        except UnfitZip as error:
            raise InvalidRequest.at("", None, f"the package {error}") from error
        except OSError as error:
            raise self._packages.refusal(error) from error
        logger.info("package_taken sha256=%s bytes=%d", sha256, self._size)
        return Package(sha256=sha256, bytes=self._size)


_END = struct.Struct("<4s4H2LH")
_END_SIGNATURE, _LOCATOR_SIGNATURE, _LOCATOR_BYTES = b"PK\x05\x06", b"PK\x06\x07", 20
_MOST_DIRECTORY_BYTES = 16 << 20
_ENCRYPTED, _UTF8 = 0x1 | 0x40, 0x800


class UnfitZip(Exception):
    """The file may not be unpacked; the message says why, to stand after "the package"."""


def check_zip(path: Path) -> None:
    """Look at a zip. Takes at most MOST_ENTRIES entries into memory. Raises: UnfitZip, OSError."""
    _check_end(path)
    try:
        with ZipFile(path) as archive:
            entries = archive.infolist()
    except (BadZipFile, UnicodeDecodeError, NotImplementedError, ValueError, struct.error) as error:
        raise UnfitZip(f"cannot be read as a zip: {error}") from error
    if not any(not entry.is_dir() for entry in entries):
        raise UnfitZip("holds no file")
    size = path.stat().st_size
    for reason in _reasons(entries, size):
        raise UnfitZip(reason)


def _check_end(path: Path) -> None:
    """Read the record at the very end, which says how long the directory is."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        if size < _END.size:
            raise UnfitZip(f"is no zip: it has {size} bytes")
        file.seek(max(0, size - _END.size - _LOCATOR_BYTES))
        tail = file.read()
    signature, *disks, count, length, start, comment = _END.unpack(tail[-_END.size :])
    if signature != _END_SIGNATURE:
        raise UnfitZip("is no zip, or one with a comment: it does not end as a zip does")
    if comment or any(disks[:2]) or disks[2] != count:
        raise UnfitZip("is a zip with a comment, or of several disks: make it anew")
    if tail.startswith(_LOCATOR_SIGNATURE) or count == 0xFFFF or count > MOST_ENTRIES:
        raise UnfitZip(f"has more than {MOST_ENTRIES} files and folders, or is written as a zip64")
    if length > _MOST_DIRECTORY_BYTES:
        raise UnfitZip(f"has a directory of {length} bytes; at most {_MOST_DIRECTORY_BYTES} are read")
    if start + length + _END.size != size:
        raise UnfitZip("holds something before or after its directory that is no part of the zip")


def _reasons(entries: list[ZipInfo], size: int) -> Iterator[str]:
    """What is wrong with the entries of a zip of so many bytes."""
    kinds: dict[str, bool] = {}
    unpacked = packed = 0
    for entry in entries:
        name = entry.orig_filename
        wrong = odd_name(name) or _odd_entry(entry)
        if wrong is None and name.removesuffix("/") in kinds:
            wrong = "is there twice"
        if wrong is not None:
            yield f"may not be unpacked: the entry {ascii(name)[:200]} {wrong}"
        kinds[name.removesuffix("/")] = entry.is_dir()
        unpacked += entry.file_size
        packed += entry.compress_size
    for name in kinds:
        for above in _folders_above(name):
            if kinds.get(above) is False:
                yield f"may not be unpacked: {ascii(above)[:200]} is a file, and a folder with files"
    if unpacked > MOST_UNPACKED_BYTES:
        yield f"unpacks to {unpacked} bytes; at most {MOST_UNPACKED_BYTES} are taken"
    if unpacked > max(MOST_BYTES, MOST_RATIO * packed):
        yield f"unpacks to {unpacked} bytes from {packed}; more than {MOST_RATIO} for one is no code"
    if packed > size:
        yield f"is {size} bytes long and says that its entries have {packed}: some lie on others"


def _odd_entry(entry: ZipInfo) -> str | None:
    kind = stat.S_IFMT(entry.external_attr >> 16)
    if kind == stat.S_IFLNK:
        return "is a link; write what it leads to instead"
    if kind not in (0, stat.S_IFDIR, stat.S_IFREG) or (kind == stat.S_IFDIR) > entry.is_dir():
        return "is neither a file nor a folder"
    if entry.flag_bits & _ENCRYPTED:
        return "is encrypted"
    if entry.compress_type not in (ZIP_STORED, ZIP_DEFLATED):
        return f"is compressed by method {entry.compress_type}; only stored and deflated are taken"
    if not entry.flag_bits & _UTF8 and not entry.orig_filename.isascii():
        return "has a name that is not marked as UTF-8"
    if entry.is_dir() and entry.file_size:
        return "is a folder with content"
    return None


def _folders_above(name: str) -> Iterator[str]:
    end = name.find("/")
    while end >= 0:
        yield name[:end]
        end = name.find("/", end + 1)
