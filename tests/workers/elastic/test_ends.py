"""How an elastic job ends: by an error that would come again, by too many deaths, by a signal."""

import contextlib
import os
import signal
import time

import pytest

from tests.workers.elastic.conftest import until

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def test_a_slot_that_keeps_dying_ends_the_job_and_says_so(job):
    life = job(min=1, max=1, patience={"max_early_deaths": 2})
    (life.run_dir / "die-0").touch()
    life.drive()
    assert life.wait() == 1
    assert "slot 0 died 3 times in a row within 30 s of its start, more than the 2 that are borne" in life.log()
    life.nothing_is_left()


def test_an_exception_of_a_train_function_is_no_death_and_ends_the_job(job):
    life = job(min=1, max=2)
    (life.run_dir / "raise-1").touch()
    life.drive()
    assert life.wait() == 1
    assert "ValueError: slot 1 was told to raise" in life.log()
    assert "worker_lost" not in life.log()
    life.nothing_is_left()


def test_the_death_of_all_starts_all_again_as_often_as_max_failures_allows(job):
    life = job(min=2, max=2, max_failures=1)
    life.drive()
    first = life.wait_training(2)
    killed = time.time()
    for pid in first.values():
        os.kill(pid, signal.SIGKILL)
    second = life.wait_training(2, since=killed + 1.0)
    print(f"all started again after {time.time() - killed:.1f} s")
    assert not set(first.values()) & set(second.values())
    for pid in second.values():
        os.kill(pid, signal.SIGKILL)
    assert life.wait() == 1
    assert "WorkerGroupError" in life.log()
    life.nothing_is_left()


def test_a_process_that_hangs_is_replaced_when_the_membership_has_counted_it_out(job):
    life = job(min=1, max=2, patience={"leave_s": 2.0})
    life.drive()
    first = life.wait_training(2)
    stopped = time.time()
    os.kill(first[1], signal.SIGSTOP)
    try:
        life.wait_replaced(first, slot=1)
        print(f"a stopped process was replaced after {time.time() - stopped:.1f} s")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(first[1], signal.SIGKILL)
    assert life.stop() == 0, life.tail()
    life.nothing_is_left()


def test_a_job_outlives_its_membership_actor_waits_for_resources_and_ends_by_a_signal(job):
    life = job(min=1, max=2)
    life.drive()
    first = life.wait_training(2)
    killed = time.time()
    before = life.pid_of("membership")
    os.kill(before, signal.SIGKILL)
    until(lambda: life.pid_of("membership") not in (None, 0, before), lambda: life.tail())
    until(lambda: life.membership("snapshot")["status"] == "training", lambda: life.tail())
    assert life.wait_training(2, since=time.time()) == first
    assert max(life.longest_pause_s(slot, killed, pid) for slot, pid in first.items()) < 1.5

    asked = time.time()
    life.membership("set_limits", 1, 6)  # the cluster has four CPUs
    four = life.wait_training(4, since=asked)
    until(lambda: sorted(life.groups().values()) == ["CREATED"] * 4 + ["PENDING"] * 2, lambda: str(life.groups()))
    os.kill(four[2], signal.SIGKILL)
    life.wait_replaced(four, slot=2)  # while others wait
    life.membership("set_limits", 1, 4)
    until(lambda: list(life.groups().values()) == ["CREATED"] * 4, lambda: str(life.groups()))

    ended = time.time()
    life.drivers[0].terminate()
    assert life.wait() != 0
    life.nothing_is_left()
    print(f"nothing left {time.time() - ended:.1f} s after SIGTERM")
