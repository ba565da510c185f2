"""Whom the schedule's faults reach, and whom they spare."""

from unittest.mock import Mock

import pytest

from thinwire.tools.drill import faults
from thinwire.tools.drill.cuts import Later
from thinwire.tools.drill.faults import Faults


class Job:
    """A job of this process alone, whose membership is away at times."""

    def __init__(self, *snapshots, run_dir=None):
        self._snapshots, self.run_dir = list(snapshots), run_dir

    def members(self):
        return self._snapshots.pop(0) if len(self._snapshots) > 1 else self._snapshots[0]


def member(slot, pid):
    return {"pid": pid, "slot": slot, "rank": slot, "step": 70, "host": "here"}


@pytest.fixture
def killed(monkeypatch):
    pids = []
    monkeypatch.setattr(faults, "_signal", lambda pid, number: pids.append(pid) or True)
    monkeypatch.setattr(faults, "lives", lambda pid: True)
    return pids


def test_who_was_told_to_go_is_not_the_one_that_is_spared(killed):
    both = {"members": [member(0, 11), member(1, 12)], "waiting": []}
    some = Faults(Job(both), 2, 0, Later(), kill_all=False)
    some._next, some._lots = 0.0, ["terminate"]
    assert some.look() is not None
    some._next, some._lots = 0.0, ["kill"]
    assert some.look() is None
    assert len(killed) == 1


@pytest.mark.parametrize(("left", "spared"), [([], True), ([member(1, 12), member(0, 11)], False)])
def test_nobody_is_killed_in_a_save_whose_other_holder_has_left_meanwhile(killed, monkeypatch, tmp_path, left, spared):
    monkeypatch.setattr(faults, "_entries", Mock(side_effect=[0, 1]))
    both = {"members": [member(0, 11), member(1, 12)], "waiting": []}
    some = Faults(Job(both, {"members": left}, run_dir=tmp_path), 2, 0, Later(), kill_all=False)
    some._next, some._lots = 0.0, ["in a save"]
    assert (some.look() is None) is spared
    assert len(killed) == (0 if spared else 1)


def test_the_last_holder_is_no_newcomer_to_a_membership_that_was_started_again(killed):
    job = Job(None, {"members": [member(0, 11)], "waiting": []})
    some = Faults(job, 2, 0, Later(), kill_all=False)
    some._next, some._lots = 0.0, ["newcomer"]
    assert some.look() is None
    assert killed == []
    assert some.touches == []
