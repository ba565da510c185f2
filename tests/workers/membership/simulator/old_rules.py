"""Rules as they were, each of which loses something: the simulator has to find out what."""

from __future__ import annotations

from tests.workers.membership.simulator.checkpoints import Checkpoint, Store
from tests.workers.membership.simulator.group import Group
from tests.workers.membership.simulator.job import Settings
from tests.workers.membership.simulator.worker import Worker
from thinwire.workers.membership.attendance import Silence, Timing
from thinwire.workers.membership.rules import Rules
from thinwire.workers.membership.seats import Limits


class Counted(Silence):
    """Whoever is silent is fenced, also where all are, because it is the server that is cut off."""

    def judge(self, least: int, now: float) -> None:
        """All that are silent."""
        self._fence([worker for worker in self._attendance.members() if worker.silent], now)


class SilenceCounts(Rules):
    """With that."""

    def __init__(self, limits: Limits, timing: Timing, now: float, *, after: int = 0) -> None:
        super().__init__(limits, timing, now, after=after)
        self._silence = Counted(self._attendance, now)


def by_clock(store: Store, worker: Worker, group: Group) -> int:
    """A token from the clock of rank 0's machine, larger than any that it sees."""
    return max([round(1000 * worker.machine.wall()), *((one.group.token or 0) + 1 for one in store.all())])


def always(worker: Worker, one: Checkpoint) -> bool:
    """A manifest is written whatever has become of the generation."""
    return True


OLD_RULES = {
    "none": Settings(),
    "deaf": Settings(forming_listens=False, timing=Timing(form_s=10.0, join_timeout_s=10.0)),
    "silence-counts": Settings(rules=SilenceCounts),
    "no-lease": Settings(rules=SilenceCounts, leased=False, timing=Timing(lease_s=10.0)),
    "tokens-by-clock": Settings(token=by_clock, may_save=always, store_s=40.0),
}
"""deaf: who forms its group hears nothing, and is fenced after 10 s. no-lease: members go on for ever without the
membership, and others are seated after 10 s."""
