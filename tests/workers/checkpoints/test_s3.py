"""Checkpoints in an S3-compatible store: what jobs ask of it, and what they say when it refuses, waits or is away."""

from __future__ import annotations

import logging
import threading
import uuid

import fsspec
import pytest

from tests.covering import parametrize
from tests.s3_server import BUCKET, KEY, SECRET
from tests.workers.checkpoints.states import save, state
from tests.workers.small_job import run_small, small_spec
from thinwire.contract.weights import FetchFailed
from thinwire.workers.checkpoints import CheckpointId, CheckpointStore, Writer
from thinwire.workers.checkpoints.storage import RemoteStorage, StoreRefused, open_storage
from thinwire.workers.weights import StartRefused, fetch, opened


@pytest.fixture
def s3(s3_session):
    """The server, with nothing wrong."""
    yield s3_session
    s3_session.mend()


@pytest.fixture
def where(s3):
    """A folder of its own."""
    return f"s3://{BUCKET}/{uuid.uuid4()}"


def objects(where=f"s3://{BUCKET}"):
    """The contents of all objects below it, by name."""
    filesystem = fsspec.filesystem("s3")
    filesystem.invalidate_cache()
    return {name: filesystem.cat_file(name) for name in filesystem.find(where)}


def test_a_bucket_that_is_not_there_is_named_and_not_made(s3, where):
    gone = CheckpointStore("s3://no-such-bucket/runs", keep=1)
    assert gone.newest_whole() is None
    with pytest.raises(OSError, match="no-such-bucket"):
        save(gone, 10)
    assert not fsspec.filesystem("s3").exists("no-such-bucket")
    with pytest.raises(FetchFailed, match=r"s3://no-such-bucket/runs/ has no whole checkpoint"):
        fetch("s3://no-such-bucket/runs", None)
    with (
        pytest.raises(StartRefused, match=r"s3://no-such-bucket/m\.safetensors cannot be read from this machine"),
        opened("s3://no-such-bucket/m.safetensors"),
    ):
        pass


@parametrize("method", ["PUT", "GET"], usual=[0])
def test_a_store_that_denies_access_says_so(s3, where, method):
    store = CheckpointStore(where, keep=1)
    save(store, 10)
    s3.denies = lambda asked, path: asked == method
    if method == "PUT":
        with pytest.raises(OSError, match="Access Denied"):
            save(store, 20)
    else:
        with pytest.raises(OSError, match="Access Denied"):
            store.newest_whole()
        with pytest.raises(FetchFailed, match=r"cannot be read: .*Access Denied"):
            fetch(where, None)
    s3.mend()
    assert store.newest_whole().step == 10


@pytest.mark.slow
@parametrize(
    ("place", "method", "words"),
    [
        ("s3://no-such-bucket/runs", None, "cannot be written to from .* make the bucket .*"),
        (None, "PUT", "cannot be written to from .*Access Denied.* give the workers of this machine the right .*"),
        (None, "GET", "cannot be listed from .*Access Denied.* the right to list, write, read and delete .*"),
    ],
    usual=[1],
)
def test_a_job_does_not_train_whose_store_will_refuse_each_save(s3, where, tmp_path, place, method, words):
    s3.denies = lambda asked, path: asked == method
    spec = small_spec(checkpoint={"every_steps": 8, "store": place or where})
    with pytest.raises(StoreRefused, match=rf"{place or where}/run/ {words}, or name another checkpoint\.store"):
        run_small(tmp_path / "run", spec, 2)
    assert not (tmp_path / "run" / "history.jsonl").stat().st_size


def test_a_store_that_is_away_for_a_moment_is_waited_for_before_a_job_trains(s3, where, tmp_path, monkeypatch):
    folders, back = RemoteStorage.folders, threading.Event()

    def listed(storage):
        if back.is_set():
            return folders(storage)
        s3.stop()
        try:
            return folders(storage)
        finally:
            s3.start()
            back.set()

    monkeypatch.setattr(RemoteStorage, "folders", listed)
    (summary, *_), *_ = run_small(tmp_path / "run", small_spec(steps=8, checkpoint={"store": where}), 1)
    assert back.is_set()
    assert summary["steps"] == 8
    assert not [name for name in objects(where) if "probe" in name]


