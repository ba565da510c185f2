"""Where checkpoints lie: the same behaviour on a local disk, in an fsspec store, and in one that pyarrow opens."""

import errno
import uuid

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.workers.checkpoints.states import CPU, assert_same, save, state
from thinwire.workers.checkpoints import CheckpointRefused, CheckpointStore
from thinwire.workers.checkpoints.storage import LocalStorage, RemoteStorage, open_storage, through_pyarrow


@pytest.fixture(params=["path", "file URL", "fsspec", "pyarrow"])
def storage(request, tmp_path):
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


def test_a_write_that_fails_leaves_no_part_of_it(storage):
    def chunks():
        yield b"half"
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        storage.write("a", "one", chunks())
    assert storage.files("a") == {}


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


def test_checkpoints_are_the_same_in_every_store(store, caplog):
    assert store.newest_whole() is None
    saved = [save(store, step, size) for step, size in ((10, 3), (20, 1), (30, 4))]
    assert store.newest_whole() == saved[-1]
    assert sorted(store.storage.folders()) == [store.address(which).rsplit("/", 1)[-1] for which in saved[1:]]
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
    with pytest.raises(ValueError, match=r"cannot open nowhere://x: fsspec: .*nowhere.*; pyarrow: "):
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
