"""What is removed, and what not yet: never what somebody may still write, never what a newer generation has."""

import errno
import logging
from pathlib import Path

import pytest

from tests.workers.checkpoints.states import GENERATION, save, state
from thinwire.workers.checkpoints import CheckpointId, CheckpointStore, Snapshot
from thinwire.workers.checkpoints.store import Unfinished


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def store(tmp_path, clock):
    store = CheckpointStore(tmp_path / "checkpoints", keep=2)
    store._unfinished = Unfinished(100.0, clock)
    return store


def part(store, generation, step, rank, size=2):
    """A rank's part of a checkpoint that is not whole."""
    which = CheckpointId(generation, step)
    store.deliver(Snapshot.take(which, rank, size, state(step)))
    return Path(store.address(which))


def test_of_its_own_generation_goes_what_all_have_delivered_something_later_than(store):
    """A rank writes in order: whoever has delivered step 30 writes nothing of step 20 any more."""
    left, waited_for, ahead = (part(store, GENERATION, step, rank=1) for step in (20, 25, 40))
    which = CheckpointId(GENERATION, 30)
    snapshots = [Snapshot.take(which, rank, 2, state(30)) for rank in range(2)]
    store.commit(snapshots[0], {s.rank: store.deliver(s) for s in snapshots}, [which, CheckpointId(GENERATION, 25)])
    assert not left.exists()
    assert waited_for.exists()
    assert ahead.exists(), "another rank may be ahead of rank 0"


def test_of_a_rank_that_has_not_delivered_anything_later_all_stays(store):
    slow = part(store, GENERATION, 20, rank=1)
    part(store, GENERATION, 20, rank=0)
    snapshot = Snapshot.take(CheckpointId(GENERATION, 30), 0, 2, state(30))
    store.deliver(snapshot)
    store.give_up(snapshot, {0}, [])
    assert {path.name[:11] for path in slow.iterdir()} == {"shard-00001"}
    assert not Path(store.address(snapshot.which)).exists()


def test_of_an_older_generation_goes_what_has_not_changed_for_long(store, clock):
    left = part(store, GENERATION, 20, rank=1)
    save(store, 30, generation=GENERATION + 1)
    assert left.exists(), "a worker that left, or the rank 0 of before, may be writing it"
    clock.now = 60.0
    part(store, GENERATION, 20, rank=0)
    save(store, 40, generation=GENERATION + 1)
    clock.now = 110.0
    save(store, 50, generation=GENERATION + 1)
    assert left.exists(), "something came 50 s ago"
    clock.now = 161.0
    save(store, 60, generation=GENERATION + 1)
    assert not left.exists()


def test_what_becomes_whole_while_it_is_being_removed_stays(store, clock, monkeypatch):
    left = CheckpointId(GENERATION, 20)
    snapshot = Snapshot.take(left, 0, 1, state(20))
    receipts = {0: store.deliver(snapshot)}
    store._unfinished.settled(left, store.storage.files(Path(store.address(left)).name))
    clock.now = 101.0
    create = store.storage.create

    def late(folder, name, chunks):
        monkeypatch.setattr(store.storage, "create", create)
        store.commit(snapshot, receipts, [])
        create(folder, name, chunks)

    failed = Snapshot.take(CheckpointId(GENERATION + 1, 30), 0, 1, state(30))
    monkeypatch.setattr(store.storage, "create", late)
    store.give_up(failed, {0}, [])
    assert store.newest_whole() == left


def test_what_is_being_removed_does_not_become_whole(store, clock, monkeypatch):
    left = CheckpointId(GENERATION, 20)
    snapshot = Snapshot.take(left, 0, 1, state(20))
    receipts = {0: store.deliver(snapshot)}
    store._unfinished.settled(left, store.storage.files(Path(store.address(left)).name))
    clock.now = 101.0
    remove, told = store.storage.remove, []

    def late(folder, *names):
        if folder != Path(store.address(left)).name:
            return
        monkeypatch.setattr(store.storage, "remove", remove)
        with pytest.raises(FileExistsError, match=r"another writer has made .* whole, or is removing it") as error:
            store.commit(snapshot, receipts, [])
        told.append(error)
        remove(folder, *names)

    monkeypatch.setattr(store.storage, "remove", late)
    store.give_up(Snapshot.take(CheckpointId(GENERATION + 1, 30), 0, 1, state(30)), {0}, [])
    assert told
    assert not Path(store.address(left)).exists()


