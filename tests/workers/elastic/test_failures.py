"""Whose is an error: what is borne, what ends the job, after how many workers, and in which words."""

import dataclasses
import pickle

import pytest

from thinwire.workers.elastic.failures import Failure, Failures, JobFailed, Others
from thinwire.workers.elastic.plan import Plan
from thinwire.workers.elastic.worker_side import Failed
from thinwire.workers.membership.seats import Limits

PLAN = Plan(job="j", secret="x" * 16, limits=Limits(1, 4))


class Job:
    """Failures of a job of four slots, one after another. The clock goes on by a second at each."""

    def __init__(self):
        self.failures, self.now = Failures(PLAN), 0.0

    def fails(
        self, slot, step, generation=1, others=(), at_step=None, enough=True, finished=False, why="ValueError: no"
    ):
        self.now += 1.0
        kind, message = why.split(": ")
        new = Failure(slot, f"host-{slot}", Failed(kind, message, step, generation), self.now)
        job = Others(others, step if at_step is None else at_step, enough, finished)
        self.failures.judge([new], job)


def test_an_error_that_others_get_past_is_the_workers():
    job = Job()
    job.fails(1, step=50, others=[0, 2])
    job.fails(2, step=60, generation=2, others=[0, 1])
    job.fails(0, step=70, generation=3, others=[1, 2])
    assert job.failures.pause_s(1) == 0.0


def test_an_error_of_every_worker_is_the_jobs_at_once_in_its_own_words():
    job = Job()
    job.fails(1, step=50, others=[0], why="KeyError: the bug")
    with pytest.raises(JobFailed) as raised:
        job.fails(0, step=50, others=[1], why="RuntimeError: what followed")  # slot 1 is being filled again
    assert (raised.value.kind, raised.value.message, raised.value.step) == ("KeyError", "the bug", 50)
    assert str(pickle.loads(pickle.dumps(raised.value))) == "KeyError: the bug"


def test_what_all_ranks_had_is_the_jobs_whoever_is_on_the_way():
    error = Failed("NonFiniteInput", "all of it", 50, 3, of_all=True)
    with pytest.raises(JobFailed, match="all of it"):
        Failures(PLAN).judge([Failure(0, "host", error, 1.0)], Others([0, 1, 2], 50, enough=True))


def test_before_anything_was_committed_all_that_are_there_decide_however_few_they_are():
    with pytest.raises(JobFailed, match="no"):
        Job().fails(0, step=0, generation=0, enough=False)
    job = Job()
    job.fails(0, step=0, generation=0, others=[1, 2], enough=False)
    job.fails(1, step=0, generation=0, others=[0, 2], enough=False)
    with pytest.raises(JobFailed):
        job.fails(2, step=0, generation=0, others=[0, 1], enough=False)


def test_a_worker_alone_is_started_again_once_and_where_it_fails_again_the_job_has_failed():
    job = Job()
    job.fails(0, step=50)
    job.fails(0, step=90, generation=2)  # it got past that
    with pytest.raises(JobFailed):
        job.fails(0, step=90, generation=3)


def test_a_step_in_which_workers_of_three_generations_failed_is_the_jobs():
    job = Job()
    job.fails(3, step=50, others=[0, 1, 2], generation=7)
    job.fails(2, step=50, others=[0, 1], generation=8)
    with pytest.raises(JobFailed, match=r"no \(3 generations .* step 51.* the last was worker 1 on host-1\)"):
        job.fails(1, step=50, others=[0, 2, 3], generation=9)
    job = Job()
    for slot in (1, 2, 3):  # three at once, as when a rack loses its file system
        job.fails(slot, step=50, others=[0], generation=7)


