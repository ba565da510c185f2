"""A job that stands still: who is named, when, with what, and how often. The clock is told."""

import json
from dataclasses import replace

import pytest

from tests.workers.membership.test_rules import Told
from thinwire.service.jobs.worker_reports import LARGEST_FIELDS
from thinwire.workers.membership.attendance import Timing
from thinwire.workers.membership.messages import Formed
from thinwire.workers.membership.seats import Doing, Identity, Limits
from thinwire.workers.membership.stuck import LONGEST, MOST_PLACES, NEWCOMER_S, PATIENT

TIMING = Timing(start_wait_s=0.2)
STUCK_S, STILL_S = TIMING.stuck_s, TIMING.still_s
WAITS = Doing("step 8", 9.0, "all_to_all of 16,384 bytes in Adam.step() 8", 20, True, ("wait (futures.py:1)",))
HANGS = Doing(
    "step 8", 9.0, "all_gather of 8 bytes in step 8", 17, False, ("load (train.py:12)", "<module> (train.py:40)")
)


class Job(Told):
    """Members that have made step 7 by second 1, and say from then on what they are at."""

    def __init__(self, *doing: Doing | None, longest_s: float = 0.1, most: int | None = None):
        super().__init__(1, most or len(doing), TIMING)
        self.doing, self.longest_s, self.step = list(doing), longest_s, 7
        for slot in range(len(doing)):
            identity = Identity(f"w{slot}", slot, "10.0.0.1", 100 + slot, f"box{slot}")
            assert self.rules.hello(identity, None, 0.0) is None
            self.join(f"w{slot}", 0.0)
        self.rules.tick(0.5)
        self.take()
        for id, seat in self.seats.items():
            self.say(id, Formed(generation=seat.generation), 0.5)
        self.now = 1.0
        self.pass_on(1.0)

    def pass_on(self, until, *silent):
        """Beats each second of all but the silent."""
        while self.now < until:
            for slot, doing in enumerate(self.doing):
                if slot not in silent and f"w{slot}" not in self.refusals:
                    self.beat(f"w{slot}", self.now, self.step, self.longest_s, doing)
            self.now += 1.0
            self.rules.tick(self.now)
            self.take()

    def said(self, kind):
        return [event.fields for event in self.events if event.kind == kind]


def test_who_does_not_wait_while_the_others_do_is_named_once_with_what_it_is_at():
    job = Job(WAITS, HANGS, WAITS)
    job.pass_on(STUCK_S)
    assert not job.said("waited_for")
    job.pass_on(STILL_S - 1)
    (one,) = job.said("waited_for")
    assert (one["slot"], one["rank"], one["host"], one["pid"], one["step"]) == (1, 1, "box1", 101, 7)
    assert one["told"].startswith(
        "worker 1 (rank 1, box1, pid 101) has not come to all_to_all of 16,384 bytes in Adam.step() 8 for 3"
    )
    assert one["told"].endswith("s; it is at step 8: load (train.py:12), <module> (train.py:40)")
    assert one["stack"] == ["load (train.py:12)", "<module> (train.py:40)"]
    assert not job.said("stands_still")


def test_where_it_is_not_known_who_waits_the_one_that_has_begun_fewest_collectives_is_named():
    ahead = Doing("step 8", 9.0, "all_gather of 8 bytes in Adam.step() 8", 20)
    job = Job(ahead, HANGS, ahead)
    job.pass_on(STUCK_S + 3)
    (one,) = job.said("waited_for")
    assert (one["slot"], one["operation"]) == (1, ahead.operation)


def test_a_job_whose_workers_all_hang_alike_is_told_once_and_nobody_is_named():
    job = Job(HANGS, HANGS, HANGS)
    job.pass_on(4 * STILL_S)
    assert not job.said("waited_for")
    (one,) = job.said("stands_still")
    (place,) = one["places"]
    assert place["workers"] == [f"worker {n} (rank {n}, box{n}, pid {100 + n})" for n in range(3)]
    assert (place["at"], place["stack"]) == (HANGS.what, list(HANGS.stack))
    assert "no step for 61 s, after step 7: worker 0 (rank 0, box0, pid 100), worker 1" in one["told"]
    assert "step 8: load (train.py:12), <module> (train.py:40)" in one["told"]


