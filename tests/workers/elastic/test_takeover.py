"""A driver dies: the next one of the same job finds the workers training; without one they end, and leave nothing."""

import os
import signal
import time
from contextlib import contextmanager

import pytest

from tests.workers.elastic.conftest import alive, until

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def test_a_new_driver_adopts_the_workers_and_replaces_them_when_they_die(job):
    life = job(min=1, max=2)
    life.drive()
    first = life.wait_training(2)

    killed = time.time()
    os.kill(life.drivers[0].pid, signal.SIGKILL)
    life.drivers[0].wait()
    assert life.wait_training(2, since=killed + 3.0) == first  # on their own
    started = time.time()
    life.drive()
    life.wait_log("worker_adopted", times=2)
    print(f"adopted {time.time() - started:.1f} s after the new driver's start")
    assert life.wait_training(2, since=time.time()) == first
    os.kill(first[1], signal.SIGKILL)
    life.wait_replaced(first, slot=1)
    assert life.longest_pause_s(0, killed, first[0]) < 1.5
    assert life.stop() == 0, life.tail()
    life.nothing_is_left()


def test_a_second_driver_takes_the_job_from_the_first_which_leaves_the_workers_alone(job):
    life = job(min=1, max=2)
    first_driver = life.drive()
    first = life.wait_training(2)
    life.drive()
    life.wait_log("worker_adopted", times=2)
    assert first_driver.wait(60) == 1
    assert life.wait_training(2, since=time.time()) == first
    assert life.stop() == 0, life.tail()
    life.nothing_is_left()


def test_workers_whom_nobody_asks_for_are_told_and_end_and_the_janitor_frees_the_rest(job):
    life = job(min=1, max=2, lease_s=12.0, patience={"grace_s": 3.0})
    life.drive()
    first = life.wait_training(2)
    killed = time.time()
    os.kill(life.drivers[0].pid, signal.SIGKILL)
    life.drivers[0].wait()
    life.nothing_is_left(within_s=40)
    print(f"nothing left {time.time() - killed:.1f} s after the driver's death, lease 12 s, grace 3 s")
    told = {line["slot"]: line["time"] - killed for line in life.lines("left")}
    assert set(told) == set(first)  # the train functions were asked to leave in order, and could save
    assert min(told.values()) > 11.0


@contextmanager
def driver_and_membership_stopped(life):
    pids = [life.drivers[0].pid, life.pid_of("controller"), life.pid_of("membership")]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in reversed(pids):
            os.kill(pid, signal.SIGCONT)


def test_workers_that_neither_driver_nor_membership_answers_wait_and_are_found_again(job):
    """They can save nothing then, and one may be the last that holds the state."""
    life = job(min=1, max=2, lease_s=8.0, patience={"grace_s": 2.0, "alone_s": 120.0})
    life.drive()
    first = life.wait_training(2)
    with driver_and_membership_stopped(life):
        time.sleep(16.0)  # the lease, and the grace, and some
    assert life.wait_training(2, since=time.time()) == first
    assert not life.lines("left") + life.lines("lease")
    assert life.stop() == 0, life.tail()
    life.nothing_is_left()


def test_workers_that_nobody_answers_at_all_end(job):
    life = job(min=1, max=2, lease_s=60.0, patience={"grace_s": 2.0, "alone_s": 8.0})
    life.drive()
    first = life.wait_training(2)
    with driver_and_membership_stopped(life):
        until(lambda: not any(map(alive, first.values())), "the workers' end", 60.0)
    assert {line["slot"] for line in life.lines("lease")} == set(first)  # the train functions were told
    assert life.wait() == 1, life.tail()  # whoever restarts jobs hears of it
    life.nothing_is_left()