@pytest.mark.slow
def test_a_job_trains_on_while_its_store_is_away_and_saves_when_it_is_back(s3, where, tmp_path, monkeypatch):
    deliver = CheckpointStore.deliver
    failed = threading.Event()

    def delivered(store, snapshot):
        if snapshot.which.step == 8 and snapshot.rank == 0:
            s3.stop()
            try:
                return deliver(store, snapshot)
            finally:
                s3.start()
                failed.set()
        if snapshot.which.step > 8:
            assert failed.wait(60)
        return deliver(store, snapshot)

    monkeypatch.setattr(CheckpointStore, "deliver", delivered)
    spec = small_spec(checkpoint={"every_steps": 8, "keep": 9, "store": where})
    (summary, _, events), *_ = run_small(tmp_path / "run", spec, 1)
    assert summary["steps"] == 24
    told = [(kind, step) for kind, step in events if kind.startswith("checkpoint")]
    assert ("checkpoint_failed", 8) in told
    assert ("checkpoint_saved", 16) in told
    assert ("checkpoint_saved", 24) in told
    store = CheckpointStore(f"{where}/run", keep=9)
    assert [which.step for which in store.sound()] == [16, 24]
    assert store.newest_whole().step == 24


def test_a_save_that_takes_long_holds_nobody_up(s3, where):
    writer = Writer(CheckpointStore(where, keep=1))
    s3.holds = lambda method, path: method == "PUT" and path.endswith(".safetensors")
    ticket = writer.save(CheckpointId(1, 10), 0, 1, state(10))
    assert s3.reached.wait(30)
    assert not ticket.over
    s3.mend()
    assert writer.close(30)
    assert ticket.failure is None


def test_a_job_saves_resumes_and_starts_from_there_and_no_secret_is_left_anywhere(where, tmp_path, caplog):
    caplog.set_level(logging.DEBUG, "thinwire")
    spec = small_spec(checkpoint={"every_steps": 8, "keep": 2, "store": where})
    run_small(tmp_path / "run", spec, 2)
    longer = small_spec(steps=32, checkpoint={"every_steps": 8, "keep": 2, "store": where})
    (_, _, events), *_ = run_small(tmp_path / "run", longer, 2)
    assert events[0] == ("resumed", 24)
    assert [which.step for which in CheckpointStore(f"{where}/run", 2).sound()] == [24, 32]
    assert not list((tmp_path / "run").glob("checkpoints/*"))

    everything = {"checkpoints": f"{where}/run", "step": 24}
    fork = small_spec(steps=32, checkpoint={"every_steps": 8, "store": where}, start=everything)
    (_, samples, events), *_ = run_small(tmp_path / "fork", fork, 1)
    assert ("started_from", 24) in events
    assert samples[-1].step == 32

    found = fetch(f"{where}/run", tmp_path / "out")
    assert found.step == 32
    fsspec.filesystem("s3").put_file(str(found.path), f"{where}/given/model.safetensors")
    tuned = small_spec(steps=8, start={"weights": f"{where}/given/model.safetensors"})
    (_, samples, _), *_ = run_small(tmp_path / "tuned", tuned, 2)
    assert samples[0].validation_loss < 4.0

    texts = [*objects(where).values(), *(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())]
    assert len(texts) > 20
    for secret in (KEY, SECRET):
        assert not any(secret.encode() in text for text in texts)
        assert secret not in caplog.text


@pytest.mark.slow
def test_a_file_of_many_parts_is_the_same_when_it_is_read(where):
    """Above the size at which a client sends a file in parts."""
    storage, chunk = open_storage(where), bytes(range(256)) * 4096
    storage.write("a", "large", (chunk for _ in range(120)))
    assert storage.files("a") == {"large": 120 * len(chunk)}
    with storage.read("a", "large") as stream:
        assert all(stream.read(len(chunk)) == chunk for _ in range(120))

    def breaks():
        for number in range(120):
            if number == 100:
                raise OSError(28, "No space left on device")
            yield chunk

    with pytest.raises(OSError, match="No space left"):
        storage.write("a", "broken", breaks())
    assert list(storage.files("a")) == ["large"]
