"""A worker that computes longer than the others is named, by how long each waits; without one nobody is."""

import json
from collections import Counter

import pytest

from tests.workers.loop.elastic_job import LATE_S, ElasticJob
from thinwire.contract.run_folder import RunFolder
from thinwire.workers.membership.seats import Limits
from thinwire.workers.telemetry import history

STEPS = 55
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("late", [1, None])
def test_a_planted_sleep_on_one_worker_names_it_and_nobody_is_named_without(tmp_path, late):
    with ElasticJob(tmp_path, Limits(3, 3), steps=STEPS, pause_s=0.005) as job:
        if late is not None:
            job.delay(late)
        job.start(0, 1, 2)
        job.wait()
        steps = [sample for sample in history.read(RunFolder(tmp_path).history) if sample.step]
        shares = {worker: count / STEPS for worker, count in Counter(one.last_worker for one in steps).items()}
        named = [event["worker"] for event in job.events("slow_worker")]
        waited_for = json.loads((tmp_path / "summary.json").read_text())["waited_for"]
    print(shares)
    if late is None:
        assert (named, waited_for) == ([], None)
        return
    assert named == [late]
    assert shares.pop(late) > 0.9
    assert max(shares.values(), default=0.0) < 0.1
    assert waited_for["worker"] == late
    assert waited_for["seconds"] > 0.5 * LATE_S * STEPS
