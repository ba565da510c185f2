"""Where checkpoints lie: the same behaviour on a local disk, in an fsspec store, and in one that pyarrow opens."""

import errno
import os
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.s3_server import BUCKET
from tests.workers.checkpoints.states import CPU, assert_same, save, state
from thinwire.workers.checkpoints import CheckpointRefused, CheckpointStore
from thinwire.workers.checkpoints.storage import LocalStorage, RemoteStorage, open_storage, through_pyarrow


@pytest.fixture(params=["path", "file URL", "fsspec", "pyarrow", "s3"])
def storage(request, tmp_path):
    if request.param == "s3":
        request.getfixturevalue("s3_session")
        return open_storage(f"s3://{BUCKET}/{uuid.uuid4()}/store")
    if request.param == "path":
        return open_storage(tmp_path / "store")
    if request.param == "file URL":
        return open_storage(f"file://{tmp_path}/store")
    if request.param == "fsspec":
        return open_storage(f"memory://{uuid.uuid4()}/store")
    return through_pyarrow(f"file://{tmp_path}/store")


@pytest.fixture
def store(storage):
    store = CheckpointStore("memory://not-used", keep=2)
    store.storage = storage
    return store


def test_files_are_put_listed_read_and_removed(storage):
    assert storage.folders() == []
    assert storage.files("a") == {}
    storage.remove("a")
    storage.remove("a", "none")
    storage.write("a", "one", [b"12", memoryview(b"345")])
    storage.write("a", "two", [])
    storage.write("b", "one", [b"x"])
    assert sorted(storage.folders()) == ["a", "b"]
    assert storage.files("a") == {"one": 5, "two": 0}
    with storage.read("a", "one") as stream:
        assert stream.read(3) == b"123"
        assert stream.read() == b"45"
    with pytest.raises(FileNotFoundError), storage.read("a", "three"):
        pass
    storage.write("a", "one", [b"new"])
    assert storage.files("a")["one"] == 3
    storage.remove("a", "one")
    assert storage.files("a") == {"two": 0}
    storage.remove("b")
    assert storage.folders() == ["a"]
    assert "store" in storage.address("a")


@pytest.mark.parametrize("how", ["write", "create"])
def test_a_write_that_fails_leaves_no_part_of_it(storage, how):
    def chunks():
        yield b"half"
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        getattr(storage, how)("a", "one", chunks())
    assert storage.files("a") == {}


def test_a_file_is_created_once_and_what_is_there_stays(storage):
    storage.create("a", "one", [b"12", b"3"])
    with pytest.raises(FileExistsError):
        storage.create("a", "one", [b"other"])
    assert storage.files("a") == {"one": 3}
    with storage.read("a", "one") as stream:
        assert stream.read() == b"123"


@pytest.mark.parametrize("place", ["links", "no links", "s3"])
def test_of_many_who_create_a_file_one_succeeds(request, tmp_path, monkeypatch, place):
    def link(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    if place == "no links":
        monkeypatch.setattr(os, "link", link)
    if place == "s3":
        request.getfixturevalue("s3_session")
    where = f"s3://{BUCKET}/{uuid.uuid4()}" if place == "s3" else tmp_path
    barrier = threading.Barrier(8)

    def attempt(number):
        barrier.wait()
        try:
            open_storage(where).create("a", "one", [bytes([number]) * 1000])
        except FileExistsError:
            return None
        return number

    with ThreadPoolExecutor(8) as pool:
        (winner,) = [number for number in pool.map(attempt, range(8)) if number is not None]
    with open_storage(where).read("a", "one") as stream:
        assert stream.read() == bytes([winner]) * 1000
    assert open_storage(where).files("a") == {"one": 1000}


def test_a_local_file_that_is_written_again_is_the_old_one_until_the_new_one_is_whole(tmp_path):
    storage = LocalStorage(tmp_path)
    storage.write("a", "one", [b"old"])

    def chunks():
        yield b"half"
        assert (tmp_path / "a" / "one").read_bytes() == b"old"
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        storage.write("a", "one", chunks())
    assert (tmp_path / "a" / "one").read_bytes() == b"old"


@pytest.mark.few(2)
def test_checkpoints_are_the_same_in_every_store(store, caplog):
    assert store.newest_whole() is None
    assert store.begin(None) == 1
    saved = [save(store, step, size) for step, size in ((10, 3), (20, 1), (30, 4))]
    assert store.newest_whole() == saved[-1]
    assert store.sound() == saved[1:]
    names = [store.address(which).rsplit("/", 1)[-1] for which in saved[1:]]
    assert sorted(store.storage.folders()) == ["generation-000000000001", *names]
    assert_same(store.load(saved[-1], CPU), state(30))
    torn = store.address(saved[-1]).rsplit("/", 1)[-1]
    store.storage.write(torn, "shard-00002-of-00004.safetensors", [b"torn"])
    assert store.newest_whole() == saved[1]
    with pytest.raises(CheckpointRefused, match=r"shard-00002-of-00004\.safetensors"):
        store.load(saved[-1], CPU)
    store.storage.remove(torn, "shard-00001-of-00004.safetensors")
    assert store.newest_whole() == saved[1]
    assert "reason=shard-00001-of-00004.safetensors is missing" in caplog.text


class Moody(MemoryFileSystem):
    """Raises what is no OSError, as clients of object stores do."""

    def _open(self, path, mode="rb", **options):
        raise RuntimeError("SlowDown: please reduce your request rate")


def test_what_a_stores_client_raises_is_an_os_error_outside():
    storage = RemoteStorage(Moody(), "/x", "moody://x")
    with pytest.raises(OSError, match="RuntimeError: SlowDown"):
        storage.write("a", "one", [b"x"])
    with pytest.raises(OSError, match="RuntimeError: SlowDown"), storage.read("a", "one"):
        pass


def test_a_place_that_nothing_opens_is_refused_saying_why():
    with pytest.raises(
        ValueError, match=r"cannot open nowhere://x: fsspec: .*nowhere.*; pyarrow: .*A store is an .*s3://"
    ):
        CheckpointStore("nowhere://x", keep=1)


def test_what_messages_call_a_place_holds_no_secret():
    with pytest.raises(ValueError, match="cannot open nowhere://bucket/x:") as told:
        open_storage("nowhere://key:secret@bucket/x?token=hidden")
    assert "hidden" not in str(told.value)
    assert open_storage("memory://bucket/x").address("a") == "memory://bucket/x/a"


def test_where_fsspec_lacks_a_client_pyarrow_is_asked(monkeypatch, tmp_path):
    def without_client(url, **options):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", without_client)
    opened = []
    monkeypatch.setattr("thinwire.workers.checkpoints.storage.through_pyarrow", opened.append)
    open_storage("s3://bucket/x")
    assert opened == ["s3://bucket/x"]
