"""What is made once is given to all, and a failure to none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.once import once


class Processes:
    """The part of TempPathFactory that is asked: a process of xdist has a folder of its own in that of the session."""

    def __init__(self, session: Path, process: str) -> None:
        self._own = session / process
        self._own.mkdir()

    def getbasetemp(self) -> Path:
        return self._own


def test_processes_side_by_side_get_what_the_first_has_made(tmp_path, monkeypatch):
    monkeypatch.setitem(os.environ, "PYTEST_XDIST_WORKER", "gw0")
    folders = []

    def make(folder):
        assert list(folder.iterdir()) == []
        folders.append(folder)
        return {"made": len(folders)}

    found = [once(Processes(tmp_path, name), "it", make) for name in ("gw0", "gw1", "gw2")]
    assert found == [{"made": 1}] * 3
    assert once(Processes(tmp_path, "gw3"), "another", make) == {"made": 2}


def test_who_asks_after_a_failure_tries_again_in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.setitem(os.environ, "PYTEST_XDIST_WORKER", "gw0")

    def fails(folder):
        (folder / "rest").touch()
        raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        once(Processes(tmp_path, "gw0"), "it", fails)
    assert once(Processes(tmp_path, "gw1"), "it", lambda folder: len(list(folder.iterdir()))) == 0
