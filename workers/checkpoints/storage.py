"""Where checkpoints lie: folders of files on a local disk, or in any store that fsspec or pyarrow opens.

A file that is written appears whole or not at all on a local disk, and on a store whose uploads end with one put, as
object stores' do. Elsewhere a torn one may be seen; every file of a checkpoint has a checksum, so it is refused.

A place is tried before a run trains for hours (`prove`): a small file is written there, read and removed. A place that
refuses (no such bucket, no right to write, a full disk) will refuse each save too. One that does not answer may only be
away: it is asked again, for a bounded time.
"""

from __future__ import annotations

import errno
import os
import queue
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast
from urllib.parse import urlsplit, urlunsplit

import fsspec  # type: ignore[import-untyped]

from thinwire.contract.stores import SUPPORTED, nobody_opens
from thinwire.workers.checkpoints.manifest import checkpoints

_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
"""What file systems without hard links say."""
_OF_BUCKETS = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss", "oci", "r2"}
"""Where a folder is there as soon as a file of it is, and to make one would make its bucket too: that is not ours."""
AWAY_S = 40.0
"""How long a place may be away. Other ranks wait in a collective meanwhile, at most 60 s."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 8.0
_FILE, _CONTENT = "probe", b"Thinwire has looked whether checkpoints can be written here. This may be removed.\n"
_FOR_GOOD = {errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR}
_FULL = {errno.ENOSPC, errno.EDQUOT}


class Storage(Protocol):
    """Folders of files, one level deep. Every method raises OSError, and nothing else, where the store refuses."""

    def address(self, folder: str) -> str:
        """What messages call a folder."""

    def folders(self) -> list[str]:
        """Names of all folders. None where the place does not exist yet."""

    def files(self, folder: str) -> dict[str, int]:
        """Name and size in bytes of each file of a folder; empty where there is no such folder."""

    def write(self, folder: str, name: str, chunks: Iterable[bytes | memoryview]) -> None:
        """Put a file, making its folder. A failure leaves no part of it, and the file of that name as it was."""

    def create(self, folder: str, name: str, chunks: Iterable[bytes | memoryview]) -> None:
        """As `write`, where there is no file of that name. Of several at once only one succeeds, if the place can tell.

        For small files. Raises: FileExistsError; then what is there is untouched.
        """

    def read(self, folder: str, name: str) -> AbstractContextManager[BinaryIO]:
        """Open a file; folder: "" for one beside the folders. Raises: FileNotFoundError."""

    def remove(self, folder: str, *names: str) -> None:
        """Remove files of a folder, or without names the folder; what is not there is no error."""


def put_once(storage: Storage, folder: str, name: str, data: bytes) -> None:
    """As Storage.create. A file that is there and is the same was put by this call: a store's client may try twice.

    Raises: FileExistsError, OSError.
    """
    try:
        storage.create(folder, name, [data])
    except FileExistsError:
        with storage.read(folder, name) as stream:
            if stream.read() != data:
                raise


def open_storage(where: str | Path) -> Storage:
    """The storage at a path or URL: /path, file:///path, s3://bucket/path, memory://name, ...

    Raises: ValueError where neither fsspec nor pyarrow opens it, saying why.
    """
    if isinstance(where, Path) or "://" not in where:
        return LocalStorage(Path(where).absolute())
    if where.startswith("file://"):
        return LocalStorage(Path(where.removeprefix("file://")))
    if "?" in where and not _OF_BUCKETS.isdisjoint([urlsplit(where).scheme]):
        return through_pyarrow(where)  # the one that reads settings there
    try:
        filesystem, root = fsspec.core.url_to_fs(where, use_listings_cache=False)
    except (ImportError, ValueError) as no_fsspec:
        try:
            return through_pyarrow(where)
        except (ImportError, ValueError, OSError) as no_pyarrow:
            reasons = f"fsspec: {no_fsspec}; pyarrow: {no_pyarrow}".replace(where, _shown(where))
            known = f". {SUPPORTED}" if nobody_opens(no_pyarrow) else ""
            raise ValueError(f"cannot open {_shown(where)}: {reasons}{known}") from None  # their texts have the URL
    return RemoteStorage(filesystem, root, _shown(where))


def through_pyarrow(where: str) -> Storage:
    """The storage at a URL that pyarrow opens with what it brings along: s3://, gs://, abfs://, hdfs://."""
    from fsspec.implementations.arrow import ArrowFSWrapper  # type: ignore[import-untyped]
    from pyarrow.fs import FileSystem  # type: ignore[import-untyped]

    filesystem, root = FileSystem.from_uri(where)
    return RemoteStorage(ArrowFSWrapper(filesystem), root, _shown(where))


