"""Whom the schedule's faults reach, and whom they spare."""

import os

from thinwire.workers.drill import faults
from thinwire.workers.drill.faults import Faults
from thinwire.workers.drill.later import Later


class Job:
    """A job of this process alone, whose membership is away at times."""

    def __init__(self, *snapshots):
        self._snapshots = list(snapshots)

    def members(self):
        return self._snapshots.pop(0) if len(self._snapshots) > 1 else self._snapshots[0]


def test_the_last_holder_is_no_newcomer_to_a_membership_that_was_started_again(monkeypatch):
    killed = []
    monkeypatch.setattr(faults, "_signal", lambda pid, number: killed.append(pid) or True)
    holder = {"pid": os.getpid(), "slot": 0, "rank": 0, "step": 70, "host": "here"}
    job = Job(None, {"members": [holder], "waiting": []})
    some = Faults(job, 2, 0, Later(), kill_all=False)
    some._next, some._lots = 0.0, ["newcomer"]
    assert some.look() is None
    assert killed == []
    assert some.touches == []