def test_a_disk_on_which_nothing_can_be_put_is_freed_all_the_same(store, clock, monkeypatch):
    left = part(store, GENERATION, 20, rank=0)
    store.begin(GENERATION + 1)
    clock.now = 101.0

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store.storage, "create", full)
    store.give_up(Snapshot.take(CheckpointId(GENERATION + 1, 30), 0, 1, state(30)), {0}, [])
    assert not left.exists()


def test_a_generation_that_goes_on_from_the_store_counts_from_when_it_began(store, clock):
    left = part(store, GENERATION, 20, rank=1)
    store.begin(GENERATION + 1)
    clock.now = 101.0
    save(store, 30, generation=GENERATION + 1)
    assert not left.exists()


def test_a_save_that_failed_frees_what_is_left_and_removes_no_whole_one(store, clock):
    """A disk that is full of leftovers would never have room for a save that succeeds."""
    store.keep = 1
    whole = save(store, 10)
    left = part(store, GENERATION, 20, rank=1)
    older = part(store, GENERATION - 1, 15, rank=0)
    for step in (30, 40):
        snapshot = Snapshot.take(CheckpointId(GENERATION, step), 0, 2, state(step))
        store.give_up(snapshot, {0, 1}, [])
        clock.now += 101.0
    assert not left.exists()
    assert not older.exists()
    assert store.newest_whole() == whole


def test_an_older_generation_removes_nothing_once_a_newer_one_has_written(store):
    store.keep = 1
    first = save(store, 10)
    part(store, GENERATION, 15, rank=0)
    part(store, GENERATION + 1, 20, rank=0)
    before = sorted(path.name for path in Path(store.storage.path).iterdir())
    late = save(store, 30)
    assert sorted(path.name for path in Path(store.storage.path).iterdir()) == sorted(
        [*before, Path(store.address(late)).name]
    )
    newer = save(store, 20, generation=GENERATION + 1)
    assert store.newest_whole() == newer
    assert not Path(store.address(late)).exists()
    assert not Path(store.address(first)).exists()


def test_a_deletion_that_fails_is_named_keeps_no_other_from_being_removed_and_is_tried_again(
    store, monkeypatch, caplog
):
    store.keep = 1
    stuck, free = save(store, 10), CheckpointId(GENERATION, 20)
    remove = store.storage.remove

    def refusing(folder, *names):
        if folder == Path(store.address(stuck)).name:
            raise OSError(errno.EACCES, "Permission denied", folder)
        remove(folder, *names)

    monkeypatch.setattr(store.storage, "remove", refusing)
    with caplog.at_level(logging.WARNING):
        save(store, free.step)
        newest = save(store, 30)
    assert store.newest_whole() == newest
    assert f"checkpoint_not_removed path={store.address(stuck)}" in caplog.text
    assert Path(store.address(stuck)).exists()
    assert not Path(store.address(free)).exists()
    monkeypatch.setattr(store.storage, "remove", remove)
    save(store, 40)
    assert not Path(store.address(stuck)).exists()


def test_what_was_half_removed_is_never_whole_and_goes_with_the_next(store, monkeypatch):
    """The manifest goes first; the shards, where the store then refuses, later."""
    store.keep = 1
    old = save(store, 10)
    remove = store.storage.remove

    def only_files(folder, *names):
        if not names:
            raise OSError(errno.EIO, "Input/output error", folder)
        remove(folder, *names)

    monkeypatch.setattr(store.storage, "remove", only_files)
    newest = save(store, 20)
    assert list(Path(store.address(old)).iterdir())
    monkeypatch.setattr(store.storage, "remove", remove)
    (Path(store.address(newest)) / "manifest.json").unlink()
    assert store.newest_whole() is None
    save(store, 30)
    assert not Path(store.address(old)).exists()
