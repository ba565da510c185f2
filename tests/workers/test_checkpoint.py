"""Checkpoints: whole or refused by name, newest first, old ones removed, no code in them."""

import logging
import pickle

import pytest
import torch

from thinwire.workers.checkpoint import CheckpointFolder


@pytest.fixture
def folder(tmp_path):
    return CheckpointFolder(tmp_path / "checkpoints", keep=2)


def save(folder, *steps):
    for step in steps:
        folder.save(step, {"model": {"w": torch.full((100,), float(step))}})


def test_the_newest_is_found_and_older_ones_than_keep_are_gone(folder):
    assert folder.newest_whole() is None
    save(folder, 10, 20, 30)
    assert folder.newest_whole() == 30
    assert sorted(p.name for p in folder.path.iterdir()) == ["step-00000020", "step-00000030"]
    assert folder.load(30, torch.device("cpu"))["model"]["w"][0] == 30


@pytest.mark.parametrize("damage", ["flip", "cut", "no manifest", "torn manifest", "future"])
def test_a_torn_or_corrupt_one_is_refused_by_name_and_the_one_before_is_used(folder, damage, caplog):
    save(folder, 10, 20)
    state, manifest = (folder.path / "step-00000020" / name for name in ("state.pt", "manifest.json"))
    if damage == "flip":
        content = bytearray(state.read_bytes())
        content[len(content) // 2] ^= 1
        state.write_bytes(content)
    elif damage == "cut":
        state.write_bytes(state.read_bytes()[:-7])
    elif damage == "no manifest":
        manifest.unlink()
    elif damage == "torn manifest":
        manifest.write_text(manifest.read_text()[:20])
    else:
        manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 99'))
    with caplog.at_level(logging.WARNING):
        assert folder.newest_whole() == 10
    assert "step-00000020" in caplog.text


def test_a_write_that_was_cut_short_is_not_a_checkpoint(folder):
    save(folder, 10)
    partial = folder.path / ".step-00000020.partial"
    partial.mkdir()
    (partial / "state.pt").write_bytes(b"half")
    assert folder.newest_whole() == 10
    save(folder, 20)
    assert folder.newest_whole() == 20
    assert not partial.exists()


def test_what_is_no_checkpoint_is_left_alone(folder):
    save(folder, 10)
    for name in ("step-abc", "step-00000010.copy", "notes"):
        (folder.path / name).mkdir()
    save(folder, 20, 30)
    assert folder.newest_whole() == 30
    assert {p.name for p in folder.path.iterdir()} >= {"step-abc", "step-00000010.copy", "notes"}


def test_a_checkpoint_that_holds_code_is_not_loaded(folder):
    save(folder, 10)
    torch.save({"model": print}, folder.path / "step-00000010" / "state.pt")
    with pytest.raises(pickle.UnpicklingError, match="print"):
        folder.load(10, torch.device("cpu"))


def test_a_checkpoint_this_machine_does_not_see_is_explained(folder):
    with pytest.raises(FileNotFoundError, match="all nodes share"):
        folder.load(10, torch.device("cpu"))
