"""Checkpoints: whole or refused by name, newest first, old ones removed, of any number of ranks, no code in them."""

import json
import logging
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.workers.checkpoints.states import CPU, GENERATION, SIZES, assert_same, save, state
from thinwire.workers.checkpoints import CheckpointId, CheckpointRefused, CheckpointStore, Snapshot, Superseded


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(tmp_path / "checkpoints", keep=2)


def folder(store, which):
    return Path(store.address(which))


@pytest.mark.parametrize("size", SIZES)
def test_what_any_number_of_ranks_wrote_comes_back_bit_for_bit(store, size):
    which = save(store, 100, size)
    assert store.newest_whole() == which
    assert_same(store.load(which, CPU), state(100))
    assert len(list(folder(store, which).glob("*.safetensors"))) == size


@pytest.mark.parametrize("size", SIZES)
def test_slices_are_even_and_a_checkpoint_is_hardly_larger_than_its_tensors(store, size):
    numel = 100_003
    content = state(0)
    content.flat["parameters"] = content.flat["vectors.m_N"] = torch.randn(numel)
    which = save(store, 10, size, content=content)
    shards = [path.stat().st_size for path in sorted(folder(store, which).glob("*.safetensors"))]
    total = sum(path.stat().st_size for path in folder(store, which).iterdir())
    held = sum(tensor.nbytes for tensor in (*content.flat.values(), *content.buffers.values()))
    assert held <= total <= 1.1 * held
    assert max(shards) - min(shards) < 4096