class LocalStorage:
    """A directory. Files are synced and renamed into place, and so are the folders' entries."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def address(self, folder: str) -> str:
        """Its path."""
        return str(self.path / folder)

    def folders(self) -> list[str]:
        """As Storage says."""
        try:
            return [entry.name for entry in self.path.iterdir() if entry.is_dir()]
        except FileNotFoundError:
            return []

    def files(self, folder: str) -> dict[str, int]:
        """As Storage says."""
        found = {}
        with suppress(FileNotFoundError), os.scandir(self.path / folder) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # a partial that was renamed meanwhile
                    if entry.is_file():
                        found[entry.name] = entry.stat().st_size
        return found

    def write(self, folder: str, name: str, chunks: Iterable[bytes | memoryview]) -> None:
        """As Storage says."""
        with self._partial(folder, name, chunks) as partial:
            partial.replace(self.path / folder / name)

    def create(self, folder: str, name: str, chunks: Iterable[bytes | memoryview]) -> None:
        """As Storage says. A link is put whole and fails where there is one, on network file systems too."""
        target = self.path / folder / name
        with self._partial(folder, name, chunks) as partial:
            try:
                os.link(partial, target)
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                _copy_new(partial, target)
            with suppress(OSError):
                partial.unlink()

    @contextmanager
    def _partial(self, folder: str, name: str, chunks: Iterable[bytes | memoryview]) -> Iterator[Path]:
        """A file beside the one that it will be, synced. Of its own name: nobody else writes to it."""
        parent = self.path / folder
        if not parent.is_dir():
            parent.mkdir(parents=True, exist_ok=True)
            _sync(self.path)
        partial = parent / f".{name}.{secrets.token_hex(4)}.partial"
        try:
            with partial.open("wb") as file:
                for chunk in chunks:
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
            yield partial
        except BaseException:
            with suppress(OSError):
                partial.unlink()
            raise
        _sync(parent)

    def read(self, folder: str, name: str) -> AbstractContextManager[BinaryIO]:
        """As Storage says."""
        return (self.path / folder / name).open("rb")

    def remove(self, folder: str, *names: str) -> None:
        """As Storage says."""
        for name in names:
            (self.path / folder / name).unlink(missing_ok=True)
        while not names and (self.path / folder).exists():
            with suppress(FileNotFoundError):  # somebody else removes it too
                shutil.rmtree(self.path / folder)


class RemoteStorage:
    """A place in an fsspec file system. Its credentials and settings are fsspec's own: environment, config files."""

    def __init__(self, filesystem: Any, root: str, shown: str) -> None:
        self._filesystem, self._root, self._shown = filesystem, root.rstrip("/"), shown.rstrip("/")
        protocol = filesystem.protocol
        self._makes_folders = _OF_BUCKETS.isdisjoint([protocol] if isinstance(protocol, str) else protocol)

    def address(self, folder: str) -> str:
        """Its URL."""
        return f"{self._shown}/{folder}"

    def folders(self) -> list[str]:
        """As Storage says."""
        return [_name(entry) for entry in self._list("") if entry["type"] == "directory"]

    def files(self, folder: str) -> dict[str, int]:
        """As Storage says."""
        return {_name(entry): int(entry["size"]) for entry in self._list(folder) if entry["type"] == "file"}

    def write(self, folder: str, name: str, chunks: Iterable[bytes | memoryview]) -> None:
        """As Storage says."""
        path = f"{self._root}/{folder}/{name}"
        with _os_errors(path):
            self._make(folder)
            try:
                with self._filesystem.open(path, "wb") as file:
                    for chunk in chunks:
                        file.write(chunk)
            except BaseException:
                with suppress(Exception):  # closing has put what was written so far
                    self._filesystem.rm_file(path)
                raise

    def create(self, folder: str, name: str, chunks: Iterable[bytes | memoryview]) -> None:
        """As Storage says, by fsspec's exclusive write. Where a client has none it looks first, and then overwrites."""
        path = f"{self._root}/{folder}/{name}"
        with _os_errors(path):
            self._make(folder)
            if self._filesystem.exists(path):  # a client may know no exclusive write, and overwrite
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            self._filesystem.pipe_file(path, b"".join(chunks), mode="create")

    @contextmanager
    def read(self, folder: str, name: str) -> Iterator[BinaryIO]:
        """As Storage says."""
        path = f"{self._root}/{folder}/{name}" if folder else f"{self._root}/{name}"
        with _os_errors(path), self._filesystem.open(path, "rb") as file:
            yield cast(BinaryIO, file)

    def remove(self, folder: str, *names: str) -> None:
        """As Storage says."""
        path = f"{self._root}/{folder}"
        with _os_errors(path), suppress(FileNotFoundError):
            for name in names:
                with suppress(FileNotFoundError):
                    self._filesystem.rm_file(f"{path}/{name}")
            if not names:
                self._filesystem.rm(path, recursive=True)

    def _make(self, folder: str) -> None:
        if self._makes_folders:
            self._filesystem.makedirs(f"{self._root}/{folder}", exist_ok=True)

    def _list(self, folder: str) -> list[dict[str, Any]]:
        path = f"{self._root}/{folder}".rstrip("/")
        with _os_errors(path):
            self._filesystem.invalidate_cache()
            try:
                return list(self._filesystem.ls(path, detail=True))
            except FileNotFoundError:
                return []


