"""A worker dies in the middle of a planned change, at whatever line it is: the others go on, and none goes back."""

import pytest

from tests.workers.loop.elastic_job import ElasticJob
from tests.workers.loop.test_elastic_loop import ADAM
from thinwire.contract.run_folder import RunFolder
from thinwire.workers.membership.seats import Limits
from thinwire.workers.telemetry import history

STEPS, BEFORE = 60, 5
"""So many that the change is still to come when it has been planned anew after the death, at a later step each time."""
EVERY_LINES = 60
"""Of about 650 of whoever leaves: its report, R handed over, the vote whether all leave, goodbye, its checkpoint."""
WHO = [(1, 1), (0, 0), (0, 1)]
"""Who dies, and who leaves."""
CASES = [(1, 1, 300), *((*who, at) for who in WHO for at in range(20, 640, EVERY_LINES))]


@pytest.mark.parametrize(
    ("victim", "leaver", "line"),
    [pytest.param(*case, marks=[pytest.mark.slow] if number else []) for number, case in enumerate(CASES)],
)
def test_whoever_dies_in_a_planned_change_holds_up_nobody(tmp_path, victim, leaver, line):
    with ElasticJob(
        tmp_path,
        Limits(1, 3),
        steps=STEPS,
        optimizer={**ADAM, "warmup": 2},
        checkpoint={"every_steps": 5},
        server={"start_wait_s": 300.0},
    ) as job:
        job.allow(BEFORE)
        job.die_at_line(victim, line)
        job.start(0, 1, 2)
        job.until(lambda: job.server.snapshot().last_step == BEFORE, limit_s=200.0)
        job.server.dismiss(leaver, "as planned")
        job.until(lambda: any(one.kind == "proposed" for one in job.said))
        job.allow(STEPS)
        job.wait(limit_s=200.0)
        assert ":" in job.lines(victim), "it did not come to that line"
        assert job.regroups()[-1] == 3 - len({victim, leaver})
        for slot in range(3):
            steps = [step for _, of, _, step in job.commits() if of == slot]
            assert steps == sorted(steps)
        assert (tmp_path / "summary.json").exists()
        samples = history.read(RunFolder(tmp_path).history)
        assert [sample.step for sample in samples] == list(range(STEPS + 1))


@pytest.mark.slow
def test_whoever_has_left_and_dies_while_it_owes_its_part_of_a_checkpoint_is_not_waited_for(tmp_path):
    """It has said goodbye, so the membership does not hear that it dies. Its system does, and says so."""
    with ElasticJob(
        tmp_path,
        Limits(1, 3),
        steps=2 * BEFORE + 2,
        optimizer={**ADAM, "warmup": 2},
        checkpoint={"every_steps": BEFORE},
        server={"start_wait_s": 300.0},
    ) as job:
        job.allow(BEFORE)
        job.hold(1)
        job.start(0, 1, 2)
        job.until(lambda: job.server.snapshot().last_step == BEFORE, limit_s=200.0)
        job.server.dismiss(1, "as planned")
        job.until(lambda: any(one.kind == "proposed" for one in job.said))
        job.allow(2 * BEFORE + 2)
        job.until(lambda: any(one.kind == "left" for one in job.said))
        job.kill(1)
        job.wait(limit_s=200.0)
        assert job.regroups() == [2]
        (failed,) = job.events("checkpoint_failed")
        assert failed["step"] == BEFORE
        assert failed["reason"].endswith("worker 1 (rank 1) has left, and its process has ended")
        assert [one["step"] for one in job.events("checkpoint_saved")] == [2 * BEFORE, 2 * BEFORE + 2]
