"""What a place of checkpoints is asked before a run begins, and what is said of one that will not do."""

import errno
import threading

import pytest
import torch

from tests.workers.checkpoints.states import save
from tests.workers.checkpoints.storages import Full, Raising
from tests.workers.small_job import Recording, small_spec
from thinwire.comm import PeerLost, run_threads
from thinwire.workers.checkpoints import CheckpointStore, storage
from thinwire.workers.checkpoints.storage import LocalStorage, StoreRefused, prove
from thinwire.workers.ranks import FixedRanks
from thinwire.workers.session.job import run_job
from thinwire.workers.session.training import Run


class Away(LocalStorage):
    """A place that fails for so many times as it is asked, or for ever."""

    def __init__(self, path, times):
        super().__init__(path)
        self.left = times

    def folders(self):
        if self.left:
            self.left -= 1
            raise OSError(errno.EIO, "Connection reset by peer")
        return super().folders()


class Forgetful(LocalStorage):
    """A place that gives back less than it was given."""

    def write(self, folder, name, chunks):
        super().write(folder, name, [b""])


class Silent(LocalStorage):
    """A place that does not answer."""

    def __init__(self, path):
        super().__init__(path)
        self.gate = threading.Event()

    def folders(self):
        assert self.gate.wait(60)
        return []


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(storage, "FIRST_PAUSE_S", 0.001)


def test_a_place_that_takes_checkpoints_is_left_as_it_was(tmp_path):
    prove(LocalStorage(tmp_path / "a"))
    assert list((tmp_path / "a").iterdir()) == []


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda path: Full(path, "probe"), "cannot be written to from .*No space left on device; make room there, or"),
        (lambda path: LocalStorage(path / "file" / "a"), "cannot be .* from .*Not a directory"),
        (lambda path: Forgetful(path), "cannot be read from .* 0 other ones came back"),
        (lambda path: Raising(path), "cannot be written to from .*ZeroDivisionError: a defect"),
        (lambda path: Away(path, -1), "cannot be listed from .*reset by peer; it was asked for 3 s: look whether"),
    ],
    ids=["full", "no folder", "forgetful", "defect", "away"],
)
def test_a_place_that_will_not_do_is_told_with_what_it_refused(tmp_path, made, words):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreRefused, match=words):
        prove(made(tmp_path), away_s=3)


def test_a_place_that_is_away_for_a_moment_is_asked_again(tmp_path):
    place = Away(tmp_path, 3)
    prove(place, away_s=60)
    assert place.left == 0


def test_a_place_that_does_not_answer_holds_nobody_up_for_longer(tmp_path):
    place = Silent(tmp_path)
    with pytest.raises(StoreRefused, match=r"cannot answer from .*not once; it was asked for 0\.05 s"):
        prove(place, away_s=0.05)
    place.gate.set()


def test_a_run_that_has_saved_goes_on_whatever_the_place_refuses_now(tmp_path):
    save(CheckpointStore(tmp_path, keep=1), 10)
    prove(Full(tmp_path, "probe"))


def test_a_rank_that_alone_cannot_save_is_the_one_that_fails(tmp_path, monkeypatch):
    first = threading.Lock()

    def proved(place):
        if first.acquire(blocking=False):
            raise StoreRefused("no checkpoint could be saved: a disk is full")

    monkeypatch.setattr("thinwire.workers.saving.prove", proved)

    def work(group):
        reporter = Recording(tmp_path)
        with pytest.raises((StoreRefused, PeerLost), match="a disk is full") as raised:
            run_job(small_spec(), Run(tmp_path, 0.0), FixedRanks(group), torch.device("cpu"), reporter)
        assert reporter.samples == []
        return raised.type.__name__

    assert sorted(run_threads(3, work)) == ["PeerLost", "PeerLost", "StoreRefused"]
