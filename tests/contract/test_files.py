"""What writes a file whole: who sees what, and what is left of a writer that fails."""

import os
import stat
from concurrent.futures import ThreadPoolExecutor

import pytest

from thinwire.contract.files import write_first, write_private, write_whole


@pytest.mark.parametrize("write", [write_whole, write_private])
def test_a_writer_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, write):
    path = tmp_path / "file"
    write(path, "old")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write(path, b"new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_private_file_is_its_owners_and_another_follows_the_umask(tmp_path):
    before = os.umask(0o022)
    try:
        write_private(tmp_path / "private", "x")
        write_whole(tmp_path / "shared", "x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "private").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "shared").stat().st_mode) == 0o644


def test_of_many_first_writers_one_stands(tmp_path):
    path = tmp_path / "first"
    with ThreadPoolExecutor(8) as pool:
        stood = list(pool.map(lambda number: write_first(path, str(number)), range(8)))
    assert stood.count(True) == 1
    assert path.read_text() == str(stood.index(True))
    assert list(tmp_path.iterdir()) == [path]