def test_a_shard_is_a_safetensors_file(store):
    which = save(store, 10, 3)
    data = (folder(store, which) / "shard-00001-of-00003.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    told = header["flat.vectors.m_N"]
    begin, end = told["data_offsets"]
    found = np.frombuffer(data[8 + length :][begin:end], dtype="<f4")
    assert told["dtype"] == "F32"
    assert np.array_equal(found, state(10).flat["vectors.m_N"][1009 // 3 : 2 * 1009 // 3].numpy())
    spans = sorted(told["data_offsets"] for name, told in header.items() if name != "__metadata__")
    assert [a for a, _ in spans] == [0, *(b for _, b in spans[:-1])], "no holes"
    assert spans[-1][1] == len(data) - 8 - length


DAMAGE = {
    "cut shard": (lambda path: cut(path / "shard-00001-of-00002.safetensors"), "shard-00001-of-00002.safetensors has"),
    "long shard": (lambda path: append(path / "shard-00001-of-00002.safetensors"), "its manifest says"),
    "missing shard": (
        lambda path: (path / "shard-00000-of-00002.safetensors").unlink(),
        "shard-00000-of-00002.safetensors is missing",
    ),
    "flipped byte": (
        lambda path: flip(path / "shard-00000-of-00002.safetensors", -100),
        "shard-00000-of-00002.safetensors does not match its checksum",
    ),
    "flipped header": (lambda path: flip(path / "shard-00001-of-00002.safetensors", 0), "does not match its checksum"),
    "swapped shards": (lambda path: swap(path), "shard-00000-of-00002.safetensors"),
    "missing manifest": (lambda path: (path / "manifest.json").unlink(), "manifest.json is missing"),
    "torn manifest": (lambda path: cut(path / "manifest.json"), "manifest.json is torn"),
    "empty manifest": (lambda path: (path / "manifest.json").write_bytes(b""), "manifest.json is torn"),
    "no manifest": (lambda path: (path / "manifest.json").write_text("[]"), "manifest.json says no format"),
    "changed manifest": (
        lambda path: replace(path / "manifest.json", '"num_steps": 17', '"num_steps": 18'),
        "manifest.json does not match its checksum",
    ),
    "future manifest": (
        lambda path: replace(path / "manifest.json", '"format": 2', '"format": 99'),
        "manifest.json has format 99, this version reads 2",
    ),
}


def cut(file):
    file.write_bytes(file.read_bytes()[:-7])


def append(file):
    file.write_bytes(file.read_bytes() + b"1234")


def flip(file, at):
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


def replace(file, old, new):
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def swap(path):
    one, other = (path / f"shard-0000{rank}-of-00002.safetensors" for rank in (0, 1))
    contents = one.read_bytes(), other.read_bytes()
    other.write_bytes(contents[0])
    one.write_bytes(contents[1])


@pytest.mark.parametrize(("damage", "reason"), DAMAGE.values(), ids=DAMAGE)
def test_a_torn_or_corrupt_one_is_refused_by_name_and_the_one_before_is_used(store, damage, reason, caplog):
    before, torn = save(store, 10), save(store, 20)
    damage(folder(store, torn))
    with caplog.at_level(logging.WARNING):
        assert store.newest_whole() == before
    assert re.search(f"checkpoint_refused path={store.address(torn)} reason=.*{re.escape(reason)}", caplog.text)
    with pytest.raises(CheckpointRefused, match="step-00000020"):
        store.load(torn, CPU)
    assert_same(store.load(before, CPU), state(10))


def test_shards_that_do_not_add_up_make_no_checkpoint(store):
    which = CheckpointId(GENERATION, 10)
    snapshots = [Snapshot.take(which, rank, 3, state(1)) for rank in range(3)]
    records = {snapshot.rank: store.deliver(snapshot) for snapshot in snapshots}
    with pytest.raises(ValueError, match="2 shards of 3 ranks"):
        store.commit(snapshots[0], {rank: records[rank] for rank in (0, 1)}, [])
    other = state(1)
    other.flat["parameters"] = torch.zeros(2000)
    records[1] = store.deliver(Snapshot.take(which, 1, 3, other))
    with pytest.raises(ValueError, match=r"do not hold flat.parameters of shape \[1009\] exactly once"):
        store.commit(snapshots[0], records, [])
    assert store.newest_whole() is None


def test_two_attempts_at_one_step_never_mix_and_the_later_is_used(store):
    """The first died after its manifest, or before it; either way its shards are in a folder of their own."""
    store.keep = 1
    first = save(store, 20, 3, generation=GENERATION, content=state(1))
    dead = CheckpointId(GENERATION + 1, 20)
    store.deliver(Snapshot.take(dead, 1, 2, state(2)))
    assert store.newest_whole() == first
    again = save(store, 20, 2, generation=GENERATION + 2, content=state(3))
    assert store.newest_whole() == again
    assert_same(store.load(again, CPU), state(3))
    assert not folder(store, first).exists()


def test_what_a_later_generation_went_back_behind_is_removed_and_never_what_it_went_back_to(store):
    store.keep = 3
    one, two, three = (save(store, step) for step in (10, 20, 30))
    flip(folder(store, three) / "shard-00000-of-00002.safetensors", 100)
    assert store.newest_whole() == two
    store.keep = 2
    again = save(store, 25, 3, generation=GENERATION + 1)
    assert {p.name for p in Path(store.storage.path).iterdir()} == {folder(store, w).name for w in (two, again)}
    assert not folder(store, one).exists()


def test_generations_number_on_from_what_is_there_and_no_two_that_begin_have_the_same(store):
    assert store.newest_generation() == 0
    assert [store.begin(None), store.begin(None)] == [1, 2]
    save(store, 10, generation=5)
    assert store.newest_generation() == 5
    assert store.begin(None) == 6
    assert store.begin(9) == 9
    for older in (8, 9):
        with pytest.raises(Superseded, match=f"generation 9 has been here before generation {older}"):
            store.begin(older)
    assert [path.name for path in Path(store.storage.path).glob("generation-*")] == ["generation-000000000009"]


def test_two_that_begin_at_the_same_moment_get_two_numbers(store, monkeypatch):
    """Each has listed the place before the other has written."""
    first, second = store, CheckpointStore(store.storage.path, keep=2)
    monkeypatch.setattr(second.storage, "folders", list)
    assert (first.begin(None), second.begin(None)) == (1, 2)
    monkeypatch.setattr(second.storage, "folders", lambda: ["generation-000000000002"])
    assert first.begin(3) == 3
    with pytest.raises(Superseded, match="another generation 3"):
        second.begin(3)


def test_a_job_that_an_earlier_version_began_goes_on_above_the_numbers_of_its_clock(store):
    drawn_at = 0x019AB3C4D5E6  # milliseconds since 1970
    old = save(store, 10, generation=drawn_at)
    assert store.begin(None) == drawn_at + 1
    new = save(store, 5, generation=drawn_at + 1)
    assert store.newest_whole() == new > old


def test_what_an_older_generation_has_not_saved_when_a_newer_goes_on_from_the_store_it_saves_no_more(store):
    older = save(store, 10)
    late = CheckpointId(GENERATION, 20)
    snapshot = Snapshot.take(late, 0, 1, state(2))
    receipts = {0: store.deliver(snapshot)}
    store.begin(GENERATION + 1)
    with pytest.raises(Superseded, match="generation 8 has gone on from the checkpoints here; this is 7"):
        store.commit(snapshot, receipts, [])
    assert store.newest_whole() == older


def test_of_two_writers_of_one_checkpoint_only_the_first_succeeds_and_its_own_is_loaded(store):
    """Two groups with one number, by a defect or a store that cannot tell: their parts never mix."""
    which = CheckpointId(GENERATION, 20)
    takes = [[Snapshot.take(which, rank, 2, state(mark), mark=mark) for rank in range(2)] for mark in (1, 2)]
    receipts = [{one.rank: store.deliver(one) for one in snapshots} for snapshots in takes]
    store.commit(takes[1][0], receipts[1], [])
    with pytest.raises(FileExistsError, match="another writer has made"):
        store.commit(takes[0][0], receipts[0], [])
    store.give_up(takes[0][0], (0, 1), [])
    assert store.newest_whole() == which
    assert_same(store.load(which, CPU), state(2))


def test_a_manifest_that_the_store_says_is_there_and_is_the_same_was_put_by_this_writer(store, monkeypatch):
    """The answer to the first try was lost, and the store's client tried again."""
    create = store.storage.create

    def twice(*arguments):
        create(*arguments)
        create(*arguments)

    monkeypatch.setattr(store.storage, "create", twice)
    assert save(store, 10) == store.newest_whole()


def test_a_checkpoint_whose_parts_were_removed_meanwhile_does_not_become_whole(store):
    which = CheckpointId(GENERATION, 20)
    snapshot = Snapshot.take(which, 0, 1, state(2))
    receipts = {0: store.deliver(snapshot)}
    store.storage.remove(folder(store, which).name)
    with pytest.raises(FileNotFoundError, match=r"shard-00000-of-00001\.safetensors in .*somebody has removed"):
        store.commit(snapshot, receipts, [])
    assert not folder(store, which).exists()


def test_what_is_no_checkpoint_is_left_alone(store):
    save(store, 10)
    root = Path(store.storage.path)
    for name in ("step-abc", "step-00000010.copy", "step-00000010-xyz", "notes"):
        (root / name).mkdir()
    (root / "step-00000011").write_text("a file")
    (folder(store, save(store, 20)) / "note.txt").write_text("the owner's")
    newest = save(store, 30)
    save(store, 40)
    assert store.newest_whole().step == 40
    names = {p.name for p in root.iterdir()}
    assert names >= {"step-abc", "step-00000010.copy", "step-00000010-xyz", "notes", "step-00000011"}
    assert folder(store, newest).exists()


def test_a_checkpoint_this_machine_does_not_see_is_explained(store):
    with pytest.raises(FileNotFoundError, match="all nodes share"):
        store.load(CheckpointId(GENERATION, 10), CPU)


def test_a_checkpoint_of_format_one_is_left_alone_and_not_read(store):
    old = Path(store.storage.path) / "step-00000030"
    old.mkdir(parents=True)
    (old / "manifest.json").write_text('{"format": 1}')
    assert store.newest_whole() is None
    assert save(store, 40) == store.newest_whole()
    save(store, 50), save(store, 60)
    assert old.exists()
