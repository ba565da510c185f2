"""May this zip be unpacked on a worker? Found out from its directory alone; nothing is unpacked.

Whoever unpacks it goes by the same directory: no entry gives more bytes than stand there. The directory is read only
when its length, which stands at the end of the file, is within bounds, so a hostile one costs no memory. Taken are the
plain zips that `thinwire submit`, zip and Python write: one disk, no comment, nothing before or between.
"""

from __future__ import annotations

import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZIP_STORED, BadZipFile, ZipFile, ZipInfo

from thinwire.contract.packages import MOST_BYTES, MOST_ENTRIES, MOST_RATIO, MOST_UNPACKED_BYTES, odd_name

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
