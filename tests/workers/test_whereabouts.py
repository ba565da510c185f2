"""What a process says of its training thread from another one: where it is, by names alone."""

import contextlib
import threading

import pytest

from tests.workers.membership.members import Job, newcomer
from thinwire.comm.calls import Calls, Place
from thinwire.workers.membership.messages import Beat, from_member
from thinwire.workers.membership.seats import Doing
from thinwire.workers.whereabouts import LONGEST_FILE, LONGEST_NAME, OTHER_FRAMES, OWN_FRAMES, Whereabouts, stack_of


class Hung:
    """A thread that stands in a function of the user's until the test is over."""

    def __init__(self, function):
        self.where: Whereabouts
        self.go_on, self._there = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._run, args=(function,), daemon=True)
        self.thread.start()
        assert self._there.wait(30)

    def _run(self, function):
        self.where = Whereabouts()
        self.where.at("step 8")
        function(self)

    def hang(self):
        self._there.set()
        self.go_on.wait(60)


@pytest.fixture
def hung():
    made = []

    def make(function):
        made.append(Hung(function))
        return made[-1]

    yield make
    for one in made:
        one.go_on.set()
        one.thread.join(30)


def wait_for_the_lock(job):
    password = "hunter2"  # noqa: F841 - a value that must not be told
    job.hang()


def test_a_thread_that_hangs_is_told_by_the_users_functions_and_no_values(hung):
    told = hung(wait_for_the_lock).where.doing(0.0)
    assert told is not None
    assert told.what == "step 8"
    names = [frame.partition(" ")[0] for frame in told.stack]
    assert names[:3] == ["Hung.hang", "wait_for_the_lock", "Hung._run"]  # of this file, the innermost first
    assert "workers/test_whereabouts.py:" in told.stack[1]
    assert any("threading.py" in frame for frame in told.stack[3:])
    assert "hunter2" not in str(told)


def test_one_that_has_just_begun_something_else_tells_nothing(hung):
    where = hung(wait_for_the_lock).where
    assert where.doing(3600.0) is None
    assert where.doing(0.0).seconds >= 0


def test_the_collective_that_it_waits_in_is_told_with_its_call(hung):
    job = hung(wait_for_the_lock)
    calls = Calls()
    job.where._calls = calls
    calls.begin(Place(0, 1, "all_to_all", 16384))
    assert not job.where.doing(0.0).waits
    calls.now = "Adam.step() 8"
    calls.waits.add(Place(0, 1, "all_to_all", 16384))
    told = job.where.doing(0.0)
    assert told.waits
    assert told.begun == 1
    assert told.operation == "all_to_all of 16,384 bytes in Adam.step() 8"


def test_what_is_told_is_bounded_and_can_be_sent_whatever_the_stack(hung):
    def deep(job, left=300):
        if left:
            deep(job, left - 1)
        else:
            job.hang()

    name = "f" * 5000
    file = "/" + "d" * 3000 + "/bad\n\udc80name.py"
    scope = {"deep": deep}
    exec(compile(f"def {name}(job):\n    deep(job)\n", file, "exec"), scope)
    told = hung(scope[name]).where.doing(0.0)
    assert len(told.stack) <= OWN_FRAMES + OTHER_FRAMES
    assert max(map(len, told.stack)) <= LONGEST_NAME + LONGEST_FILE + 12
    beat = Beat(number=1, step=3, seconds=0.1, doing=told)
    assert from_member.validate_json(beat.model_dump_json()) == beat
    shallow = {"deep": lambda job: job.hang()}
    exec(compile(f"def {name}(job):\n    deep(job)\n", file, "exec"), shallow)
    told = hung(shallow[name]).where.doing(0.0)
    assert any("bad??name.py:2" in frame for frame in told.stack)
    beat = Beat(number=1, step=3, seconds=0.1, doing=told)
    assert from_member.validate_json(beat.model_dump_json()) == beat


def test_a_thread_that_has_ended_has_no_stack():
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()
    assert stack_of(thread.ident) == ()


def test_a_beat_goes_out_whatever_the_question_raises():
    with contextlib.closing(Job()) as job:
        job.serve(1, 1)
        member = job.member(0)
        asked = threading.Event()

        def raises(after_s: float) -> Doing:
            asked.set()
            raise KeyError("of the loop")

        member.doing = raises
        job.join([member], [newcomer()])
        assert asked.wait(30)
        assert member.wait_to_commit(30)
