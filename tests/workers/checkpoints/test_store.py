"""Checkpoints: whole or refused by name, newest first, old ones removed, of any number of ranks, no code in them."""

import json
import logging
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.workers.checkpoints.states import CPU, SIZES, TOKEN, assert_same, save, state
from thinwire.workers.checkpoints import CheckpointId, CheckpointRefused, CheckpointStore, Snapshot


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


def test_the_newest_is_found_and_older_ones_than_keep_are_gone(store):
    assert store.newest_whole() is None
    saved = [save(store, step) for step in (10, 20, 30)]
    assert store.newest_whole() == saved[-1]
    assert sorted(p.name for p in Path(store.storage.path).iterdir()) == [folder(store, w).name for w in saved[1:]]


DAMAGE = {
    "cut shard": lambda path: cut(path / "shard-00001-of-00002.safetensors"),
    "long shard": lambda path: append(path / "shard-00001-of-00002.safetensors"),
    "missing shard": lambda path: (path / "shard-00000-of-00002.safetensors").unlink(),
    "flipped byte": lambda path: flip(path / "shard-00000-of-00002.safetensors", -100),
    "flipped header": lambda path: flip(path / "shard-00001-of-00002.safetensors", 0),
    "swapped shards": lambda path: swap(path),
    "missing manifest": lambda path: (path / "manifest.json").unlink(),
    "torn manifest": lambda path: cut(path / "manifest.json"),
    "empty manifest": lambda path: (path / "manifest.json").write_bytes(b""),
    "no manifest": lambda path: (path / "manifest.json").write_text("[]"),
    "changed manifest": lambda path: replace(path / "manifest.json", '"num_steps": 17', '"num_steps": 18'),
    "future manifest": lambda path: replace(path / "manifest.json", '"format": 2', '"format": 99'),
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


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_torn_or_corrupt_one_is_refused_by_name_and_the_one_before_is_used(store, damage, caplog):
    before, torn = save(store, 10), save(store, 20)
    DAMAGE[damage](folder(store, torn))
    with caplog.at_level(logging.WARNING):
        assert store.newest_whole() == before
    assert f"checkpoint_refused path={store.address(torn)} reason=" in caplog.text
    with pytest.raises(CheckpointRefused, match="step-00000020"):
        store.load(torn, CPU)
    assert_same(store.load(before, CPU), state(10))


def test_reasons_name_the_file_and_what_is_wrong_with_it(store, caplog):
    for step, damage in enumerate(
        ("missing shard", "flipped byte", "cut shard", "future manifest", "missing manifest")
    ):
        DAMAGE[damage](folder(store, save(store, step + 1)))
    store.keep = 100
    with caplog.at_level(logging.WARNING):
        store.newest_whole()
    for reason in (
        "manifest.json is missing",
        "manifest.json has format 99, this version reads 2",
        "shard-00001-of-00002.safetensors has",
        "shard-00000-of-00002.safetensors does not match its checksum",
    ):
        assert reason in caplog.text, reason


def test_shards_that_do_not_add_up_make_no_checkpoint(store):
    which = CheckpointId(TOKEN, 10)
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
    first = save(store, 20, 3, token=TOKEN, content=state(1))
    dead = CheckpointId(TOKEN + 1, 20)
    store.deliver(Snapshot.take(dead, 1, 2, state(2)))
    assert store.newest_whole() == first
    again = save(store, 20, 2, token=TOKEN + 2, content=state(3))
    assert store.newest_whole() == again
    assert_same(store.load(again, CPU), state(3))
    assert not folder(store, first).exists()
    assert not folder(store, dead).exists()


def test_what_a_later_generation_went_back_behind_is_removed_and_never_what_it_went_back_to(store):
    store.keep = 3
    one, two, three = (save(store, step) for step in (10, 20, 30))
    flip(folder(store, three) / "shard-00000-of-00002.safetensors", 100)
    assert store.newest_whole() == two
    store.keep = 2
    again = save(store, 25, 3, token=TOKEN + 1)
    assert {p.name for p in Path(store.storage.path).iterdir()} == {folder(store, w).name for w in (two, again)}
    assert not folder(store, one).exists()


def test_a_write_that_was_cut_short_is_removed_by_the_next_that_succeeds(store):
    save(store, 10)
    dead, ahead = CheckpointId(TOKEN, 20), CheckpointId(TOKEN, 40)
    for which in (dead, ahead):
        store.deliver(Snapshot.take(which, 1, 2, state(2)))
    waited_for = CheckpointId(TOKEN, 25)
    store.deliver(Snapshot.take(waited_for, 1, 2, state(2)))
    which, content = CheckpointId(TOKEN, 30), state(3)
    snapshot = Snapshot.take(which, 0, 1, content)
    store.commit(snapshot, {0: store.deliver(snapshot)}, [which, waited_for])
    assert not folder(store, dead).exists()
    assert folder(store, waited_for).exists()
    assert folder(store, ahead).exists(), "another rank may be ahead of rank 0"


def test_a_token_is_larger_than_all_before_also_where_the_clock_went_back(store):
    now_ms = time.time() * 1000
    assert abs(store.draw_token() - now_ms) < 60_000
    future = round(now_ms) + 10**9
    save(store, 10, token=future)
    assert store.draw_token() == future + 1


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
        store.load(CheckpointId(TOKEN, 10), CPU)


def test_a_checkpoint_of_format_one_is_left_alone_and_not_read(store):
    old = Path(store.storage.path) / "step-00000030"
    old.mkdir(parents=True)
    (old / "manifest.json").write_text('{"format": 1}')
    assert store.newest_whole() is None
    assert save(store, 40) == store.newest_whole()
    save(store, 50), save(store, 60)
    assert old.exists()