def test_a_slot_that_fails_again_and_again_ends_the_job_and_is_named():
    job = Job()
    for number in range(3):
        job.fails(1, step=50 + number, generation=1 + number, others=[0, 2])
    with pytest.raises(JobFailed) as raised:
        job.fails(1, step=60, generation=9, others=[0, 2], why="OSError: No space left on device")
    assert raised.value.kind == "WorkerKeepsFailing"
    for words in ("slot 1", "4 times within 60 minutes", "the 3 that", "worker 1 on host-1: OSError: No space left"):
        assert words in raised.value.message


def test_what_failed_long_ago_is_forgotten():
    job = Job()
    for number in range(20):
        job.now += PLAN.failures_s / 3
        job.fails(1, step=50 + number, generation=1 + number, others=[0, 2])


def test_a_newcomer_that_cannot_begin_costs_a_job_that_trains_nothing_but_tries():
    job, pauses = Job(), []
    for _ in range(12):
        job.fails(3, step=0, generation=0, others=[0, 1, 2], at_step=50)
        pauses.append(job.failures.pause_s(3))
    assert pauses == [0.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 300.0, 300.0, 300.0]
    with pytest.raises(JobFailed, match="slot 3"):  # which now waits for it
        job.fails(3, step=0, generation=0, others=[0, 1], at_step=50, enough=False)


def test_the_next_one_of_a_worker_that_was_fenced_again_waits_longer():
    job = Job()
    for number in range(4):
        job.failures.fenced(Failure(2, "host-2", Failed("Fenced", "nobody reaches it"), float(number)))
    assert (job.failures.pause_s(2), job.failures.pause_s(1)) == (8.0, 0.0)


def test_a_fault_that_moves_from_worker_to_worker_ends_the_job():
    job = Job()
    for number in range(12):
        job.fails(number, step=50 + number, generation=1 + number, others=[100])
    with pytest.raises(JobFailed, match="13 times within 60 minutes"):
        job.fails(12, step=70, generation=50, others=[100])


def test_after_the_end_of_the_training_no_other_worker_can_mend_it():
    with pytest.raises(JobFailed, match="disk"):
        Job().fails(0, step=100, others=[], finished=True, why="OSError: the disk is full")


def test_who_failed_before_the_others_came_to_the_end_without_it_does_not_end_the_job():
    left = [Failure(slot, "host", Failed("ReplicasDiffer", "a bit", 100, 3), 1.0) for slot in (0, 1)]
    Failures(PLAN).judge(left, Others([], 100, enough=True, finished=True, generation=4))
    with pytest.raises(JobFailed, match="a bit"):
        Failures(PLAN).judge(left, Others([], 100, enough=True, finished=True, generation=3))


def failures(most: int) -> Failures:
    return Failures(dataclasses.replace(PLAN, early_s=30.0, max_early_deaths=most))


def test_more_early_deaths_of_one_slot_than_are_borne_end_the_job_with_the_last_cause():
    found = failures(2)
    found.died(0, 1.0, "first")
    found.died(1, 1.0, "another slot")
    found.died(0, 1.0, "second")
    with pytest.raises(JobFailed, match=r"slot 0 died 3 times in a row within 30 s.*the 2 that.*last: third") as raised:
        found.died(0, 1.0, "third")
    assert raised.value.kind == "WorkersKeepDying"


def test_what_a_job_can_do_without_ends_it_never_and_is_tried_ever_later():
    found = failures(2)
    for _ in range(20):
        found.died(0, 1.0, "its machine", spared=True)
    assert found.pause_s(0) == 300.0
    with pytest.raises(JobFailed):  # now the job waits for it
        found.died(0, 1.0, "its machine")


def test_a_worker_that_lived_long_ends_the_row():
    found = failures(1)
    for _ in range(5):
        found.died(0, 1.0, "early")
        found.died(0, 31.0, "late")
    assert found.pause_s(0) == 0.0


def test_the_first_replacement_waits_for_nothing_and_further_ones_longer_and_longer():
    found, pauses = failures(100), []
    for _ in range(8):
        pauses.append(found.pause_s(0))
        found.died(0, 1.0, "early")
    assert pauses == [0.0, 0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0]