@contextmanager
def _os_errors(path: str) -> Iterator[None]:
    """A store's client raises what it likes; outside it is an OSError."""
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from error
    except FileExistsError as error:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path) from error
    except OSError as error:
        if error.filename is not None:
            raise
        number = errno.EACCES if isinstance(error, PermissionError) else error.errno or errno.EIO
        raise OSError(number, error.strerror or str(error), path) from error
    except ValueError:  # of a reader that finds what is wrong
        raise
    except Exception as error:
        raise OSError(f"{path}: {type(error).__name__}: {error}") from error


def _shown(where: str) -> str:
    """A URL without what logs must not hold: a password, or settings that may have one."""
    parts = urlsplit(where)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _name(entry: dict[str, Any]) -> str:
    return str(entry["name"]).rstrip("/").rsplit("/", 1)[-1]


def _copy_new(source: Path, target: Path) -> None:
    """Where there are no links. A crash in between leaves a torn file, which its checksum shows."""
    with target.open("xb") as file:
        try:
            file.write(source.read_bytes())
            file.flush()
            os.fsync(file.fileno())
        except BaseException:
            target.unlink()
            raise


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class StoreRefused(Exception):
    """The place takes no checkpoints. The message says which, what was refused, and what to do."""


class _Refusal(Exception):
    """What cannot be done there. for_good: to ask again is of no use."""

    def __init__(self, what: str, error: Exception, *, for_good: bool) -> None:
        super().__init__(what, error)
        self.what, self.error, self.for_good = what, error, for_good


def prove(storage: Storage, away_s: float = AWAY_S) -> None:
    """Ask the place, unless it holds a checkpoint of this run, which is proof enough. Takes away_s at most.

    Raises: StoreRefused.
    """
    until = time.monotonic() + away_s
    answers: queue.SimpleQueue[_Refusal | None] = queue.SimpleQueue()
    # In a thread of its own: a client may wait for a place that does not answer for much longer.
    threading.Thread(target=_ask, args=(storage, until, answers), name="storage-probe", daemon=True).start()
    last: _Refusal | None = _Refusal("answer", TimeoutError("not once"), for_good=False)
    while True:
        try:
            last = answers.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            break
        if last is None:
            return
        if last.for_good:
            break
    assert last is not None
    raise StoreRefused(_told(storage.address(""), last, away_s))


def _ask(storage: Storage, until: float, answers: queue.SimpleQueue[_Refusal | None]) -> None:
    """Give an answer after each try, until one is for good; None: it takes checkpoints."""
    pause_s = FIRST_PAUSE_S
    while True:
        try:
            _try(storage)
        except _Refusal as refusal:
            answers.put(refusal)
            if refusal.for_good or time.monotonic() + pause_s > until:
                return
        else:
            answers.put(None)
            return
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _try(storage: Storage) -> None:
    """Raises: _Refusal."""
    folder, what = f"probe-{secrets.token_hex(8)}", "be listed"
    try:
        if checkpoints(storage.folders()):
            return
        what = "be written to"
        storage.write(folder, _FILE, [_CONTENT])
        what = "be read"
        with storage.read(folder, _FILE) as stream:
            found = stream.read()
        if found != _CONTENT:
            raise OSError(f"{len(_CONTENT)} bytes were written, and {len(found)} other ones came back")
        what = "have a file removed"
        storage.remove(folder)
    except OSError as error:
        # A client without credentials says so in an error of its own, which is the cause here.
        for_good = error.errno in _FOR_GOOD or "Credentials" in type(error.__cause__).__name__
        raise _Refusal(what, error, for_good=for_good) from error
    except Exception as error:  # the border of the thread: a defect of a store's client is reported too
        raise _Refusal(what, error, for_good=True) from error


def _told(address: str, refusal: _Refusal, away_s: float) -> str:
    error, host = refusal.error, socket.gethostname()
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, FileNotFoundError):
        todo = "make the bucket (a job makes none)"
    elif number in _FULL:
        todo = "make room there"
    elif refusal.for_good:
        todo = (
            "give the workers of this machine the right to list, write, read and delete there (credentials are those "
            "of the environment in which Ray was started)"
        )
    else:
        todo = f"it was asked for {away_s:g} s: look whether it runs, and whether this machine reaches it"
    return (
        f"no checkpoint could be saved: {address} cannot {refusal.what} from {host}: {type(error).__name__}: {error}; "
        f"{todo}, or name another checkpoint.store, and submit the job again"
    )
