"""A script that hangs, on one worker and on all: the job says who is where, by the function of the script."""

import contextlib
import json

import pytest

from tests.workers.session.script_job import ScriptJob
from thinwire.contract.reports import EventKind
from thinwire.contract.run_folder import RunFolder
from thinwire.workers.main import MembershipWatch
from thinwire.workers.membership.seats import Limits
from thinwire.workers.run_place import Place

SERVER = {"stuck_s": 4.0, "still_s": 8.0}
STEPS = 4000


class Driver:
    """What the driver of the job has told."""

    def __init__(self, folder):
        self._file = RunFolder(folder).events

    def told(self, kind):
        """Events that have the script's function in them: on a busy machine the start may be told of too."""
        lines = self._file.read_text().splitlines(keepends=True) if self._file.exists() else []
        found = [json.loads(line) for line in lines if line.endswith("\n") and "wait_for_the_lock" in line]
        return [one for one in found if one["kind"] == kind]


def lock(job, rank, step):
    """Let this rank hang from that step on."""
    partial = job.run_dir / f"locked-{rank}.new"
    partial.write_text(str(step))
    partial.replace(job.run_dir / f"locked-{rank}")


@pytest.mark.slow
def test_one_worker_that_hangs_and_all_that_hang_are_told_by_the_line_of_the_script(tmp_path):
    folder = tmp_path / "driver"
    folder.mkdir()
    with ScriptJob(tmp_path / "job", Limits(2, 2), "hangs.py", STEPS, steps=STEPS, server=SERVER) as job:
        watch = MembershipWatch(Place(folder), lambda: job.server.snapshot().model_dump(mode="json"))
        with contextlib.closing(watch):
            driver = Driver(folder)
            for rank in range(2):
                lock(job, rank, STEPS)
            job.start(0, 1)
            job.until_step(5)
            lock(job, 1, 0)
            job.until(lambda: driver.told(EventKind.WORKER_STUCK))
            (stuck,) = driver.told(EventKind.WORKER_STUCK)
            fields = stuck["fields"]
            assert (fields["rank"], fields["pid"]) == (1, job.workers[1].pid)
            assert fields["stack"][0].startswith("wait_for_the_lock (scripts/hangs.py:")
            assert fields["stack"][1].startswith("<module> (scripts/hangs.py:")
            assert f"in Adam.step() {stuck['step'] + 1} for " in fields["told"]
            assert job.workers[1].is_alive()

            lock(job, 1, STEPS)
            job.until_step(stuck["step"] + 5)
            last = job.server.snapshot().last_step + 100
            for rank in range(2):
                lock(job, rank, last + 1)
            job.until(lambda: [one for one in driver.told(EventKind.STALLED) if one["step"] == last])
            stalled = driver.told(EventKind.STALLED)[-1]
            (place,) = stalled["fields"]["places"]
            assert len(place["workers"]) == 2
            assert place["stack"][0].startswith("wait_for_the_lock (scripts/hangs.py:")
            assert place["at"] == f"step {last + 1}"
            assert len(driver.told(EventKind.WORKER_STUCK)) == 1