def test_a_step_ends_a_standstill_and_the_next_one_is_told_again():
    job = Job(HANGS, HANGS)
    job.pass_on(STILL_S + 3)
    job.step = 8
    job.pass_on(2 * STILL_S)
    assert len(job.said("stands_still")) == 1
    job.pass_on(2 * STILL_S + 10)
    assert [one["step"] for one in job.said("stands_still")] == [7, 8]


ENDS = replace(HANGS, what="the end of the run", at_end=True)


@pytest.mark.parametrize(
    ("doing", "longest_s", "limit_s"),
    [(HANGS, 100.0, LONGEST * 100.0), (HANGS, 0.0, PATIENT * STILL_S), (ENDS, 0.1, PATIENT * STILL_S)],
)
def test_long_pauses_the_first_step_and_the_end_are_borne(doing, longest_s, limit_s):
    """A step or an evaluation that has taken so long before; a first step, which may compile; a last checkpoint."""
    job = Job(doing, doing, longest_s=longest_s)
    job.pass_on(limit_s)
    assert not job.said("stands_still")
    job.pass_on(limit_s + 3)
    assert len(job.said("stands_still")) == 1


def test_a_job_that_trains_or_waits_for_workers_does_not_stand_still():
    job = Job(None, None)
    for second in range(1, 200):
        job.step = second
        job.pass_on(float(second))
    assert not job.said("stands_still")
    job.rules.set_limits(Limits(3, 3), job.now)
    for slot in range(2):
        job.join(f"w{slot}", job.now)
    job.pass_on(job.now + 3 * STILL_S)
    assert not job.said("stands_still")
    assert not job.said("waited_for")


def test_who_is_fenced_as_it_hangs_is_named_before_and_the_others_are_told_where_it_was():
    job = Job(HANGS, WAITS, most=2)
    job.join("w1", job.now)  # its collective has timed out, or somebody else was lost
    job.pass_on(TIMING.join_timeout_s + 5)
    kinds = job.kinds()
    assert kinds.index("waited_for") < kinds.index("fenced")
    (one,) = job.said("waited_for")
    assert one["operation"] == "the regroup after generation 1"
    words = "it hangs; it is at step 8: load (train.py:12), <module> (train.py:40)"
    assert words in job.refusals["w0"].why
    (lost,) = job.seats["w1"].lost
    assert words in lost.why


def test_one_that_is_not_heard_of_is_told_so_with_since_when():
    job = Job(HANGS, HANGS)
    job.pass_on(10.0)
    job.pass_on(STILL_S + 3, 0, 1)  # all are silent: the server may be cut off
    assert not job.said("waited_for")
    (one,) = job.said("stands_still")
    assert "not heard of for 5" in one["told"]
    assert "train.py" not in one["told"]


def test_a_newcomer_that_never_asks_for_its_seat_is_named():
    job = Job(None, most=2)
    assert job.rules.hello(Identity("late", 1, "10.0.0.2", 7, "box7"), None, job.now) is None
    came = job.now
    doing = Doing("its start, before it asks for a seat", 9.0, stack=("fetch (train.py:3)",))
    while job.now < came + NEWCOMER_S + 20:
        job.step += 1
        job.beat("late", job.now, None, 0.0, doing)
        job.pass_on(job.now + 1.0)
    (one,) = job.said("waited_for")
    assert one["told"].startswith("worker 1 (no rank, box7, pid 7) has not come to its seat for 30")
    assert "fetch (train.py:3)" in one["told"]


def test_what_is_told_of_many_workers_with_long_stacks_is_bounded():
    frames = tuple("x" * 120 for _ in range(10))
    many = [Doing(f"step {n} {'y' * 100}", 9.0, "z" * 200, 17, False, frames) for n in range(60)]
    job = Job(*many)
    job.pass_on(STILL_S + 3)
    (one,) = job.said("stands_still")
    assert len(json.dumps(one)) < LARGEST_FIELDS
    assert len(one["places"]) == MOST_PLACES
    assert "and 56 more places" in one["told"]
    alike = Job(*[many[0]] * 60)
    alike.pass_on(STILL_S + 3)
    (one,) = alike.said("stands_still")
    assert len(json.dumps(one)) < LARGEST_FIELDS
    assert one["places"][0]["more"] == 52
